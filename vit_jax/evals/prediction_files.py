"""Saves features, predictions or mistakes as .npz files, and the confusion matrix as CSV and as a picture."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import UserError, data, encode_text, user_errors
from vit_jax.config import EVAL_KINDS
from vit_jax.data.sources import Source
from vit_jax.evals.mistakes import find_mistakes
from vit_jax.evals.outputs import OutputCache, compute_outputs, count_nonfinite, refuse_nonfinite
from vit_jax.evals.predictions import count_confusion, map_predictions
from vit_jax.inference import Inference
from vit_jax.model import Model
from vit_jax.storage import atomic_write
from vit_jax.tree import ArrayTree


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
    known, and `features` (the model's pre_logits) or `logits`, float32, in the order of the data. The file of mistakes
    is an .npz with the arrays of `find_mistakes`, the `step` (-1 if unknown) and the `split`. The confusion matrix is a
    .csv, see `predictions.count_confusion`, and a .png if matplotlib is installed.

    Args:
        what: "features" of all evaluations; "predictions", "confusion" or "mistakes" of classifying evaluations.
        folder: the folder to write to; created if it does not exist.
        config: the configuration with the evaluations.
        program: the functions of the model.
        params: the parameters, on the devices.
        cache: a cache of outputs with these parameters; what is computed is stored there.
        step: the step of the run that the parameters are from, if any.

    Returns:
        The paths of the files that this process wrote; empty on all processes but the first.

    Raises:
        UserError: no evaluation has predictions, images have several labels, an image cannot be read, outputs are not
            finite, or the folder cannot be written to.
    """
    parts = list_parts(config, program, what)
    if not parts:
        raise UserError(f"--save={what} needs an evaluation of the head, for example --evals=classify.")
    if jax.process_index() == 0:
        with user_errors(f"cannot write to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)  # before anything is computed
    kind = "features" if what == "features" else "logits"
    written = list[str]()
    for (name, split), batches in parts.items():
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
        else:
            written += write_arrays(f"{start}.npz", {kind: outputs, "labels": labels} | list_names(batches.source))
    return written


def write_confusion(
    start: Path, eval_config: ConfigDict, source: Source, model: Model, logits: np.ndarray, labels: np.ndarray
) -> list[str]:
    """Writes a confusion matrix to `<start>.csv` and, if matplotlib is installed, to `<start>.png`.

    There is no picture of a matrix of more than `predictions.MOST_CLASSES` classes.

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
        for part, split in enumerate(splits) if what == "features" or task == "classify" else ():
            batches = data.eval_batches(config, name, program.batch_sharding, {}, part)
            parts[name, split_label(split, batches.source.parts)] = batches
    return parts


def split_label(split: str, parts: tuple[tuple[str, range], ...]) -> str:
    """Returns a split as part of a file name: "test" -> "test", "train[:800]" -> "train_0_800".

    Args:
        split: the split as written.
        parts: name of a whole split and its selected rows, as in `Source.parts`.
    """
    if "[" in split:
        return "_".join(f"{name}_{rows.start}_{rows.stop}" for name, rows in parts)
    return re.sub(r"\W+", "_", split)
