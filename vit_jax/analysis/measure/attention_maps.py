"""Measures of attention weights: rollout, distance and entropy. Every function may be inside `jax.jit`."""

import math
from collections.abc import Iterable
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Weights: TypeAlias = Float[Array | np.ndarray, "*batch queries keys"]
Grid: TypeAlias = tuple[int, int]  # (rows, columns) of patches


def attention_rollout(
    layers: Iterable[Float[Array | np.ndarray, "batch heads tokens tokens"]], residual: float = 0.5
) -> Float[Array, "batch tokens tokens"]:
    """Returns how much of each input token (last axis) reaches each token after the last layer; rows sum to 1.

    R_l = ((1 - r) mean_h A_l + r I) R_(l-1), with R_0 = I (arXiv 2005.00928, section 3; D.8 of the ViT paper). A
    residual share r of 1/2 is the identity added and the rows divided by their sum, as the authors' code does; 0 is the
    product of the attention alone, as the paper's text says.

    Args:
        layers: the weights of each layer, from the first, whose rows sum to 1: `out["attention"]`, or its parts.
        residual: the share of the residual connection.
    """
    rollout: Array | float = 1.0
    for weights in layers:
        mean = jnp.asarray(weights).mean(axis=1)
        mixed = (1 - residual) * mean + residual * jnp.eye(mean.shape[-1])
        rollout = mixed if isinstance(rollout, float) else jnp.matmul(mixed, rollout, precision="highest")
    return rollout


def query_maps(weights: Weights, grid: Grid, class_token: bool) -> Float[Array, "*batch rows columns"]:
    """Returns what the class token, or the average patch where there is none, gets from each patch.

    Args:
        weights: attention or its rollout; the patches are the last of the tokens.
        grid: (rows, columns) of the patches, which are in raster order.
        class_token: whether token 0 is a class token.
    """
    weights, before = jnp.asarray(weights), weights.shape[-1] - math.prod(grid)
    rows = weights[..., 0, before:] if class_token else weights[..., before:, before:].mean(axis=-2)
    return rows.reshape(*rows.shape[:-1], *grid)


def attention_distance(weights: Weights, grid: Grid, patch_size: int) -> Float[Array, "*batch"]:
    """Returns the mean distance, in pixels, between a patch and what it attends to.

    mean_i sum_j A_ij d_ij, where d_ij is the distance of the centres of patches i and j (D.7, Figures 7 and 11). Rows
    and columns of other tokens are left out, and the rest is not divided by its sum, as in the authors' code.

    Args:
        weights: attention; the patches are the last of the tokens.
        grid: (rows, columns) of the patches, which are in raster order.
        patch_size: pixels of the image between the centres of neighbouring patches; in hybrids too.
    """
    patches = math.prod(grid)
    among = jnp.asarray(weights)[..., -patches:, -patches:]
    distances = jnp.asarray(patch_distances(grid) * patch_size, among.dtype)
    return jnp.einsum("...qk,qk->...", among, distances, precision="highest") / patches


def uniform_distance(grid: Grid, patch_size: int) -> float:
    """Returns `attention_distance`, in pixels, of patches that attend to all patches equally and to nothing else."""
    return float(patch_distances(grid).mean() * patch_size)


def patch_distances(grid: Grid) -> Float[np.ndarray, "patches patches"]:
    """Returns the Euclidean distances between the patches of a grid in raster order; neighbours are 1 apart."""
    places = np.mgrid[: grid[0], : grid[1]].reshape(2, -1)
    return np.hypot(*(places[:, :, None] - places[:, None]))


def attention_entropy(weights: Weights) -> Float[Array, "*batch"]:
    """Returns the mean entropy of the queries' weights, in nats: mean_i sum_j -A_ij ln A_ij.

    It is 0 for attention to one token, and the logarithm of the number of tokens for equal attention to all.
    """
    weights = jnp.asarray(weights)
    return jnp.where(weights > 0, -weights * jnp.log(jnp.where(weights > 0, weights, 1)), 0).sum(-1).mean(-1)
