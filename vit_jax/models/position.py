"""Position embeddings: implementations, with one signature, of the table that is added to the tokens."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.models.spec import PositionKind

PositionTable: TypeAlias = Float[Array, "tokens width"]
Grid: TypeAlias = tuple[int, int]  # (rows, columns) of patches
Angles: TypeAlias = Float[np.ndarray, "patches quarter"]

TEMPERATURE = 10_000.0


def learned(param: Callable[..., Array], grid: Grid, prefix_rows: int, width: int) -> PositionTable:
    """Returns learned rows: `prefix_rows`, then one per patch in raster order (D.4, 1-D), from normal(0.02)."""
    tokens = prefix_rows + grid[0] * grid[1]
    return param("position", jax.nn.initializers.normal(0.02), (tokens, width), jnp.float32)


def sincos2d(param: Callable[..., Array], grid: Grid, prefix_rows: int, width: int) -> PositionTable:
    """Returns fixed sines and cosines of column and row; the rows before the patches are zero.

    As in big_vision: the quarters of the width are, in this order, sin x, cos x, sin y and cos y of the
    patch's column x and row y times frequencies falling geometrically from 1 to 1/10000. Not in the paper.
    """
    del param
    quarter = width // 4
    frequencies = TEMPERATURE ** -(np.arange(quarter) / (quarter - 1))
    rows, columns = _coordinates(grid)
    return _sinusoids((columns * frequencies, rows * frequencies), prefix_rows)


def sincos2d_moco(param: Callable[..., Array], grid: Grid, prefix_rows: int, width: int) -> PositionTable:
    """Returns fixed sines and cosines of row and column; the rows before the patches are zero.

    As in MoCo v3, which calls the row x: the quarters of the width are sin y, cos y, sin x and cos x, and the
    frequencies fall from 1 towards 1/10000 without reaching it. Not in the paper.
    """
    del param
    quarter = width // 4
    frequencies = TEMPERATURE ** -(np.arange(quarter) / quarter)
    rows, columns = _coordinates(grid)
    return _sinusoids((rows * frequencies, columns * frequencies), prefix_rows)


def none(param: Callable[..., Array], grid: Grid, prefix_rows: int, width: int) -> None:
    """Returns no table: the order of the patches is unknown to the model (D.4)."""
    del param, grid, prefix_rows, width


POSITIONS: dict[PositionKind, Callable[[Callable[..., Array], Grid, int, int], PositionTable | None]] = {
    "learned": learned,
    "sincos2d": sincos2d,
    "sincos2d_moco": sincos2d_moco,
    "none": none,
}


def _coordinates(grid: Grid) -> np.ndarray:
    """Returns the row and the column of every patch in raster order, [2, patches, 1]."""
    return np.mgrid[: grid[0], : grid[1]].reshape(2, -1, 1)


def _sinusoids(angles: tuple[Angles, Angles], prefix_rows: int) -> PositionTable:
    """Returns the sines and cosines of both arrays of angles, below `prefix_rows` rows of zeros."""
    patches = np.concatenate([function(angle) for angle in angles for function in (np.sin, np.cos)], axis=1)
    return jnp.asarray(np.pad(patches, ((prefix_rows, 0), (0, 0))), jnp.float32)
