"""Nearest neighbours of frozen features by cosine, weighted as by Wu et al. (arXiv 1805.01978, section 3.4)."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Float64, Int, Int32

from vit_jax.evals.labelled_features import Examples, check_examples

TEST_BLOCK, TRAIN_BLOCK = 1024, 65_536  # rows whose similarities are in memory at once: 256 MiB


def evaluate_knn(
    train: Examples, test: Examples, neighbours: Sequence[int], temperature: float = 0.07
) -> Float64[np.ndarray, " neighbours"]:
    """Returns the accuracy for each number of neighbours, of which each votes with exp(cosine / temperature).

    Of equally similar examples the first comes first, and of equal votes the smallest label. Where there are fewer
    examples than neighbours, all vote.

    Raises:
        UserError: a split is empty or has features that are not finite.
    """
    check_examples(train, test)
    similarities, rows = find_neighbours(train.features, test.features, min(max(neighbours), len(train.labels)))
    classes, labels = np.unique(train.labels, return_inverse=True)
    correct: np.ndarray = np.zeros(len(neighbours), np.int64)
    for start in range(0, len(test.labels), TEST_BLOCK):
        block = slice(start, start + TEST_BLOCK)
        found = similarities[block].astype(np.float64)
        weights = np.exp((found - found[:, :1]) / temperature)  # relative to the nearest, which so never underflows
        columns = np.arange(len(found))[:, None] * len(classes) + labels[rows[block]]
        for column, count in enumerate(neighbours):
            chosen = (columns[:, :count].ravel(), weights[:, :count].ravel())
            votes = np.bincount(*chosen, minlength=len(found) * len(classes)).reshape(len(found), -1)
            correct[column] += np.count_nonzero(classes[votes.argmax(axis=1)] == test.labels[block])
    return correct / len(test.labels)


def find_neighbours(
    train: Float32[np.ndarray, "n width"], test: Float32[np.ndarray, "m width"], count: int
) -> tuple[Float32[np.ndarray, "m count"], Int32[np.ndarray, "m count"]]:
    """Returns the cosines and rows of the `count` training examples that are most similar to each test example.

    The most similar come first; of equally similar ones, the one with the smaller row number. The device holds one
    block of each split at a time. The cosine with a vector of zeros is 0.
    """
    rows = min(TRAIN_BLOCK, len(train))
    similarities: np.ndarray = np.full((len(test), count), -np.inf, np.float32)
    indices: np.ndarray = np.zeros((len(test), count), np.int32)
    for first in range(0, len(train), rows):
        # All blocks have one size, so that one program is compiled; what pads the last one is never chosen.
        keys, present = jax.device_put((_pad(train[first : first + rows], rows), min(rows, len(train) - first)))
        for start in range(0, len(test), TEST_BLOCK):
            block = slice(start, start + TEST_BLOCK)
            size = len(similarities[block])
            given = (similarities[block], indices[block], test[block])
            best = _merge(*(_pad(array, TEST_BLOCK) for array in given), keys, present, first, count)
            similarities[block], indices[block] = (np.asarray(array)[:size] for array in best)
    return similarities, indices


def _pad(array: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(array, ((0, rows - len(array)), (0, 0)))


@partial(jax.jit, static_argnames="count")
def _merge(
    similarities: Float32[Array, "block count"],
    indices: Int32[Array, "block count"],
    queries: Float32[Array, "block width"],
    keys: Float32[Array, "rows width"],
    present: Int[Array, ""],
    first: Int[Array, ""],
    count: int,
) -> tuple[Float32[Array, "block count"], Int32[Array, "block count"]]:
    """Returns the best of those found so far and a block of training examples, whose rows are greater."""
    cosines = jnp.matmul(_normalise(queries), _normalise(keys).T, precision="highest")
    rows = jnp.arange(len(keys), dtype=jnp.int32)
    cosines = jnp.where(rows < present, cosines, -jnp.inf)
    if count < len(keys):
        cosines, rows = jax.lax.top_k(cosines, count)  # of equal values the first
    else:
        rows = jnp.broadcast_to(rows, cosines.shape)
    everything = jnp.concatenate([similarities, cosines], axis=1)
    best, places = jax.lax.top_k(everything, count)
    return best, jnp.take_along_axis(jnp.concatenate([indices, rows + first], axis=1), places, axis=1)


def _normalise(features: Float32[Array, "rows width"]) -> Float32[Array, "rows width"]:
    largest = jnp.maximum(jnp.abs(features).max(axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    features = features / largest  # whose squares neither overflow nor underflow
    return features / jnp.maximum(jnp.linalg.norm(features, axis=1, keepdims=True), 0.5)
