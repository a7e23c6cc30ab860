"""Nearest neighbours of frozen features by cosine, weighted as by Wu et al. (arXiv 1805.01978, section 3.4)."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Float64, Int, Int32
from ml_collections import ConfigDict

from vit_jax.evals.labelled_features import Examples, check_examples, normalise

TEST_BLOCK, TRAIN_BLOCK = 1024, 65_536  # rows of a block; the similarities of two blocks take 256 MiB


def knn(eval_config: ConfigDict, train: Examples, test: Examples) -> dict[str, float]:
    """Returns the accuracy of the nearest neighbours' votes for each number of neighbours."""
    accuracy = evaluate_knn(train, test, eval_config.k, eval_config.temperature)
    return {f"{count}nn": float(value) for count, value in zip(eval_config.k, accuracy, strict=True)}


def evaluate_knn(
    train: Examples, test: Examples, neighbours: Sequence[int], temperature: float
) -> Float64[np.ndarray, " neighbours"]:
    """Returns the accuracy for each number of neighbours. A neighbour's vote has the weight exp(cosine / temperature).

    Among equally similar training examples the one with the smaller row number is nearer. Among labels with equal votes
    the smallest wins. If there are fewer training examples than neighbours, all of them vote.

    Raises:
        UserError: a split is empty or has features that are not finite.
    """
    check_examples(train, test)
    similarities, rows = find_neighbours(train.features, test.features, min(max(neighbours), len(train.labels)))
    classes, labels = np.unique(train.labels, return_inverse=True)
    correct: np.ndarray = np.zeros(len(neighbours), np.int64)
    for start in range(0, len(test.labels), TEST_BLOCK):
        block = slice(start, start + TEST_BLOCK)
        cosines = similarities[block].astype(np.float64)
        weights = np.exp((cosines - cosines[:, :1]) / temperature)  # relative to the nearest, whose weight is always 1
        columns = np.arange(len(cosines))[:, None] * len(classes) + labels[rows[block]]
        for column, count in enumerate(neighbours):
            chosen = (columns[:, :count].ravel(), weights[:, :count].ravel())
            votes = np.bincount(*chosen, minlength=len(cosines) * len(classes)).reshape(len(cosines), -1)
            correct[column] += np.count_nonzero(classes[votes.argmax(axis=1)] == test.labels[block])
    return correct / len(test.labels)


def find_neighbours(
    train: Float32[np.ndarray, "n width"], test: Float32[np.ndarray, "m width"], count: int
) -> tuple[Float32[np.ndarray, "m count"], Int32[np.ndarray, "m count"]]:
    """Returns the cosines and rows of the `count` training examples that are most similar to each test example.

    The most similar example comes first. Among equally similar examples, the one with the smaller row number comes
    first. The device holds one block of each split at a time. The cosine with a vector of zeros is 0.
    """
    rows = min(TRAIN_BLOCK, len(train))
    similarities: np.ndarray = np.full((len(test), count), -np.inf, np.float32)
    indices: np.ndarray = np.zeros((len(test), count), np.int32)
    for first in range(0, len(train), rows):
        # All blocks have the same size, so that only one program is compiled. Rows that pad the last are never chosen.
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
    """Returns the cosines and rows of the most similar training examples, after one more block of them.

    Args:
        similarities: the cosines of the best examples of the blocks so far, best first.
        indices: the rows of these examples.
        queries: the features of the test examples.
        keys: the features of the block of training examples, padded at the end.
        present: the number of keys that are not padding.
        first: the row of the first key, greater than all rows of earlier blocks.
        count: the number of examples to return.
    """
    cosines = jnp.matmul(normalise(queries), normalise(keys).T, precision="highest")
    rows = jnp.arange(len(keys), dtype=jnp.int32)
    cosines = jnp.where(rows < present, cosines, -jnp.inf)
    if count < len(keys):
        cosines, rows = jax.lax.top_k(cosines, count)  # of equal values the first
    else:
        rows = jnp.broadcast_to(rows, cosines.shape)
    everything = jnp.concatenate([similarities, cosines], axis=1)
    best, places = jax.lax.top_k(everything, count)
    return best, jnp.take_along_axis(jnp.concatenate([indices, rows + first], axis=1), places, axis=1)
