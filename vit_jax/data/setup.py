"""What a config says of its data, and what the opened data tell: shapes, counts, class names."""

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
        image_shape: (height, width, 3) of a row of a batch, float32.
        num_classes: labels are 0 to num_classes - 1.
        num_examples: of the training split, an epoch.
        max_labels: labels of one image in multi-label data, where the label of a row is int32 [max_labels], each class
            once, then -1; None: every image has one.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    num_examples: int
    max_labels: int | None = None


@dataclasses.dataclass(frozen=True)
class DataInfo:
    """What only the opened data tells.

    Attributes:
        class_names: in the order of the labels, or None.
        fingerprint: data set and version, split, count, contents, preprocessing, seed and batch, in words and numbers:
            what a resumed run must find unchanged.
        preprocess: the pipe of the first evaluation, with the resolution filled in: what the model is used with.
        evals: name of an evaluation -> what it looks at: `describe_evals` and a fingerprint of the `contents`.
        opened: the sources by split, so that a large folder need not be listed again.
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
        words = "to a positive number: what data tell is not known before they are opened"
        raise UserError(f"set {' and '.join(unknown)} {words}")
    shape = train_preprocessor(config).shape
    for name in config.evals:
        eval_preprocessor(config, name, shape)
    return DataSpec(shape, num_classes, num_examples, config.data.max_labels)


def complete_config(config: ConfigDict) -> tuple[ConfigDict, DataInfo]:
    """Opens the data of training and of all evaluations and checks it against the config.

    Returns:
        A copy of the config whose `data.num_classes`, `data.num_examples` and, in multi-label data, `data.max_labels`
        are set, and what the data tells besides.

    Raises:
        UserError: a source, a split or a preprocessing is wrong or absent, or disagrees with the config.
    """
    preprocess = train_preprocessor(config)
    source = sources.open_source(config, config.data.split)
    num_classes = agreed("num_classes", config.data.num_classes, source.num_classes, config.data.source)
    split = f"{config.data.source} {config.data.split}"
    max_labels = agreed("max_labels", config.data.max_labels, source.max_labels, config.data.source)
    num_examples = agreed("num_examples", config.data.num_examples, len(source), split)

    if config.batch > num_examples:
        words = (
            "a batch of %d images is more than the %d of %s, of which a step then sees some twice; lower --config.batch"
        )
        logging.getLogger(__name__).warning(words, config.batch, num_examples, split)

    completed = config.copy_and_resolve_references()
    kind, colon, path = config.data.source.partition(":")
    # Absolute, so that the run is evaluated from wherever one stands.
    if kind in ("folder", "array_record"):
        completed.data.source = f"{kind}{colon}{filesystem.absolute_path(path)}"
    if config.data.data_dir:
        completed.data.data_dir = filesystem.absolute_path(config.data.data_dir)
    completed.data.num_classes = num_classes
    completed.data.num_examples = num_examples
    completed.data.max_labels = max_labels
    opened = {config.data.split: source}
    for name in completed.evals:
        opened[config.evals[name].split] = check_eval(completed, name, preprocess.shape, source)
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
        name: told | {"contents": opened[config.evals[name].split].fingerprint}
        for name, told in describe_evals(config).items()
    }
    return completed, DataInfo(source.class_names, fingerprint, evals[next(iter(evals))]["preprocess"], evals, opened)


def describe_evals(config: ConfigDict) -> dict[str, dict[str, str]]:
    """Returns what a config says of each evaluation: `split`, and `preprocess` with the resolution filled in."""
    return {
        name: {"split": one.split, "preprocess": fill_resolution(one.preprocess, config.resolution)}
        for name, one in config.evals.items()
    }


def train_preprocessor(config: ConfigDict) -> Preprocessor:
    """Returns what is done to the images of training."""
    return parse_pipe(config.data.preprocess, config.resolution, config.data.fast)


def eval_preprocessor(config: ConfigDict, name: str, shape: tuple[int, int, int]) -> Preprocessor:
    """Returns what is done to the images of an evaluation.

    Raises:
        UserError: it cannot be done, or gives images of another shape.
    """
    try:
        preprocess = parse_pipe(config.evals[name].preprocess, config.resolution)
    except UserError as error:
        raise UserError(f"in evals.{name}: {error}") from None
    if preprocess.shape != shape:
        raise UserError(f"evals.{name}.preprocess gives images of {preprocess.shape}, but data.preprocess of {shape}")
    return preprocess


def agreed(field: str, stated: int | None, found: T, where: str) -> T:
    """Returns the number found; raises UserError if the config states another."""
    if stated is not None and stated != found:
        raise UserError(f"data.{field} is {stated}, but {where} has {'none' if found is None else found}")
    return found


def check_eval(config: ConfigDict, name: str, shape: tuple[int, int, int], train: sources.Source) -> sources.Source:
    """Returns the source of an evaluation.

    Raises:
        UserError: its split or preprocessing is wrong or does not suit the model.
    """
    eval_preprocessor(config, name, shape)
    try:
        source = sources.open_source(config, config.evals[name].split)
    except UserError as error:
        raise UserError(f"in evals.{name}: {error}") from None
    if source.name == train.name and source.overlaps(train):
        logging.getLogger(__name__).warning("evals.%s looks at images of training: its split overlaps data.split", name)
    if (source.num_classes, source.class_names) != (train.num_classes, train.class_names):
        raise UserError(f"the classes of evals.{name}.split={config.evals[name].split} are not those of training")
    return source


def eval_batch_size(config: ConfigDict) -> int:
    """Returns the images per evaluation step, over all processes: unless told, those of a part of a training step."""
    return config.batch // config.accum_steps if config.batch_eval is None else config.batch_eval
