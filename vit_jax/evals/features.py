"""Frozen features of a data set: one pass over its images for all that learn from them."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

from vit_jax.evals.examples import Examples

Outputs: TypeAlias = Callable[[Any, dict[str, jax.Array]], tuple[jax.Array, jax.Array]]  # as `Inference.features`
Tick: TypeAlias = Callable[[], None]


@runtime_checkable
class FeatureCache(Protocol):
    """Features by one set of weights: `EvalBatches.identity` -> examples. A dict is one."""

    def get(self, identity: str, /) -> Examples | None:
        """Returns the features of some examples, or None."""

    def __setitem__(self, identity: str, examples: Examples, /) -> None:
        """Keeps the features of some examples."""


def read_features(features: Outputs, params: Any, batches: Any, cache: FeatureCache, tick: Tick) -> Examples:
    """Returns the features of all examples, and keeps them in the cache. Every host has all of them.

    Args:
        features: `Inference.features`.
        params: the parameters, on the devices.
        batches: `data.eval_batches` of the examples.
        cache: of these parameters.
        tick: called after each batch that is dispatched.

    Raises:
        UserError: an image cannot be read.
    """
    found = cache.get(batches.identity)
    if found is None:
        found = cache[batches.identity] = Examples(*read_outputs(features, params, batches, tick))
    return found


def read_outputs(outputs: Outputs, params: Any, batches: Any, tick: Tick) -> tuple[np.ndarray, np.ndarray]:
    """Returns what the model gives for each example, once and in the order of the source, and the labels."""
    count, start, whole = len(batches.source), 0, list[np.ndarray]()
    for part in fetch_late(outputs(params, batch) for batch in batches):
        tick()
        whole = whole or [np.empty((count, *array.shape[1:]), array.dtype) for array in part]
        for array, rows in zip(whole, part, strict=True):
            array[start : start + len(rows)] = rows[: count - start]  # without those that pad the last batch
        start += len(part[0])
    outputs_of_all, labels = whole
    return outputs_of_all, labels


def fetch_late(results: Iterator[Any]) -> Iterator[Any]:
    """Yields results on the host, each once the next is dispatched, so that the devices need not wait."""
    pending = next(results)
    for result in results:
        yield jax.device_get(pending)
        pending = result
    yield jax.device_get(pending)
