"""Position embeddings: the table that is added to the tokens, and its resampling to another resolution."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Table: TypeAlias = Float[Array, "tokens width"]
Grid: TypeAlias = tuple[int, int]  # (rows, columns) of patches

TEMPERATURE = 10_000.0


def learned(param: Callable[..., Array], grid: Grid, class_rows: int, width: int) -> Table:
    """Returns one learned row per class token, then one per patch in raster order (D.4, 1-D), from normal(0.02)."""
    tokens = class_rows + grid[0] * grid[1]
    return param("position", jax.nn.initializers.normal(0.02), (tokens, width), jnp.float32)


def sincos2d(param: Callable[..., Array], grid: Grid, class_rows: int, width: int) -> Table:
    """Returns fixed sines and cosines of column and row; a class token gets zeros.

    As in big_vision, after MoCo v3: each quarter of the width is, in this order, sin x, cos x, sin y and cos y of the
    patch's column x and row y times frequencies falling geometrically from 1 to 1/10000. Not in the paper.
    """
    del param
    quarter = width // 4
    frequencies = TEMPERATURE ** -(np.arange(quarter) / (quarter - 1))
    rows, columns = np.mgrid[: grid[0], : grid[1]].reshape(2, -1, 1)
    x, y = columns * frequencies, rows * frequencies
    patches = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    return jnp.asarray(np.pad(patches, ((class_rows, 0), (0, 0))), jnp.float32)


def none(param: Callable[..., Array], grid: Grid, class_rows: int, width: int) -> None:
    """Returns no table: the patches are a bag (D.4)."""
    del param, grid, class_rows, width


TABLES = {"learned": learned, "sincos2d": sincos2d, "none": none}


def resample(
    position: Float[Array | np.ndarray, "tokens width"], old_grid: Grid, new_grid: Grid, class_rows: int
) -> Float[np.ndarray, "new_tokens width"]:
    """Returns a position table for another grid of patches (section 3.2).

    Bilinear between the centres of the outermost patches, which stay where they are (align-corners), without
    anti-aliasing: the authors' `scipy.ndimage.zoom(order=1)`. Class rows are unchanged.

    Args:
        position: class rows, then one row per patch in raster order.
        old_grid: (rows, columns) of patches that the table has.
        new_grid: (rows, columns) that it shall have.
        class_rows: how many rows at the start belong to no patch.

    Raises:
        ValueError: the table has not `class_rows + rows * columns` rows.
    """
    table = np.asarray(position)
    if len(table) != class_rows + old_grid[0] * old_grid[1]:
        raise ValueError(f"{len(table)} rows are not {class_rows} class rows and a grid of {old_grid}")
    if old_grid == new_grid:
        return table
    patches = table[class_rows:].reshape(*old_grid, -1).astype(np.float64)
    down, across = (_weights(old, new) for old, new in zip(old_grid, new_grid, strict=True))
    patches = np.einsum("yr,xc,rcd->yxd", down, across, patches, optimize=True)
    return np.concatenate([table[:class_rows], patches.reshape(-1, table.shape[1]).astype(table.dtype)])


def _weights(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of linear interpolation with aligned corners."""
    source = np.arange(new) * (old - 1) / max(new - 1, 1)
    return np.maximum(0, 1 - np.abs(source[:, None] - np.arange(old)))
