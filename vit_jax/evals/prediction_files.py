"""Saves features, predictions or mistakes as .npz files, and the confusion matrix as CSV and as a picture.

The mistakes of a classifier are a small file: how often it confuses which classes, and its most confident errors.
"""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jaxtyping import Int64
from ml_collections import ConfigDict

from vit_jax import UserError, data, encode_text, user_errors
from vit_jax.config import EVAL_KINDS
from vit_jax.data import Preprocessor
from vit_jax.data.images import resize_pixels
from vit_jax.data.sources import Source, divide_folds, parse_split
from vit_jax.evals import scores
from vit_jax.evals.logit_metrics import Predictions, map_predictions
from vit_jax.evals.outputs import OutputCache, compute_outputs, count_nonfinite, refuse_nonfinite
from vit_jax.evals.regression import undo_scale
from vit_jax.inference import Inference
from vit_jax.model import Model
from vit_jax.storage import atomic_write
from vit_jax.tree import ArrayTree

MOST_CLASSES = 2000  # a confusion matrix of more classes is not written whole
MAX_MISTAKES = 24  # images that are kept
SIDE = 128  # pixels: the largest side of a kept image


def save_outputs(
    what: str,
    folder: Path,
    config: ConfigDict,
    program: Inference,
    params: ArrayTree,
    cache: OutputCache,
    step: int | None = None,
) -> list[str]:
    """Writes files `<evaluation>.<split>.<what>` for each split that the evaluations read, on the first process.

    The file of features or predictions is an .npz with `names` of the images, `labels`, `class_names` if they are
    known, and `features` (the model's pre_logits), `logits` or, of a regression, the predicted `numbers`, float32, in
    the order of the data. The file of mistakes
    is an .npz with the arrays of `find_mistakes`, the `step` (-1 if unknown) and the `split`. The confusion matrix is a
    .csv, see `count_confusion`, and a .png if matplotlib is installed.

    Args:
        what: "features" of all evaluations; "predictions" of those of the head; "confusion" or "mistakes" of those of
            a classifier.
        folder: the folder to write to; created if it does not exist.
        config: the configuration with the evaluations.
        program: the functions of the model.
        params: the parameters, on the devices.
        cache: a cache of outputs with these parameters; what is computed is stored there.
        step: the step of the run that the parameters are from, if any.

    Returns:
        The paths of the files that this process wrote; empty on all processes but the first.

    Raises:
        UserError: images have several labels, an image cannot be read, outputs are not finite, or the folder cannot be
            written to.
    """
    if jax.process_index() == 0:
        with user_errors(f"cannot write to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)  # before anything is computed
    kind = "features" if what == "features" else "logits"
    written = list[str]()
    for (name, split), batches in list_parts(config, program, what).items():
        outputs, labels = compute_outputs(program, kind, params, batches, cache)
        refuse_nonfinite(f"evals.{name}: the {kind}", count_nonfinite(outputs), len(outputs))
        if jax.process_index() > 0:
            continue
        start = folder / f"{name}.{split}.{what}"
        if what == "confusion":
            written += write_confusion(start, config.evals[name], batches.source, program.model, outputs, labels)
        elif what == "mistakes":
            counted = map_predictions(config.evals[name], batches.source, program.model, outputs, labels)
            mistakes = find_mistakes(counted, program.model.loss, batches.source, batches.preprocess)
            arrays = mistakes | {"step": np.array(-1 if step is None else step), "split": config.evals[name].split}
            written += write_arrays(f"{start}.npz", arrays)
        elif what == "predictions" and program.model.is_regression:
            numbers = {"numbers": undo_scale(program.model, outputs).astype(np.float32)}
            written += write_arrays(f"{start}.npz", numbers | {"labels": labels} | list_names(batches.source))
        else:
            written += write_arrays(f"{start}.npz", {kind: outputs, "labels": labels} | list_names(batches.source))
    return written


def write_confusion(
    start: Path, eval_config: ConfigDict, source: Source, model: Model, logits: np.ndarray, labels: np.ndarray
) -> list[str]:
    """Writes a confusion matrix to `<start>.csv` and, if matplotlib is installed, to `<start>.png`.

    There is no picture of a matrix of more than `MOST_CLASSES` classes.

    Returns:
        The paths of the files.

    Raises:
        UserError: images have several labels, or see `map_predictions`.
    """
    counted = map_predictions(eval_config, source, model, logits, labels)
    matrix, text = count_confusion(counted)
    written = write_file(f"{start}.csv", lambda file: file.write(encode_text(text)))
    if matrix is not None and importlib.util.find_spec("matplotlib"):
        from vit_jax.analysis import plot

        figure = plot.confusion(matrix, counted.names)
        written += write_file(f"{start}.png", lambda file: figure.savefig(file, format="png"))
    return written


def count_confusion(counted: Predictions) -> tuple[Int64[np.ndarray, "label prediction"] | None, str]:
    """Returns the confusion matrix and its text as CSV.

    With more than `MOST_CLASSES` classes the matrix is None, and the CSV lists only the cells that are not 0.

    Raises:
        UserError: images have several labels.
    """
    if counted.labels.ndim > 1:
        raise UserError("--save=confusion needs data with one label per image.")
    classes, predicted = counted.logits.shape[1], counted.logits.argmax(axis=1)
    if classes > MOST_CLASSES:
        return None, scores.format_cells(predicted, counted.labels, counted.names)
    matrix = scores.confusion_matrix(predicted, counted.labels, classes)
    return matrix, scores.format_confusion(matrix, counted.names)


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


def write_arrays(path: str, arrays: dict[str, Any]) -> list[str]:
    """Writes an .npz file and returns [path]; raises what `write_file` raises."""
    return write_file(path, lambda file: np.savez(file, **arrays))


def write_file(path: str, write: Callable[[BinaryIO], object]) -> list[str]:
    """Writes a file atomically and returns [path].

    Args:
        path: the path of the file.
        write: writes the content to an open binary file.

    Raises:
        UserError: the file cannot be written.
    """
    with user_errors(f"cannot write {path}"), atomic_write(path) as temporary, temporary.open("wb") as file:
        write(file)
    return [path]


def list_names(source: Source) -> dict[str, np.ndarray]:
    """Returns the arrays `names`, of the images of a source, and `class_names`, if these are known."""
    names = {"names": np.array([source.example_name(index) for index in range(len(source))])}
    return names | ({"class_names": np.array(source.class_names)} if source.class_names else {})


def list_parts(config: ConfigDict, program: Inference, what: str) -> dict[tuple[str, str], data.EvalBatches]:
    """Returns (name of an evaluation, split) -> the batches to read, for the evaluations that have outputs `what`."""
    parts = {}
    for name, eval_config in config.evals.items():
        splits = [eval_config.split, *([eval_config.train_split] if "train_split" in eval_config else [])]
        task = EVAL_KINDS[eval_config.kind].task
        has_output = what == "features" or task == "classify" or (what == "predictions" and task == "regress")
        for part, split in enumerate(splits) if has_output else ():
            batches = data.EvalBatches(config, name, program.batch_sharding, {}, part)
            parts[name, split_label(split)] = batches
    return parts


def split_label(split: str) -> str:
    """Returns a split as part of a file name: "train[:800]" -> "train_0_800", "train[70%:]" -> "train_70pct_end".

    A fold is named as it is written: "train[fold 2/5]" -> "train_fold_2_5".
    """
    plain, folds = divide_folds(split)
    parts = parse_split(plain)
    ends = [(start or "0", stop or "end") if start or stop else () for _, start, stop in parts]
    words = [re.sub(r"\W", "_", str(fold)) if fold else "" for fold in folds]
    named = [filter(None, (name, *both, word)) for (name, *_), both, word in zip(parts, ends, words, strict=True)]
    return "_".join(map("_".join, named)).replace("%", "pct")
