"""The outputs of a model for all images of a split, computed once for all evaluations: frozen features or logits."""

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

from vit_jax import UserError
from vit_jax.data import EvalBatches
from vit_jax.inference import Inference
from vit_jax.tasks import Batch
from vit_jax.tree import ArrayTree

Arrays: TypeAlias = tuple[np.ndarray, np.ndarray]  # outputs of n images [n, width or classes], their labels [n, ...]
Tick: TypeAlias = Callable[[], None]


@runtime_checkable
class OutputCache(Protocol):
    """A mapping of `output_key` -> outputs and labels, all for the same weights. A dict is an OutputCache."""

    def get(self, key: str, /) -> Arrays | None:
        """Returns the outputs that are stored under a key, or None."""

    def __setitem__(self, key: str, arrays: Arrays, /) -> None:
        """Stores outputs under a key."""


def output_key(kind: str, batches: EvalBatches) -> str:
    """Returns a key that identifies outputs for fixed weights: their kind, the images and the preprocessing."""
    return f"{kind} {batches.identity}"


def compute_outputs(
    program: Inference,
    kind: str,
    params: ArrayTree,
    batches: EvalBatches,
    cache: OutputCache,
    tick: Tick = lambda: None,
) -> Arrays:
    """Returns the outputs and the labels of all examples, in the order of the source.

    Every host gets the outputs of all examples. They are taken from the cache or, if missing, computed and stored in
    it.

    Args:
        program: the functions of the model.
        kind: "features", the model's `pre_logits` in float32, or "logits".
        params: the parameters, on the devices.
        batches: the batches of the examples.
        cache: a cache of outputs with these parameters.
        tick: called once for each batch.

    Raises:
        UserError: an image cannot be read.
    """
    key = output_key(kind, batches)
    arrays = cache.get(key)
    if arrays is None:
        step = {"features": program.features, "logits": program.logits}[kind]
        arrays = cache[key] = _gather(step, params, batches, tick)
    return arrays


def _gather(
    step: Callable[[ArrayTree, Batch], tuple[jax.Array, jax.Array]], params: ArrayTree, batches: EvalBatches, tick: Tick
) -> Arrays:
    count, whole = len(batches.source), list[np.ndarray]()
    for number, part in enumerate(fetch_late(step(params, batch) for batch in batches)):
        tick()
        whole = whole or [np.empty((count, *array.shape[1:]), array.dtype) for array in part]
        indices = batches.order.indices(number)
        for array, rows in zip(whole, part, strict=True):
            array[indices[indices >= 0]] = rows[indices >= 0]  # without the rows that pad a batch
    outputs, labels = whole
    return outputs, labels


def count_nonfinite(outputs: np.ndarray) -> int:
    """Returns the number of images with an output that is infinite or NaN; `outputs` are [images, ...]."""
    return int(np.count_nonzero(~np.isfinite(outputs).reshape(len(outputs), -1).all(axis=1)))


def refuse_nonfinite(outputs: str, bad: int, count: int) -> None:
    """Raises UserError if the outputs of a model for `bad` of `count` images are not finite, and `bad` is not 0."""
    if bad:
        raise UserError(
            f"{outputs} of {bad:,} of {count:,} images are not finite, as the weights are too large; use others, "
            "such as an earlier checkpoint."
        )


def fetch_late(results: Iterator[ArrayTree]) -> Iterator[ArrayTree]:
    """Yields results on the host. The next result is dispatched before one is fetched, so that devices do not idle.

    There must be at least one result.
    """
    pending = next(results)
    for result in results:
        yield jax.device_get(pending)
        pending = result
    yield jax.device_get(pending)
