"""Data: from the config to global batches on the devices.

`complete` opens the data and checks it, before anything is compiled; `spec` gives shapes and counts of a completed
config without opening anything; `make` and `make_eval` give the batches.
"""

import dataclasses
import functools
import logging
import os
import types
from collections.abc import Iterator, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8
from ml_collections import ConfigDict

from vit_jax import UserError, choose, files
from vit_jax.data import headers, images, loader, sources, transforms

T = TypeVar("T", int, int | None)
UNOPENED: Mapping[str, sources.Source] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Spec:
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
class Info:
    """What only the opened data tells.

    Attributes:
        class_names: in the order of the labels, or None.
        fingerprint: data set and version, split, count, contents, preprocessing, seed and batch, in words and numbers:
            what a resumed run must find unchanged.
        preprocess: the pipe of the first evaluation, with the resolution filled in: what the model is used with.
        evals: name of an evaluation -> what it looks at: `told_evals` and a fingerprint of the `contents`.
        opened: the sources by split, so that a large folder need not be listed again.
    """

    class_names: tuple[str, ...] | None
    fingerprint: dict[str, str | int]
    preprocess: str
    evals: dict[str, dict[str, str]]
    opened: dict[str, sources.Source] = dataclasses.field(compare=False)


def spec(config: ConfigDict) -> Spec:
    """Returns shapes and counts without opening data.

    Raises:
        UserError: `data.num_classes` or `data.num_examples` is unset, or the preprocessing is wrong.
    """
    num_classes, num_examples = config.data.num_classes, config.data.num_examples
    known = {"num_classes": num_classes, "num_examples": num_examples}
    if unknown := [f"--config.data.{field}" for field, value in known.items() if not value or value < 0]:
        words = "to a positive number: what data tell is not known before they are opened"
        raise UserError(f"set {' and '.join(unknown)} {words}")
    shape = train_preprocess(config).shape
    for name in config.evals:
        eval_preprocess(config, name, shape)
    return Spec(shape, num_classes, num_examples, config.data.max_labels)


def complete(config: ConfigDict) -> tuple[ConfigDict, Info]:
    """Opens the data of training and of all evaluations and checks it against the config.

    Returns:
        A copy of the config whose `data.num_classes`, `data.num_examples` and, in multi-label data, `data.max_labels`
        are set, and what the data tells besides.

    Raises:
        UserError: a source, a split or a preprocessing is wrong or absent, or disagrees with the config.
    """
    preprocess = train_preprocess(config)
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
        completed.data.source = f"{kind}{colon}{files.absolute(path)}"
    if config.data.data_dir:
        completed.data.data_dir = files.absolute(config.data.data_dir)
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
        for name, told in told_evals(config).items()
    }
    return completed, Info(source.class_names, fingerprint, evals[next(iter(evals))]["preprocess"], evals, opened)


def told_evals(config: ConfigDict) -> dict[str, dict[str, str]]:
    """Returns what a config says of each evaluation: `split`, and `preprocess` with the resolution filled in."""
    return {
        name: {"split": one.split, "preprocess": transforms.fill(one.preprocess, config.resolution)}
        for name, one in config.evals.items()
    }


def read(image: str | os.PathLike | images.RGB, preprocess: str) -> Float32[np.ndarray, "rows columns 3"]:
    """Returns an image file, local or remote, turned upright as its EXIF data says, or pixels, as a model with such
    preprocessing reads it.

    Raises:
        UserError: the file is no readable image, or the preprocessing leaves its size open.
    """
    given = image if isinstance(image, np.ndarray) else images.read_image(image)
    return transforms.parse(preprocess, 0)(given, np.random.default_rng(0))


def examples(config: ConfigDict, split: str, count: int) -> tuple[list[images.RGB], list[str]]:
    """Returns some images, spread over a split, as they are before preprocessing, and the names of their classes.

    Raises:
        UserError: the source is wrong or absent, or has no such split.
    """
    source = sources.open_source(config, split)
    rows = [source[i] for i in np.linspace(0, len(source) - 1, min(count, len(source)), dtype=int).tolist()]
    names = source.class_names or range(source.num_classes)
    labels = [[str(names[label]) for label in np.atleast_1d(row["label"]) if label >= 0] for row in rows]
    return [np.asarray(row["image"]) for row in rows], [", ".join(told) for told in labels]


def train_preprocess(config: ConfigDict) -> transforms.Preprocess:
    """Returns what is done to the images of training."""
    return transforms.parse(config.data.preprocess, config.resolution, config.data.fast)


