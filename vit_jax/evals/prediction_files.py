"""Features and predictions of every example as .npz files, and the confusion matrix as CSV and as a picture."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import UserError, data, user_errors
from vit_jax.config import EVAL_KINDS
from vit_jax.data.sources import Source
from vit_jax.evals.mistakes import find_mistakes
from vit_jax.evals.outputs import OutputCache, read_outputs
from vit_jax.evals.predictions import count_confusion, map_predictions
from vit_jax.inference import Inference
from vit_jax.models import Model
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
    """Writes `<evaluation>.<split>.<what>.npz`, or `.csv` and `.png`, for each split that the evaluations read; returns
    the paths of those that this process wrote.

    An .npz file has `names`, those of the images where the data have them, `labels`, `class_names` if they are known,
    and `features`, the model's pre_logits, or `logits`: float32, in the order of the data. The .csv file is
    `scores.format_confusion`'s; the picture needs matplotlib. That of mistakes has what `find_mistakes` returns,
    the `step` and the `split`. What is computed is kept in the cache.

    Args:
        what: features; or predictions, confusion or mistakes: of evaluations of the head.
        folder: to write to; made if it does not exist.
        config: with the evaluations.
        program: of the model.
        params: on the devices.
        cache: of these parameters.
        step: of the run, if they are of one.

    Raises:
        UserError: no evaluation has predictions, or images have several labels; an image cannot be read, or the folder
            not be written to.
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
        outputs, labels = read_outputs(program, kind, params, batches, cache)
        if jax.process_index() > 0:
            continue
        start = folder / f"{name}.{split}.{what}"
        if what == "confusion":
            written += write_confusion(start, config.evals[name], batches.source, program.model, outputs, labels)
        elif what == "mistakes":
            counted = map_predictions(config.evals[name], batches.source, program.model, outputs, labels)
            found = find_mistakes(counted, program.model.loss, batches.source, batches.preprocess)
            arrays = found | {"step": np.array(-1 if step is None else step), "split": config.evals[name].split}
            written += write_arrays(f"{start}.npz", arrays)
        else:
            written += write_arrays(f"{start}.npz", {kind: outputs, "labels": labels} | list_names(batches.source))
    return written


def write_confusion(
    start: Path, eval_config: ConfigDict, source: Source, model: Model, logits: np.ndarray, labels: np.ndarray
) -> list[str]:
    """Writes a confusion matrix to `<start>.csv` and, where matplotlib is installed, to `<start>.png`; returns which.

    Raises:
        UserError: images have several labels; or see `map_predictions`.
    """
    counted = map_predictions(eval_config, source, model, logits, labels)
    matrix, text = count_confusion(counted)
    written = write_file(f"{start}.csv", lambda file: file.write(text.encode()))
    if matrix is not None and importlib.util.find_spec("matplotlib"):
        from vit_jax.analysis import plot

        figure = plot.confusion(matrix, counted.names)
        written += write_file(f"{start}.png", lambda file: figure.savefig(file, format="png"))
    return written


def write_arrays(path: str, arrays: dict[str, Any]) -> list[str]:
    """Writes an .npz file, and returns its path in a list; raises as `write_file`."""
    return write_file(path, lambda file: np.savez(file, **arrays))


def write_file(path: str, write: Callable[[BinaryIO], object]) -> list[str]:
    """Writes a file, whole or not at all, and returns its path in a list.

    Raises:
        UserError: it cannot be written.
    """
    with user_errors(f"cannot write {path}"), atomic_write(path) as temporary, temporary.open("wb") as file:
        write(file)
    return [path]


def list_names(source: Source) -> dict[str, np.ndarray]:
    """Returns the `names` of the images of a source and, if they are known, its `class_names`."""
    names = {"names": np.array([source.example_name(index) for index in range(len(source))])}
    return names | ({"class_names": np.array(source.class_names)} if source.class_names else {})


def list_parts(config: ConfigDict, program: Inference, what: str) -> dict[tuple[str, str], data.EvalBatches]:
    """Returns the batches to read, by evaluation and split."""
    parts = {}
    for name, eval_config in config.evals.items():
        splits = [eval_config.split, *([eval_config.train_split] if "train_split" in eval_config else [])]
        task = EVAL_KINDS[eval_config.kind].task
        for part, split in enumerate(splits) if what == "features" or task == "classify" else ():
            batches = data.eval_batches(config, name, program.batch_sharding, {}, part)
            parts[name, split_label(split, batches.source.parts)] = batches
    return parts


def split_label(split: str, parts: tuple[tuple[str, range], ...]) -> str:
    """Returns a split as a part of a file's name: test -> test, train[:800] -> train_0_800."""
    if "[" in split:
        return "_".join(f"{name}_{rows.start}_{rows.stop}" for name, rows in parts)
    return re.sub(r"\W+", "_", split)
