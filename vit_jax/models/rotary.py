"""Rotary positions: the angles by which pairs of channels are turned, in several forms with one signature."""

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.models.spec import ModelSpec, Rotary

PerToken: TypeAlias = Float[Array, "batch rows heads head_dim"]  # the rows may be more than the tokens
Angles: TypeAlias = Float[np.ndarray, "tokens half"]


def none(spec: ModelSpec) -> None:
    """Returns no angles."""


def axial(spec: ModelSpec) -> Angles:
    """Returns angles by row and column of the patches. The angles of class token and registers are zero.

    As in EVA-02 (arXiv 2303.11331; RoFormer, 2104.09864, equation 34, for each axis), a pair of neighbouring channels
    of a head is a point that is rotated by an angle. Pair i of the first half of the channels has the angle row *
    theta^(-i / quarter), where theta is `rotary_theta` and quarter is a fourth of the head's channels. Pair i of the
    second half has the angle column * theta^(-i / quarter). With `rotary_grid`, rows and columns are first scaled as if
    the grid had that number of patches on a side.
    """
    return _angles(spec, *(np.arange(side) * _scale(spec, side) for side in spec.grid))


def axial_xy(spec: ModelSpec) -> Angles:
    """Returns angles as `axial` does, but of the column in the first half of the channels, and of rows and columns
    that are counted from 1: the class token, which is not turned, is beside the corner (Perception Encoder, arXiv
    2504.13181).
    """
    angles = _angles(spec, *((1 + np.arange(side)) * _scale(spec, side) for side in spec.grid))
    return np.roll(angles, spec.head_dim // 4, axis=1)


def centred(spec: ModelSpec) -> Angles:
    """Returns angles as `axial` does, of the centres of the patches in an image whose sides reach from -1 to 1, times 2
    pi: the angles do not depend on the resolution (DINOv3, arXiv 2508.10104).
    """
    return _angles(spec, *(2 * np.pi * ((2 * np.arange(side) + 1) / side - 1) for side in spec.grid))


def _scale(spec: ModelSpec, side: int) -> float:
    """Returns the factor of rows or columns, of which the grid has `side`."""
    return spec.position.rotary_grid / side if spec.position.rotary_grid else 1.0


def _angles(spec: ModelSpec, rows: Float[np.ndarray, " rows"], columns: Float[np.ndarray, " columns"]) -> Angles:
    """Returns the angle of each pair of channels for every token, given the places of rows and columns of patches."""
    quarter = spec.head_dim // 4
    factors = spec.position.rotary_theta ** -(np.arange(quarter) / quarter)
    places = np.stack(np.meshgrid(rows, columns, indexing="ij")).reshape(2, -1, 1)
    return np.pad(np.concatenate(list(places * factors), axis=1), ((spec.prefix_rows, 0), (0, 0)))


def rotate(x: PerToken, angles: Angles) -> PerToken:
    """Returns x with every pair of channels turned; rows beyond the tokens become zero."""
    sin, cos = (function(angles).astype(np.float32)[:, None] for function in (np.sin, np.cos))
    empty = ((0, x.shape[1] - len(angles)), (0, 0), (0, 0))
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    first, second, s, c = pairs[..., 0], pairs[..., 1], jnp.pad(sin, empty), jnp.pad(cos, empty)
    turned = jnp.stack([first * c - second * s, second * c + first * s], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


ROTARIES: dict[Rotary, Callable[[ModelSpec], Angles | None]] = {
    "none": none,
    "axial": axial,
    "axial_xy": axial_xy,
    "centred": centred,
}
