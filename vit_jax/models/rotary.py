"""Rotary positions: the angles by which pairs of channels are turned, in several forms with one signature."""

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.models.spec import ModelSpec, Rotary

PerToken: TypeAlias = Float[Array, "batch rows heads head_dim"]  # the rows may be more than the tokens
Angles: TypeAlias = Float[np.ndarray, "tokens half"]

TEMPERATURE = 10_000.0


def none(spec: ModelSpec) -> None:
    """Returns no angles."""


def axial(spec: ModelSpec) -> Angles:
    """Returns angles by row and column of the patches. The angles of class token and registers are zero.

    As in EVA-02 (arXiv 2303.11331; RoFormer, 2104.09864, equation 34, for each axis), a pair of neighbouring channels
    of a head is a point that is rotated by an angle. Pair i of the first half of the channels has the angle row *
    10000^(-i / quarter), where quarter is a fourth of the head's channels. Pair i of the second half has the angle
    column * 10000^(-i / quarter). With `rotary_grid`, rows and columns are first scaled as if the grid had that number
    of patches on a side.
    """
    angles = axial_angles(spec.grid, spec.position.rotary_grid, spec.head_dim)
    return np.pad(angles, ((spec.prefix_rows, 0), (0, 0)))


def rotate(x: PerToken, angles: Angles) -> PerToken:
    """Returns x with every pair of channels turned; rows beyond the tokens become zero."""
    sin, cos = (function(angles).astype(np.float32)[:, None] for function in (np.sin, np.cos))
    empty = ((0, x.shape[1] - len(angles)), (0, 0), (0, 0))
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    first, second, s, c = pairs[..., 0], pairs[..., 1], jnp.pad(sin, empty), jnp.pad(cos, empty)
    turned = jnp.stack([first * c - second * s, second * c + first * s], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def axial_angles(grid: tuple[int, int], reference: int, head_dim: int) -> Float[np.ndarray, "patches half"]:
    """Returns the angle of each pair of channels for every patch in raster order.

    Args:
        grid: (rows, columns) of patches.
        reference: patches on a side of the grid to which rows and columns are scaled; 0: not scaled.
        head_dim: channels of a head.
    """
    quarter = head_dim // 4
    places = np.mgrid[: grid[0], : grid[1]].reshape(2, -1, 1).astype(np.float64)  # of rows, of columns
    if reference:
        places *= reference / np.array(grid, np.float64)[:, None, None]
    return np.concatenate(list(places * TEMPERATURE ** -(np.arange(quarter) / quarter)), axis=1)


ROTARIES: dict[Rotary, Callable[[ModelSpec], Angles | None]] = {"none": none, "axial": axial}
