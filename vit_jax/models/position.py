"""Position embeddings: the table that is added to the tokens, and its resampling to another resolution."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax import choose

Table: TypeAlias = Float[Array, "tokens width"]
Grid: TypeAlias = tuple[int, int]  # (rows, columns) of patches

TEMPERATURE = 10_000.0


def learned(param: Callable[..., Array], grid: Grid, class_rows: int, width: int) -> Table:
    """Returns one learned row per class token, then one per patch in raster order (D.4, 1-D), from normal(0.02)."""
    tokens = class_rows + grid[0] * grid[1]
    return param("position", jax.nn.initializers.normal(0.02), (tokens, width), jnp.float32)


def sincos2d(param: Callable[..., Array], grid: Grid, class_rows: int, width: int) -> Table:
    """Returns fixed sines and cosines of column and row; a class token gets zeros.

    As in big_vision: each quarter of the width is, in this order, sin x, cos x, sin y and cos y of the
    patch's column x and row y times frequencies falling geometrically from 1 to 1/10000. Not in the paper.
    """
    del param
    quarter = width // 4
    frequencies = TEMPERATURE ** -(np.arange(quarter) / (quarter - 1))
    rows, columns = _coordinates(grid)
    return _waves((columns * frequencies, rows * frequencies), class_rows)


def sincos2d_moco(param: Callable[..., Array], grid: Grid, class_rows: int, width: int) -> Table:
    """Returns fixed sines and cosines of row and column; a class token gets zeros.

    As in MoCo v3, which calls the row x: the quarters of the width are sin y, cos y, sin x and cos x, and the
    frequencies fall from 1 towards 1/10000 without reaching it. Not in the paper.
    """
    del param
    quarter = width // 4
    frequencies = TEMPERATURE ** -(np.arange(quarter) / quarter)
    rows, columns = _coordinates(grid)
    return _waves((rows * frequencies, columns * frequencies), class_rows)


def _coordinates(grid: Grid) -> np.ndarray:
    """Returns the row and the column of every patch in raster order, [2, patches, 1]."""
    return np.mgrid[: grid[0], : grid[1]].reshape(2, -1, 1)


def _waves(angles: tuple[np.ndarray, np.ndarray], class_rows: int) -> Table:
    """Returns sines and cosines of each of the angles [patches, quarter], under rows of zeros."""
    patches = np.concatenate([wave(angle) for angle in angles for wave in (np.sin, np.cos)], axis=1)
    return jnp.asarray(np.pad(patches, ((class_rows, 0), (0, 0))), jnp.float32)


def none(param: Callable[..., Array], grid: Grid, class_rows: int, width: int) -> None:
    """Returns no table: the patches are a bag (D.4)."""
    del param, grid, class_rows, width


TABLES = {"learned": learned, "sincos2d": sincos2d, "sincos2d_moco": sincos2d_moco, "none": none}


def linear(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of the authors' interpolation, `scipy.ndimage.zoom(order=1)`.

    The centres of the outermost patches stay where they are (align-corners); nothing is smoothed before shrinking.
    """
    source = np.arange(new) * (old - 1) / max(new - 1, 1)
    return np.maximum(0, 1 - np.abs(source[:, None] - np.arange(old)))


def bicubic(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of timm's interpolation: PyTorch's bicubic with `antialias=True`, by Keys' cubic
    with a = -1/2.
    """
    x = _distances(old, new)
    near, far = (1.5 * x - 2.5) * x**2 + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    return _normal(np.where(x < 1, near, np.where(x < 2, far, 0)))


def flexi(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of FlexiViT's interpolation: `jax.image.resize(method="linear")`, which smooths
    before it shrinks.
    """
    return _normal(np.maximum(0, 1 - _distances(old, new)))


def _distances(old: int, new: int) -> np.ndarray:
    """Returns how far each new centre is from each old one [new, old]: in old steps or, where the grid shrinks, new
    ones. The outermost edges stay where they are (half-pixel centres).
    """
    centres = (np.arange(new) + 0.5) * old / new
    return np.abs(np.arange(old) + 0.5 - centres[:, None]) / max(old / new, 1)


def _normal(weights: np.ndarray) -> np.ndarray:
    """Returns weights that sum to 1, cut off at the edges."""
    return weights / weights.sum(axis=1, keepdims=True)


RESAMPLINGS = {"linear": linear, "bicubic": bicubic, "flexi": flexi}


def resample_positions(
    position: Float[Array | np.ndarray, "tokens width"],
    old_grid: Grid,
    new_grid: Grid,
    class_rows: int,
    method: str = "linear",
) -> Float[np.ndarray, "new_tokens width"]:
    """Returns a position table for another grid of patches (section 3.2). Class rows are unchanged.

    Args:
        position: class rows, then one row per patch in raster order.
        old_grid: (rows, columns) of patches that the table has.
        new_grid: (rows, columns) that it shall have.
        class_rows: how many rows at the start belong to no patch.
        method: linear, as published; bicubic, as in timm; or flexi, as in FlexiViT.

    Raises:
        ValueError: the table has not `class_rows + rows * columns` rows.
        UserError: no such method.
    """
    weights = RESAMPLINGS[choose("method of resampling", method, RESAMPLINGS)]
    table = np.asarray(position)
    if len(table) != class_rows + old_grid[0] * old_grid[1]:
        raise ValueError(f"{len(table)} rows are not {class_rows} class rows and a grid of {old_grid}")
    if old_grid == new_grid:
        return table
    patches = table[class_rows:].reshape(*old_grid, -1).astype(np.float64)
    down, across = (weights(old, new) for old, new in zip(old_grid, new_grid, strict=True))
    patches = np.einsum("yr,xc,rcd->yxd", down, across, patches, optimize=True)
    return np.concatenate([table[:class_rows], patches.reshape(-1, table.shape[1]).astype(table.dtype)])
