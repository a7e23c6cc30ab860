"""Weights resampled for another resolution or patch size: position tables and the kernel that projects patches."""

import numpy as np
from jaxtyping import Array, Float

from vit_jax import choose


def linear_matrix(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of the authors' interpolation, `scipy.ndimage.zoom(order=1)`.

    The centres of the outermost patches keep their places (align-corners), and nothing is smoothed before shrinking.
    """
    source = np.arange(new) * (old - 1) / max(new - 1, 1)
    return np.maximum(0, 1 - np.abs(source[:, None] - np.arange(old)))


def bicubic_matrix(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of timm's interpolation: PyTorch's bicubic with `antialias=True`, which is Keys'
    cubic with a = -1/2.
    """
    x = _distances(old, new)
    near, far = (1.5 * x - 2.5) * x**2 + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    return _rows_of_sum_1(np.where(x < 1, near, np.where(x < 2, far, 0)))


def flexi_matrix(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of FlexiViT's interpolation: `jax.image.resize(method="linear")`, which smooths
    before it shrinks.
    """
    return _rows_of_sum_1(np.maximum(0, 1 - _distances(old, new)))


def bilinear_matrix(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of `tf.image.resize`, bilinear without antialias: two neighbours for each sample,
    half-pixel centres, the edges repeated.
    """
    places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(old)))


def _distances(old: int, new: int) -> np.ndarray:
    """Returns the distance of each new centre from each old one [new, old], in old steps or, where the grid shrinks, in
    new ones. The outermost edges keep their places (half-pixel centres).
    """
    centres = (np.arange(new) + 0.5) * old / new
    return np.abs(np.arange(old) + 0.5 - centres[:, None]) / max(old / new, 1)


def _rows_of_sum_1(matrix: np.ndarray) -> np.ndarray:
    """Returns the matrix with each row divided by its sum: the edges cut rows off."""
    return matrix / matrix.sum(axis=1, keepdims=True)


RESAMPLINGS = {"linear": linear_matrix, "bicubic": bicubic_matrix, "flexi": flexi_matrix}


def resample_positions(
    position: Float[Array | np.ndarray, "tokens width"],
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    class_rows: int,
    method: str = "linear",
) -> Float[np.ndarray, "new_tokens width"]:
    """Returns a position table for another grid of patches (section 3.2). Class rows are unchanged.

    Args:
        position: class rows, then one row per patch in raster order.
        old_grid: (rows, columns) of patches in `position`.
        new_grid: (rows, columns) of patches in the result.
        class_rows: the number of rows at the start that belong to no patch.
        method: linear, as published; bicubic, as in timm; or flexi, as in FlexiViT.

    Raises:
        ValueError: the table does not have `class_rows + rows * columns` rows.
        UserError: the method is unknown.
    """
    make_matrix = RESAMPLINGS[choose("method of resampling", method, RESAMPLINGS)]
    table = np.asarray(position)
    if len(table) != class_rows + old_grid[0] * old_grid[1]:
        raise ValueError(f"{len(table)} rows are not {class_rows} class rows and a grid of {old_grid}")
    if old_grid == new_grid:
        return table
    patches = table[class_rows:].reshape(*old_grid, -1).astype(np.float64)
    down, across = (make_matrix(old, new) for old, new in zip(old_grid, new_grid, strict=True))
    patches = np.einsum("yr,xc,rcd->yxd", down, across, patches, optimize=True)
    return np.concatenate([table[:class_rows], patches.reshape(-1, table.shape[1]).astype(table.dtype)])


def resize_patches(
    kernel: Float[Array | np.ndarray, "rows columns channels width"], size: int
) -> Float[np.ndarray, "new_rows new_columns channels width"]:
    """Returns the kernel for patches of `size` x `size` pixels, as FlexiViT does (arXiv 2212.08013, section 3.4).

    The kernel is multiplied by the pseudo-inverse of the bilinear resize of patches. Where that resize loses nothing, a
    resized patch has the embedding of the original patch. Resizing there and back loses information: start from the
    kernel as it was trained.
    """
    kernel = np.asarray(kernel)
    if kernel.shape[:2] == (size, size):
        return kernel
    # The pseudo-inverse of a Kronecker product is that of its factors: one for the rows, one for the columns.
    down, across = (np.linalg.pinv(bilinear_matrix(old, size).T) for old in kernel.shape[:2])
    resized = np.einsum("yr,xc,rcio->yxio", down, across, kernel.astype(np.float64), optimize=True)
    return resized.astype(kernel.dtype)
