"""Measures of the parameters alone: the filters and position embeddings that a model has learned, without images."""

from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn.decomposition import PCA


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

    Each filter is one sample, less the mean of all (Figure 7 left: the first 28 of ViT-L/32). A component has length 1,
    and its sign means nothing.

    Args:
        kernel: `params["embed"]["kernel"]`.
        count: components wanted; fewer are returned where there are fewer filters or weights in a filter.
    """
    samples = kernel.reshape(-1, kernel.shape[-1]).T
    pca = PCA(min(count, *samples.shape), svd_solver="full").fit(samples)
    return pca.components_.reshape(-1, *kernel.shape[:-1]), pca.explained_variance_ratio_


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
