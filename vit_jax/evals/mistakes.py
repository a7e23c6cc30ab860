"""What a classifier takes for what, and the images that it gets wrong with most confidence, as a small file."""

import numpy as np

from vit_jax import UserError
from vit_jax.data import Preprocessor
from vit_jax.data.images import resize_pixels
from vit_jax.data.sources import Source
from vit_jax.evals import scores
from vit_jax.evals.predictions import Predictions

MOST = 24  # images that are kept
SIDE = 128  # pixels: the largest side of a kept image


def find_mistakes(counted: Predictions, loss: str, source: Source, preprocess: Preprocessor) -> dict[str, np.ndarray]:
    """Returns the arrays of the file; images without a label are left out.

    `pairs` are rows of label, prediction and number of images, and `names` those of the classes. Of the wrong images
    with most confidence, first the most: `images`, their names in the data; `pixels`, uint8 [images, height, width, 3],
    as the model reads them; `labels`, `predictions` and `confidences`, the probabilities of the predictions.

    Args:
        counted: of all images.
        loss: of the training, from which probabilities follow.
        source: of the images.
        preprocess: what the model reads of them.

    Raises:
        UserError: images have several labels, or one cannot be read.
    """
    logits, labels = counted.logits, counted.labels
    if labels.ndim > 1:
        raise UserError("mistakes need one label an image.")
    predictions, confidences = logits.argmax(axis=1), scores.top_confidences(logits, loss)
    known = labels >= 0
    pairs, numbers = np.unique(np.stack([labels, predictions], axis=1)[known], axis=0, return_counts=True)
    wrong = np.flatnonzero(known & (predictions != labels))
    wrong = wrong[np.argsort(-confidences[wrong], kind="stable")][:MOST]
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
    """Returns an image as the model reads it, but not larger than `SIDE`."""
    pixels = np.asarray(preprocess.apply_ops(source[index]["image"], np.random.default_rng(0)))
    return resize_pixels(pixels, *small_size(*pixels.shape[:2]), "area", antialias=False)


def small_size(height: int, width: int) -> tuple[int, int]:
    """Returns height and width, both divided by the same number if one is larger than `SIDE`."""
    scale = min(1, SIDE / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))
