"""The batches of training and of evaluations, as global arrays on the devices; and single images of a source."""

import dataclasses
import functools
import os
from collections.abc import Iterator
from types import MappingProxyType

import jax
import numpy as np
from jaxtyping import Float32
from ml_collections import ConfigDict

from vit_jax import choose
from vit_jax.data import images, loader, sources
from vit_jax.data.order import EvalOrder, ShardOrder
from vit_jax.data.order_choice import check_eval_disk, eval_order, training_order
from vit_jax.data.preprocess import Preprocessor, parse_pipe
from vit_jax.data.setup import (
    OpenSources,
    eval_batch_size,
    eval_keys,
    open_eval_source,
    open_training,
    train_preprocessor,
)
from vit_jax.data.shard_fetcher import ShardFetcher
from vit_jax.machine import count_cores

NO_SOURCES: OpenSources = MappingProxyType({})


def train_batches(
    config: ConfigDict,
    sharding: jax.sharding.NamedSharding,
    start: int = 0,
    opened: OpenSources = NO_SOURCES,
) -> loader.DevicePrefetcher:
    """Iterates without end over the batches of training.

    Args:
        config: the config that `complete_config` returns.
        sharding: splits dimension 0 of a batch; names no other dimension.
        start: number of the first batch, 0 in a new run.
        opened: the sources that are open already; see `DataInfo`.

    Returns:
        An iterator over `{"image": float32 [batch, height, width, 3], "label": int32 [batch]}` (multi-label data: label
        [batch, max_labels]). These are global arrays, and the same on any number of processes.

    Raises:
        UserError: the data is wrong, or the batch cannot be split evenly over the devices.
    """
    rows = loader.local_rows(sharding, config.batch)
    preprocess = train_preprocessor(config)
    source = opened.get(("", config.data.split)) or open_training(config)
    source = dataclasses.replace(source, needs_labels=config.task.kind != "masked_patches")
    order, fetcher = training_order(config, source), None
    if isinstance(order, ShardOrder) and source.shards:
        fetcher = ShardFetcher(order, source.shards, rows)
        source = source.streamed()
    local = loader.LocalBatches(
        source,
        preprocess,
        order,
        batch=config.batch,
        rows=rows,
        start=start,
        workers=loader.choose_workers(config.data.workers, count_cores()),
        on_bad=config.data.bad_images,
        max_bad=config.data.max_bad,
        fetcher=fetcher,
    )
    return loader.DevicePrefetcher(local, sharding, preprocess.value_range)


def describe_fetching(config: ConfigDict, opened: OpenSources, sharding: jax.sharding.NamedSharding) -> list[str]:
    """Returns one line on the bytes that the hosts fetch in an epoch.

    The result is empty unless several hosts stream shards from a store. If the rows of several hosts belong to the same
    reader, each of these hosts fetches the shards of that reader.
    """
    shards = opened["", config.data.split].shards
    if config.data.order != "stream" or jax.process_count() == 1 or not shards or not shards.remote_bytes:
        return []
    readers = dict[int, set[int]]()  # of each host
    for device, (rows,) in sharding.devices_indices_map((config.batch,)).items():
        own = np.arange(config.batch)[rows] // (config.batch // config.data.readers)
        readers.setdefault(device.process_index, set()).update(own.tolist())
    each = shards.remote_bytes / config.data.readers / 1e9
    most, total = (of(map(len, readers.values())) * each for of in (max, sum))
    return [
        f"Fetched in an epoch: {total:.3g} GB by all hosts, of {shards.remote_bytes / 1e9:.3g} GB of shards; "
        f"{most:.3g} GB by one."
    ]


class EvalBatches:
    """The batches of the evaluation `config.evals[name]`; each `iter()` starts again from the first batch.

    A batch is `{"image": float32 [batch, height, width, 3], "label": int32 [batch], "mask": float32 [batch]}`
    (multi-label data: label [batch, max_labels]). These are global arrays. Each example of the split is in one row,
    whose mask is 1. The mask is 0 in the rows that pad the last batch.

    Attributes:
        source: the source of the examples; if they lie in shards, it streams these.
        order: which example is in which row of which batch; see `EvalOrder.indices`.
        batch: rows of a global batch.
    """

    def __init__(
        self,
        config: ConfigDict,
        name: str,
        sharding: jax.sharding.NamedSharding,
        opened: OpenSources = NO_SOURCES,
        part: int = 0,
    ):
        """Opens the data of the evaluation, unless it is open.

        Args:
            config: the config that `complete_config` returns.
            name: the name of the evaluation.
            sharding: splits dimension 0 of a batch; names no other dimension.
            opened: the sources that are open already; see `DataInfo`.
            part: 0: the examples that are evaluated; 1: those of `train_split`, if the evaluation has this field.

        Raises:
            UserError: there is no such evaluation, the data is wrong, or the batch cannot be split evenly over the
                devices.
        """
        choose("evaluation", name, config.evals)
        self.name, key = name, eval_keys(config, name)[part]
        source = opened.get(key) or open_eval_source(config, name, key)
        self.preprocess = parse_pipe(config.evals[name].preprocess, config.resolution)
        self.batch, self.sharding = eval_batch_size(config), sharding
        self.workers = loader.choose_workers(config.data.workers, count_cores())
        self.rows = loader.local_rows(sharding, self.batch)
        self.order = eval_order(source, self.batch)
        check_eval_disk(source, self.order, jax.process_count())
        self.source = source.streamed() if source.shards else source

    def __len__(self) -> int:
        """Returns the number of batches."""
        return self.order.batches

    @functools.cached_property
    def identity(self) -> str:
        """A text that differs between evaluations with different examples or preprocessing."""
        parts = self.source.parts if self.source.file_stamp else ()
        stamps = [self.source.file_stamp(split, rows) for split, rows in parts if self.source.file_stamp]
        return " ".join([self.source.fingerprint, *stamps, self.preprocess.text])

    def check_headers(self) -> None:
        """Raises UserError if an image that this process will read has a damaged header or is too small.

        Only images in local folders are checked, since only there this is quick.
        """
        if self.source.read_header:
            indices = [
                index for n in range(len(self)) for index in self.order.indices(n)[self.rows].tolist() if index >= 0
            ]
            images.check_headers(self.source.image_header, self.preprocess.why_too_small, indices, self.name)

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        """Iterates over the batches from the first on."""
        return read_once(self.source, self.preprocess, self.order, self.sharding, self.workers, "raise")


