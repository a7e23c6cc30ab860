"""Measures of the inside of a model, as functions of arrays: attention, representations, gradients and parameters.

Those of attention weights and gradients may be inside `jax.jit`.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

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


def register_maps(weights: Weights, grid: Grid, registers: int) -> Float[Array, "*batch registers rows columns"]:
    """Returns what each register gets from each patch (arXiv 2309.16588).

    Args:
        weights: attention; the patches are the last of the tokens, and the registers come just before them.
        grid: (rows, columns) of the patches, which are in raster order.
        registers: the number of registers; 0 if there are none.
    """
    weights, before = jnp.asarray(weights), weights.shape[-1] - math.prod(grid)
    rows = weights[..., before - registers : before, before:]
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


def linear_cka(representations: Float[np.ndarray, "layers examples width"]) -> Float[np.ndarray, "layers layers"]:
    """Returns the similarity of every pair of layers by linear CKA, between 0 and 1.

    <K_a, K_b> / (|K_a| |K_b|) with K = X Xᵀ of the centred representations X of the same examples, which equals
    |X_aᵀ X_b|² / (|X_aᵀ X_a| |X_bᵀ X_b|), all norms Frobenius's (arXiv 1905.00414, section 3). It does not change if a
    layer is rotated or scaled, and is biased upwards where the examples are not many more than the width. A layer
    whose representations are all equal has similarity 0 to all others.
    """
    centred = representations.astype(np.float64) - representations.mean(axis=1, keepdims=True, dtype=np.float64)
    grams = (centred @ centred.swapaxes(1, 2)).reshape(len(centred), -1)
    norms = np.linalg.norm(grams, axis=1, keepdims=True)
    grams = np.divide(grams, norms, out=np.zeros_like(grams), where=norms > 0)
    return grams @ grams.T


def patch_components(
    patches: Float[np.ndarray, "*patches width"], count: int = 3
) -> tuple[Float[np.ndarray, "*patches components"], Float[np.ndarray, " components"]]:
    """Returns the first principal components of the tokens of patches, and their shares of the variance.

    Each token is one sample (arXiv 2304.07193, Figure 1); see `principal_components`.

    Args:
        patches: tokens of one image or of several.
        count: components wanted; those that the tokens lack are 0.
    """
    samples = patches.reshape(-1, patches.shape[-1])
    directions, shares = principal_components(samples, count)
    scores = (samples - samples.mean(axis=0, dtype=np.float64)) @ directions.T
    missing = count - len(shares)
    scores = np.pad(scores, ((0, 0), (0, missing))).astype(patches.dtype)
    return scores.reshape(*patches.shape[:-1], count), np.pad(shares, (0, missing))


def principal_components(
    samples: Float[np.ndarray, "samples width"], count: int
) -> tuple[Float[np.ndarray, "components width"], Float[np.ndarray, " components"]]:
    """Returns the orthonormal directions of largest variance, in descending order, and their shares of the variance.

    The variance is that about the mean of all samples, in float64. Of each direction, the entry of largest size is
    positive, so that equal samples have equal directions. Shares are 0 if the samples are all equal.

    Args:
        samples: a row for each sample.
        count: directions wanted; fewer are returned where there are fewer samples or values in a sample.
    """
    centred = samples - samples.mean(axis=0, dtype=np.float64)
    if len(centred) > centred.shape[1]:  # faster than the decomposition of the samples
        variances, columns = np.linalg.eigh(centred.T @ centred)
        variances, directions = np.maximum(variances[::-1], 0), columns.T[::-1]
    else:
        _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
        variances = np.square(sizes)
    directions = directions[:count]
    largest = np.abs(directions).argmax(axis=1, keepdims=True)
    directions = directions * np.sign(np.take_along_axis(directions, largest, axis=1))
    return directions, variances[:count] / max(variances.sum(), np.finfo(np.float64).tiny)


def class_saliency(
    logits: Callable[[Array], Array],
    images: Float[Array | np.ndarray, "batch rows columns 3"],
    classes: Int[Array | np.ndarray, " batch"],
) -> Float[Array, "batch rows columns"]:
    """Returns the largest |d logit / d value| of the colours of each pixel (arXiv 1312.6034, section 3.1).

    Args:
        logits: a function from images to logits [batch, classes], such as
            `lambda images: model.apply(params, images)[0]`. One image must not change the logits of another.
        images: the images as the model reads them.
        classes: for each image, the class whose logit is meant.
    """

    def total(images: Array) -> Array:
        return jnp.take_along_axis(logits(images), classes[:, None], axis=1).sum()

    return jnp.abs(jax.grad(total)(jnp.asarray(images))).max(axis=-1)


def pixel_filters(params: dict[str, Any], is_hybrid: bool) -> Float[np.ndarray, "rows columns channels filters"]:
    """Returns the filters that read the pixels: those of the patches, or of a hybrid's first convolution.

    Those of a hybrid are as the ResNet uses them: each with mean 0 and standard deviation 1.
    """
    if not is_hybrid:
        return np.asarray(params["embed"]["kernel"], np.float32)
    kernel, axes = np.asarray(params["stem"]["root"]["conv"]["kernel"], np.float32), (0, 1, 2)
    return (kernel - kernel.mean(axes)) / np.maximum(kernel.std(axes), np.finfo(np.float32).tiny)


def embedding_filters(
    kernel: Float[np.ndarray, "rows columns channels filters"], count: int = 28
) -> tuple[Float[np.ndarray, "components rows columns channels"], Float[np.ndarray, " components"]]:
    """Returns the principal components of the filters of a projection of patches, and their shares of the variance.

    Each filter is one sample (Figure 7 left: the first 28 of ViT-L/32); see `principal_components`. The sign of a
    component means nothing.

    Args:
        kernel: `params["embed"]["kernel"]`.
        count: components wanted; fewer are returned where there are fewer filters or weights in a filter.
    """
    samples = kernel.reshape(-1, kernel.shape[-1]).T
    directions, shares = principal_components(samples, count)
    return directions.reshape(-1, *kernel.shape[:-1]), shares


def position_similarity(
    table: Float[np.ndarray, "tokens width"], grid: tuple[int, int]
) -> Float[np.ndarray, "rows columns rows columns"]:
    """Returns the cosine similarity of the position embedding of each patch to those of all (Figure 7 centre, 10).

    Args:
        table: `params["position"]`; the patches are its last rows.
        grid: (rows, columns) of the patches, in raster order.
    """
    patches = table[-grid[0] * grid[1] :].astype(np.float64)
    patches /= np.maximum(np.linalg.norm(patches, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return (patches @ patches.T).reshape(*grid, *grid)
