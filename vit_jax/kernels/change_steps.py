"""The change of queries and keys, and its gradient, in the steps of the attention kernels' grid."""

import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from vit_jax.kernels.changes import window
from vit_jax.kernels.packing import ROW_TILE
from vit_jax.kernels.tiles import Shape

FusedQKV: TypeAlias = Float[Array, "packs rows qkv_width"]


def changed(
    shape: Shape, qkv: Float[Array, "packs rows qkv_width"], tables: tuple[Array, ...]
) -> Float[Array, "packs rows qkv_width"]:
    """Returns the queries, keys and values that attention gets."""
    if shape.change is None:
        return qkv

    def change(pack: Float[Array, "rows qkv_width"]) -> Float[Array, "rows qkv_width"]:
        parts = [_apply_change(shape, section, pack[:, lanes], tables) for section, lanes in _windows(shape)]
        return jnp.concatenate([*parts, pack[:, 2 * shape.width :]], axis=1)

    return jax.vmap(change)(qkv)


def _windows(shape: Shape) -> list[tuple[int, slice]]:
    """Returns section and lanes of whole heads of queries, then of keys, in the fused layout."""
    size = window(shape.head_dim, shape.width)
    starts = itertools.product(range(2), range(0, shape.width, size))
    return [
        (section, slice(section * shape.width + start, section * shape.width + min(start + size, shape.width)))
        for section, start in starts
    ]


def write_changed(shape: Shape, qkv: Any, tables: tuple[Any, ...], changed: Any) -> None:
    """Writes the changed queries and keys, in the first step of the grid over the queries."""

    @_in_step(shape, 0)
    def _() -> None:
        values = tuple(table[...] for table in tables)
        for pack in range(shape.packs):
            for section, lanes in _windows(shape):
                changed[pack, :, lanes] = _apply_change(shape, section, qkv[pack, :, lanes], values)


def differentiate_change(
    shape: Shape, qkv: Any, tables: tuple[Any, ...], grad_qkv: Any, sums: Any, of_norms: tuple[Any, ...]
) -> None:
    """Replaces the gradients of changed queries and keys by those of the projected ones, in the last step of the grid
    over the queries, and writes their sums and the gradient of the norms' table.
    """
    change = shape.change
    assert change

    @_in_step(shape, shape.query_steps - 1)
    def _() -> None:
        values = tuple(table[...] for table in tables)
        for ref in of_norms:
            ref[...] = jnp.zeros(ref.shape, ref.dtype)
        for section, lanes in _windows(shape):
            added = 0.0
            for pack in range(shape.packs):
                x, grad = qkv[pack, :, lanes], grad_qkv[pack, :, lanes]
                grads, of_parameters = change.transpose(x, grad, section, shape.head_dim, values)
                grad_qkv[pack, :, lanes] = grads.astype(grad_qkv.dtype)
                added += grads.reshape(-1, ROW_TILE, grads.shape[1]).sum(0)
                for ref in of_norms:
                    ref[0, 2 * section : 2 * section + 2, : x.shape[1]] += of_parameters
            sums[0, :, lanes] = added


def _in_step(shape: Shape, step: int) -> Callable[[Callable[[], None]], Any]:
    """Returns a decorator that calls a function in one step of the grid over the queries."""
    return pl.when(pl.program_id(1) == step) if shape.query_steps > 1 else lambda function: function()


def _apply_change(shape: Shape, section: int, x: Array, tables: tuple[Array, ...]) -> Array:
    assert shape.change
    return shape.change.apply(x, section, shape.head_dim, tables)