def read_once(
    source: sources.Source,
    preprocess: Preprocessor,
    order: EvalOrder,
    sharding: jax.sharding.Sharding,
    workers: int,
    on_bad: str,
) -> loader.DevicePrefetcher:
    """Returns the batches of all examples, each once; they are as those of `EvalBatches`.

    Args:
        source: the source of the examples; if they lie in shards, it streams these.
        preprocess: the preprocessing of the images.
        order: which example is in which row of which batch.
        sharding: splits dimension 0 of a batch.
        workers: number of worker processes that read; 0: threads of this process do.
        on_bad: what to do with an unreadable image, see `loader.ExampleReader`.
    """
    rows = loader.local_rows(sharding, order.batch)
    local = loader.LocalBatches(
        source,
        preprocess,
        order,
        batch=order.batch,
        rows=rows,
        workers=workers,
        on_bad=on_bad,
        fetcher=ShardFetcher(order, source.shards, rows) if source.shards else None,
    )
    return loader.DevicePrefetcher(local, sharding, preprocess.value_range, names=("image", "label", "mask"))


def read_in_order(
    source: sources.Source, preprocess: Preprocessor, sharding: jax.sharding.Sharding, batch: int, workers: int
) -> loader.DevicePrefetcher:
    """Returns the batches of all examples in the order of the source; batch n has those from n * batch on.

    The batches are as those of `EvalBatches`. An unreadable image is a row of zeros with mask 0, and an entry of
    `DevicePrefetcher.faults`.

    Raises:
        UserError: the cache has no room for a shard at a time.
    """
    order = EvalOrder(source.shards.examples if source.shards else [len(source)], batch, readers=1)
    check_eval_disk(source, order, 1)
    source = source.streamed() if source.shards else source
    return read_once(source, preprocess, order, sharding, workers, "mark")


@dataclasses.dataclass(frozen=True)
class SourceImage:
    """An image of a source, which only `read` reads; its `str` is its name in the data."""

    source: sources.Source
    index: int

    def __str__(self) -> str:
        """Returns the name of the image in the data."""
        return self.source.example_name(self.index)

    def read(self) -> images.RGB | images.EncodedImage:
        """Returns the image; raises DecodeError if it is unreadable."""
        return self.source[self.index]["image"]


def list_source_images(source: str, split: str, data_dir: str | None = None) -> list[SourceImage]:
    """Returns the images of a split of a data source, not read yet; labels and the number of classes may be unknown.

    Raises:
        UserError: the source is wrong or missing, has no such split, or does not fit into the cache.
    """
    source_config = sources.SourceConfig(source, data_dir, num_classes=sources.ANY_CLASSES, reads_labels=False)
    opened = sources.open_split(source_config, split)
    return [SourceImage(opened, index) for index in range(len(opened))]


def load_image(
    image: str | os.PathLike | images.RGB | SourceImage, preprocess: str
) -> Float32[np.ndarray, "rows columns 3"]:
    """Returns one image as a model with the given preprocessing reads it.

    Args:
        image: path of a file, local or remote, whose EXIF orientation is applied; or pixels; or an image of a source.
        preprocess: the pipe, with numbers in place of `{resolution}`.

    Raises:
        UserError: the file is not a readable image, or the preprocessing does not fix the size.
    """
    given = image.read() if isinstance(image, SourceImage) else image
    given = images.read_image(given) if isinstance(given, str | os.PathLike) else given
    return parse_pipe(preprocess, 0)(given, np.random.default_rng(0))


def sample_images(config: ConfigDict, split: str, count: int) -> tuple[list[images.RGB], list[str]]:
    """Returns at most `count` images, spread over a split and not preprocessed, and the class names of each as a text.

    Raises:
        UserError: the source is wrong or missing, or has no such split.
    """
    source = sources.open_source(config, split, streams=True, needs_labels=False)
    with source.opened() as readable:
        rows = [readable[i] for i in np.linspace(0, len(source) - 1, min(count, len(source)), dtype=int).tolist()]
    names = source.class_names or range(source.num_classes)
    labels = [[str(names[label]) for label in np.atleast_1d(row["label"]) if label >= 0] for row in rows]
    return [np.asarray(row["image"]) for row in rows], [", ".join(classes) for classes in labels]
