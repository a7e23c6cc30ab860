"""From a source to global batches on the devices."""

import functools
import os
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8
from ml_collections import ConfigDict

from vit_jax import choose
from vit_jax.data import images, loader, sources
from vit_jax.data.headers import check_headers
from vit_jax.data.preprocess import parse_pipe
from vit_jax.data.setup import eval_batch_size, train_preprocessor


def load_image(image: str | os.PathLike | images.RGB, preprocess: str) -> Float32[np.ndarray, "rows columns 3"]:
    """Returns an image file, local or remote, turned upright as its EXIF data says, or pixels, as a model with such
    preprocessing reads it.

    Raises:
        UserError: the file is no readable image, or the preprocessing leaves its size open.
    """
    given = image if isinstance(image, np.ndarray) else images.read_image(image)
    return parse_pipe(preprocess, 0)(given, np.random.default_rng(0))


def train_batches(
    config: ConfigDict,
    sharding: jax.sharding.NamedSharding,
    start: int = 0,
    opened: Mapping[str, sources.Source] | None = None,
) -> loader.DevicePrefetcher:
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
    preprocess = train_preprocessor(config)
    local = loader.local_train_batches(
        (opened or {}).get(config.data.split) or sources.open_source(config, config.data.split),
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
    return loader.DevicePrefetcher(
        local,
        lambda batch: put({"image": batch["image"], "label": batch["label"]}),
        functools.partial(finish, preprocess.value_range),
    )


def finish(value_range: tuple[float, float], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Does the last op of the preprocessing, on the devices."""
    return batch | {"image": scale(batch["image"], value_range)}


@functools.partial(jax.jit, static_argnums=1)
def scale(images: UInt8[Array, "..."], value_range: tuple[float, float]) -> Float32[Array, "..."]:
    """Maps 0 to `low` and 255 to `high`; off `preprocess.value_range` by a rounding of float32 at most."""
    low, high = value_range
    return images.astype(jnp.float32) * ((high - low) / 255) + low


class EvalBatches:
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
        opened: Mapping[str, sources.Source] | None,
    ):
        """Opens the data of `config.evals[name]`; see `eval_batches`."""
        self.name, split = name, config.evals[name].split
        self.source = (opened or {}).get(split) or sources.open_source(config, split)
        self.preprocess = parse_pipe(config.evals[name].preprocess, config.resolution)
        self.batch, self.workers, self.sharding = eval_batch_size(config), config.data.workers, sharding
        self.rows = loader.local_rows(sharding, self.batch)

    def __len__(self) -> int:
        """Returns the number of batches."""
        return -(-len(self.source) // self.batch)

    def check_headers(self) -> None:
        """Looks at the headers of the images that this process will read, where that is quick."""
        if self.source.header:
            mine = np.flatnonzero(np.isin(np.arange(len(self.source)) % self.batch, self.rows)).tolist()
            check_headers(self.source.read_image_header, self.preprocess.fault, mine, self.name)

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        """Iterates over the batches from the first on."""
        local = loader.local_eval_batches(
            self.source, self.preprocess, batch=self.batch, rows=self.rows, workers=self.workers
        )
        put = functools.partial(loader.place, rows=self.rows, batch=self.batch, sharding=self.sharding)
        return loader.DevicePrefetcher(local, put, functools.partial(finish, self.preprocess.value_range))


def eval_batches(
    config: ConfigDict,
    name: str,
    sharding: jax.sharding.NamedSharding,
    opened: Mapping[str, sources.Source] | None = None,
) -> EvalBatches:
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
    return EvalBatches(config, name, sharding, opened)


def sample_images(config: ConfigDict, split: str, count: int) -> tuple[list[images.RGB], list[str]]:
    """Returns some images, spread over a split, as they are before preprocessing, and the names of their classes.

    Raises:
        UserError: the source is wrong or absent, or has no such split.
    """
    source = sources.open_source(config, split)
    rows = [source[i] for i in np.linspace(0, len(source) - 1, min(count, len(source)), dtype=int).tolist()]
    names = source.class_names or range(source.num_classes)
    labels = [[str(names[label]) for label in np.atleast_1d(row["label"]) if label >= 0] for row in rows]
    return [np.asarray(row["image"]) for row in rows], [", ".join(told) for told in labels]
