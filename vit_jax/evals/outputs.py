"""What a model gives for the images of a data set, read once for all evaluations: frozen features, or logits."""

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

from vit_jax.data import EvalBatches
from vit_jax.inference import Batch, Inference
from vit_jax.tree import ArrayTree

Arrays: TypeAlias = tuple[np.ndarray, np.ndarray]  # [n, width or classes] of n images, and their labels [n, ...]
Tick: TypeAlias = Callable[[], None]


@runtime_checkable
class OutputCache(Protocol):
    """Outputs by one set of weights: `output_key` -> arrays. A dict is one."""

    def get(self, key: str, /) -> Arrays | None:
        """Returns the outputs for some images, or None."""

    def __setitem__(self, key: str, arrays: Arrays, /) -> None:
        """Keeps the outputs for some images."""


def output_key(kind: str, batches: EvalBatches) -> str:
    """Returns what identifies the outputs of a kind for some images, given the weights."""
    return f"{kind} {batches.identity}"


def read_outputs(
    program: Inference,
    kind: str,
    params: ArrayTree,
    batches: EvalBatches,
    cache: OutputCache,
    tick: Tick = lambda: None,
) -> Arrays:
    """Returns an output for every example, once and in the order of the source, and the labels.

    Every host has all of them. They are kept in the cache, and taken from there if they are in it.

    Args:
        program: of the model.
        kind: features, its float32 `pre_logits`; or logits.
        params: the parameters, on the devices.
        batches: of the examples.
        cache: of these parameters.
        tick: called after each batch that is dispatched.

    Raises:
        UserError: an image cannot be read.
    """
    key = output_key(kind, batches)
    found = cache.get(key)
    if found is None:
        step = {"features": program.features, "logits": program.logits}[kind]
        found = cache[key] = _gather(step, params, batches, tick)
    return found


def _gather(
    step: Callable[[ArrayTree, Batch], tuple[jax.Array, jax.Array]], params: ArrayTree, batches: EvalBatches, tick: Tick
) -> Arrays:
    count, whole = len(batches.source), list[np.ndarray]()
    for number, part in enumerate(fetch_late(step(params, batch) for batch in batches)):
        tick()
        whole = whole or [np.empty((count, *array.shape[1:]), array.dtype) for array in part]
        indices = batches.order.indices(number)
        for array, rows in zip(whole, part, strict=True):
            array[indices[indices >= 0]] = rows[indices >= 0]  # without those that pad a batch
    outputs, labels = whole
    return outputs, labels


def fetch_late(results: Iterator[ArrayTree]) -> Iterator[ArrayTree]:
    """Yields results on the host, each once the next is dispatched, so that the devices need not wait."""
    pending = next(results)
    for result in results:
        yield jax.device_get(pending)
        pending = result
    yield jax.device_get(pending)
