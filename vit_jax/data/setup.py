"""What a config states about its data, and what the opened data adds: shapes, counts and class names."""

import dataclasses
import logging
from typing import TypeVar

from ml_collections import ConfigDict

from vit_jax import UserError
from vit_jax.data import sources
from vit_jax.data.preprocess import Preprocessor, fill_resolution, parse_pipe
from vit_jax.storage import filesystem

T = TypeVar("T", int, int | None)


@dataclasses.dataclass(frozen=True)
class DataSpec:
    """Shapes and counts of the training data.

    Attributes:
        image_shape: (height, width, 3) of each image of a batch, float32.
        num_classes: labels are 0 to num_classes - 1.
        num_examples: of the training split; the length of an epoch.
        max_labels: the most labels of an image in multi-label data, where labels are int32 [max_labels], each class
            once, padded with -1; None: every image has one label.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    num_examples: int
    max_labels: int | None = None


@dataclasses.dataclass(frozen=True)
class DataInfo:
    """What is known only once the data is open.

    Attributes:
        class_names: in the order of the labels, or None.
        fingerprint: data set and version, split, count, contents, preprocessing, seed and batch: what must be unchanged
            when a run resumes.
        preprocess: the pipe of the first evaluation, with the resolution filled in; exported with the model.
        evals: name of an evaluation -> its data: `describe_evals`, and a fingerprint of the `contents`.
        opened: split -> its open source, so that a large folder is listed only once.
    """

    class_names: tuple[str, ...] | None
    fingerprint: dict[str, str | int]
    preprocess: str
    evals: dict[str, dict[str, str]]
    opened: dict[str, sources.Source] = dataclasses.field(compare=False)


def spec(config: ConfigDict) -> DataSpec:
    """Returns shapes and counts without opening data.

    Raises:
        UserError: `data.num_classes` or `data.num_examples` is unset, or the preprocessing is wrong.
    """
    num_classes, num_examples = config.data.num_classes, config.data.num_examples
    known = {"num_classes": num_classes, "num_examples": num_examples}
    if unknown := [f"--config.data.{field}" for field, value in known.items() if not value or value < 0]:
        raise UserError(
            f"set {' and '.join(unknown)} to a positive number: it cannot be read from the data, which is not "
            "opened here"
        )
    shape = train_preprocessor(config).shape
    for name in config.evals:
        eval_preprocessor(config, name, shape)
    return DataSpec(shape, num_classes, num_examples, config.data.max_labels)


def complete_config(config: ConfigDict) -> tuple[ConfigDict, DataInfo]:
    """Opens the data of training and of all evaluations and checks it against the config.

    Returns:
        A copy of the config with `data.num_classes`, `data.num_examples` and, for multi-label data, `data.max_labels`
        set and with absolute paths, and what else the data states.

    Raises:
        UserError: a source, a split or a preprocessing is wrong or missing, or disagrees with the config.
    """
    preprocess = train_preprocessor(config)
    source = sources.open_source(config, config.data.split)
    split = f"{config.data.source} {config.data.split}"
    counts = {
        "num_classes": agreed_value("num_classes", config.data.num_classes, source.num_classes, config.data.source),
        "max_labels": agreed_value("max_labels", config.data.max_labels, source.max_labels, config.data.source),
        "num_examples": agreed_value("num_examples", config.data.num_examples, len(source), split),
    }
    if config.batch > len(source):
        words = (
            "a batch has %d images, but %s has only %d, so a step sees some of them more than once; lower "
            "--config.batch"
        )
        logging.getLogger(__name__).warning(words, config.batch, split, len(source))

    completed = config.copy_and_resolve_references()
    completed.data.update(counts)
    # Absolute, so that the run can be evaluated from any folder.
    kind, colon, path = config.data.source.partition(":")
    if kind in ("folder", "array_record"):
        completed.data.source = f"{kind}{colon}{filesystem.absolute_path(path)}"
    if config.data.data_dir:
        completed.data.data_dir = filesystem.absolute_path(config.data.data_dir)
    opened = {config.data.split: source}
    for name in completed.evals:
        opened[config.evals[name].split] = open_eval_source(completed, name, preprocess.shape, source)
    fingerprint: dict[str, str | int] = {
        "data set": source.name,
        "split": ", ".join(f"{name}[{rows.start}:{rows.stop}]" for name, rows in source.parts),
        "examples": len(source),
        "classes": source.num_classes,
        "contents": source.fingerprint,
        "preprocessing": preprocess.text + (" fast" if config.data.fast else ""),
        "seed": config.seed,
        "batch": config.batch,
    }
    evals = {
        name: described | {"contents": opened[config.evals[name].split].fingerprint}
        for name, described in describe_evals(config).items()
    }
    return completed, DataInfo(source.class_names, fingerprint, evals[next(iter(evals))]["preprocess"], evals, opened)


def describe_evals(config: ConfigDict) -> dict[str, dict[str, str]]:
    """Returns, by name, the `split` of each evaluation and its `preprocess` with the resolution filled in."""
    return {
        name: {"split": one.split, "preprocess": fill_resolution(one.preprocess, config.resolution)}
        for name, one in config.evals.items()
    }


def train_preprocessor(config: ConfigDict) -> Preprocessor:
    """Returns the preprocessing of training images."""
    return parse_pipe(config.data.preprocess, config.resolution, config.data.fast)


def eval_preprocessor(config: ConfigDict, name: str, shape: tuple[int, int, int]) -> Preprocessor:
    """Returns the preprocessing of an evaluation's images.

    Raises:
        UserError: the pipe is wrong, or gives images of another shape.
    """
    try:
        preprocess = parse_pipe(config.evals[name].preprocess, config.resolution)
    except UserError as error:
        raise UserError(f"in evals.{name}: {error}") from None
    if preprocess.shape != shape:
        raise UserError(
            f"evals.{name}.preprocess gives images of {preprocess.shape}, but data.preprocess gives {shape}"
        )
    return preprocess


def agreed_value(field: str, stated: int | None, found: T, where: str) -> T:
    """Returns the number found; raises UserError if the config states another."""
    if stated is not None and stated != found:
        raise UserError(f"data.{field} is {stated}, but {where} has {'none' if found is None else found}")
    return found


def open_eval_source(
    config: ConfigDict, name: str, shape: tuple[int, int, int], train: sources.Source
) -> sources.Source:
    """Opens the source of an evaluation.

    Raises:
        UserError: its split or preprocessing is wrong or does not suit the model.
    """
    eval_preprocessor(config, name, shape)
    try:
        source = sources.open_source(config, config.evals[name].split)
    except UserError as error:
        raise UserError(f"in evals.{name}: {error}") from None
    if source.name == train.name and source.overlaps(train):
        logging.getLogger(__name__).warning(
            "evals.%s contains training images: its split overlaps with data.split", name
        )
    if (source.num_classes, source.class_names) != (train.num_classes, train.class_names):
        raise UserError(f"the classes of evals.{name}.split={config.evals[name].split} differ from those of training")
    return source


def eval_batch_size(config: ConfigDict) -> int:
    """Returns the images per evaluation step, over all processes; by default, those of one accumulation step."""
    return config.batch // config.accum_steps if config.batch_eval is None else config.batch_eval
