"""The mistakes of a classifier for a small file: how often it confuses which classes, and its most confident errors."""

import numpy as np

from vit_jax import UserError
from vit_jax.data import Preprocessor
from vit_jax.data.images import resize_pixels
from vit_jax.data.sources import Source
from vit_jax.evals import scores
from vit_jax.evals.predictions import Predictions

MAX_MISTAKES = 24  # images that are kept
SIDE = 128  # pixels: the largest side of a kept image


def find_mistakes(counted: Predictions, loss: str, source: Source, preprocess: Preprocessor) -> dict[str, np.ndarray]:
    """Returns the arrays of the file. Images without a label are left out.

    Args:
        counted: the predictions for all images of the source.
        loss: the loss of the training, "softmax" or "sigmoid", which turns logits into probabilities.
        source: the images.
        preprocess: the preprocessing of the images for the model.

    Returns:
        Two arrays count all images: `pairs`, whose rows are label, prediction and number of images, and `names`, the
        names of the classes. The others have one row for each of the (at most 24) wrongly classified images with the
        highest confidence, in descending order: `images`, the name of the image in the data; `pixels`, uint8
        [images, height, width, 3], as the model reads the image, scaled down to at most 128 pixels a side; `labels`;
        `predictions`; and `confidences`, the probability of the prediction.

    Raises:
        UserError: images have several labels, or an image cannot be read.
    """
    logits, labels = counted.logits, counted.labels
    if labels.ndim > 1:
        raise UserError("--save=mistakes needs data with one label per image.")
    predictions, confidences = logits.argmax(axis=1), scores.top_confidences(logits, loss)
    known = labels >= 0
    pairs, numbers = np.unique(np.stack([labels, predictions], axis=1)[known], axis=0, return_counts=True)
    wrong = np.flatnonzero(known & (predictions != labels))
    wrong = wrong[np.argsort(-confidences[wrong], kind="stable")][:MAX_MISTAKES]
    shape = (len(wrong), *small_size(*preprocess.shape[:2]), 3)
    pixels = [read_small(source, preprocess, index) for index in wrong.tolist()]
    return {
        "pairs": np.column_stack([pairs, numbers]).astype(np.int32),
        "names": np.array(counted.names, str),
        "images": np.array([source.example_name(index) for index in wrong.tolist()], str),
        "pixels": np.array(pixels, np.uint8).reshape(shape),
        "labels": labels[wrong],
        "predictions": predictions[wrong],
        "confidences": confidences[wrong],
    }


def read_small(source: Source, preprocess: Preprocessor, index: int) -> np.ndarray:
    """Returns the pixels of an image as the model reads it, scaled down to at most `SIDE` pixels a side."""
    pixels = np.asarray(preprocess.apply_ops(source[index]["image"], np.random.default_rng(0)))
    return resize_pixels(pixels, *small_size(*pixels.shape[:2]), "area", antialias=False)


def small_size(height: int, width: int) -> tuple[int, int]:
    """Returns height and width, both divided by the same number if one of them is larger than `SIDE`."""
    scale = min(1, SIDE / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))