def eval_preprocess(config: ConfigDict, name: str, shape: tuple[int, int, int]) -> transforms.Preprocess:
    """Returns what is done to the images of an evaluation.

    Raises:
        UserError: it cannot be done, or gives images of another shape.
    """
    try:
        preprocess = transforms.parse(config.evals[name].preprocess, config.resolution)
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
    eval_preprocess(config, name, shape)
    try:
        source = sources.open_source(config, config.evals[name].split)
    except UserError as error:
        raise UserError(f"in evals.{name}: {error}") from None
    if source.name == train.name and source.overlaps(train):
        logging.getLogger(__name__).warning("evals.%s looks at images of training: its split overlaps data.split", name)
    if (source.num_classes, source.class_names) != (train.num_classes, train.class_names):
        raise UserError(f"the classes of evals.{name}.split={config.evals[name].split} are not those of training")
    return source


def batch_eval(config: ConfigDict) -> int:
    """Returns the images per evaluation step, over all processes: unless told, those of a part of a training step."""
    return config.batch // config.accum_steps if config.batch_eval is None else config.batch_eval


def make(
    config: ConfigDict,
    sharding: jax.sharding.NamedSharding,
    start: int = 0,
    opened: Mapping[str, sources.Source] = UNOPENED,
) -> loader.Ahead:
    """Iterates without end over the batches of training.

    Args:
        config: completed.
        sharding: splits dimension 0 of a batch; names no other dimension.
        start: number of the first batch, 0 in a fresh run.
        opened: sources by split that are open already.

    Returns:
        An iterator over `{"image": float32 [batch, height, width, 3], "label": int32 [batch]}`, global arrays, the same
        on any number of processes.

    Raises:
        UserError: the data is wrong, or the batch cannot be split so.
    """
    rows = loader.local_rows(sharding, config.batch)
    preprocess = train_preprocess(config)
    local = loader.train_batches(
        opened.get(config.data.split) or sources.open_source(config, config.data.split),
        preprocess,
        batch=config.batch,
        rows=rows,
        seed=config.seed,
        start=start,
        workers=config.data.workers,
        on_bad=config.data.bad_images,
        max_bad=config.data.max_bad,
    )
    put = functools.partial(loader.place, rows=rows, batch=config.batch, sharding=sharding)
    return loader.Ahead(
        local,
        lambda batch: put({"image": batch["image"], "label": batch["label"]}),
        functools.partial(finish, preprocess.value_range),
    )


def finish(value_range: tuple[float, float], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Does the last op of the preprocessing, on the devices."""
    return batch | {"image": scale(batch["image"], value_range)}


@functools.partial(jax.jit, static_argnums=1)
def scale(images: UInt8[Array, "..."], value_range: tuple[float, float]) -> Float32[Array, "..."]:
    """Maps 0 to `low` and 255 to `high`; off `transforms.value_range` by a rounding of float32 at most."""
    low, high = value_range
    return images.astype(jnp.float32) * ((high - low) / 255) + low


class Evaluation:
    """The batches of an evaluation: every example once; each `iter()` starts anew.

    Attributes:
        source: what is read.
        batch: rows of a global batch.
    """

    def __init__(
        self,
        config: ConfigDict,
        name: str,
        sharding: jax.sharding.NamedSharding,
        opened: Mapping[str, sources.Source],
    ):
        """Opens the data of `config.evals[name]`; see `make_eval`."""
        split = config.evals[name].split
        self.source = opened.get(split) or sources.open_source(config, split)
        self.preprocess = transforms.parse(config.evals[name].preprocess, config.resolution)
        self.batch, self.workers, self.sharding = batch_eval(config), config.data.workers, sharding
        self.rows = loader.local_rows(sharding, self.batch)

    def __len__(self) -> int:
        """Returns the number of batches."""
        return -(-len(self.source) // self.batch)

    def check(self, name: str) -> None:
        """Looks at the headers of the images that this process will read, where that is quick; see `headers.check`."""
        if self.source.header:
            mine = np.flatnonzero(np.isin(np.arange(len(self.source)) % self.batch, self.rows)).tolist()
            headers.check(self.source.read_header, self.preprocess.fault, mine, name)

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        """Iterates over the batches from the first on."""
        local = loader.eval_batches(
            self.source, self.preprocess, batch=self.batch, rows=self.rows, workers=self.workers
        )
        put = functools.partial(loader.place, rows=self.rows, batch=self.batch, sharding=self.sharding)
        return loader.Ahead(local, put, functools.partial(finish, self.preprocess.value_range))


def make_eval(
    config: ConfigDict, name: str, sharding: jax.sharding.NamedSharding, opened: Mapping[str, sources.Source] = UNOPENED
) -> Evaluation:
    """Returns the batches of the evaluation `config.evals[name]`.

    Args:
        config: completed.
        name: of the evaluation.
        sharding: splits dimension 0 of a batch; names no other dimension.
        opened: sources by split that are open already.

    Returns:
        An iterable, and one anew each time, over `{"image": float32 [batch, height, width, 3], "label": int32 [batch],
        "mask": float32 [batch]}`, global arrays. The mask is 1 for every example of the split, once, and 0 for the rows
        that fill up the last batch.

    Raises:
        UserError: the data is wrong, or the batch cannot be split so.
    """
    choose("evaluation", name, config.evals)
    return Evaluation(config, name, sharding, opened)
