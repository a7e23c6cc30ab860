"""Frozen features with their labels: the input of few-shot regression, linear probes and nearest neighbours."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Float64, Int

from vit_jax import UserError, refuse
from vit_jax.evals.outputs import count_nonfinite

ROWS = 2**16  # rows of features that are in float64 at a time


class Examples(NamedTuple):
    """The features of images [n, width] and their labels [n]."""

    features: Float32[np.ndarray, "n width"]
    labels: Int[np.ndarray, " n"]


def check_examples(train: Examples, test: Examples) -> None:
    """Checks that a classifier can be fitted to the training examples and scored on the test examples.

    Raises:
        UserError: a split is empty, has images without a label, or has features that are infinite or NaN.
    """
    for what, (features, labels) in {"training": train, "test": test}.items():
        if not len(features):
            raise UserError(f"there are no {what} examples to evaluate features on; choose another split.")
        unlabelled = np.count_nonzero(labels < 0)
        bad = count_nonfinite(features)
        refuse(
            (
                unlabelled,
                f"{unlabelled:,} of {len(labels):,} {what} images have no label (-1); choose another split.",
            ),
            (
                bad,
                f"the features of {bad:,} of {len(features):,} {what} images are not finite; evaluate an earlier "
                "checkpoint, or compute in float32.",
            ),
        )


def measure_scale(
    features: Float32[np.ndarray, "n width"] | Float64[np.ndarray, "n width"],
) -> tuple[Float64[np.ndarray, " width"], Float64[np.ndarray, " width"]]:
    """Returns the mean and the scale of each feature, for whitening: (feature - mean) / scale.

    The scale is the standard deviation + 1e-5. The scale of a constant feature is infinite instead, so that the
    whitened feature is 0 in every split, as if it did not exist. Otherwise the rounding error of its mean, divided by
    1e-5, would matter.
    """
    mean, squares = features.mean(axis=0, dtype=np.float64), np.zeros(features.shape[1])
    for start in range(0, len(features), ROWS):  # all rows at once, in float64, would take twice the features' memory
        squares += ((features[start : start + ROWS] - mean) ** 2).sum(axis=0)
    constant = features.min(axis=0) == features.max(axis=0)
    return mean, np.where(constant, np.inf, np.sqrt(squares / len(features)) + 1e-5)


def normalise(features: Float32[Array, "rows width"]) -> Float32[Array, "rows width"]:
    """Returns features divided by their length; a row of zeros stays."""
    largest = jnp.maximum(jnp.abs(features).max(axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    features = features / largest  # whose squares neither overflow nor underflow
    return features / jnp.maximum(jnp.linalg.norm(features, axis=1, keepdims=True), 0.5)


def permute_classes(labels: Int[np.ndarray, " n"], seed: int) -> list[Int[np.ndarray, " rows"]]:
    """Returns for each class, in ascending order, its rows in a random order.

    The result depends on the labels and the seed alone.
    """
    random, order = np.random.default_rng(seed), np.argsort(labels, kind="stable")
    starts: Int[np.ndarray, " classes"] = np.flatnonzero(np.diff(labels[order])) + 1
    return [random.permutation(rows) for rows in np.split(order, starts)]
