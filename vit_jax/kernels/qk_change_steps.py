"""The change of queries and keys, and its gradient, in the steps of the attention kernels' grid."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from vit_jax.kernels.attention_shape import AttentionShape
from vit_jax.kernels.packing import ROW_TILE
from vit_jax.kernels.qk_change import CHANGED_ROWS, lanes_of_heads

FusedQKV: TypeAlias = Float[Array, "packs rows qkv_width"]


class _Piece(NamedTuple):
    """Rows of a pack, and the lanes of whole heads of queries (section 0) or of keys (1), in the fused layout."""

    section: int
    rows: slice
    lanes: slice

    def take(self, shape: AttentionShape, tables: tuple[Any, ...]) -> tuple[Array, ...]:
        """Returns the parts of the tables that the piece needs. The tables are arrays or references."""
        lanes, norms = slice(self.lanes.stop - self.lanes.start), shape.norm_tables
        return *(table[:, lanes] for table in tables[:norms]), *(table[self.rows, lanes] for table in tables[norms:])


def _pieces(shape: AttentionShape, rows_at_once: int) -> Iterator[_Piece]:
    size, rows = lanes_of_heads(shape.head_dim, shape.width), shape.packing.rows
    starts = itertools.product(range(2), range(0, shape.width, size), range(0, rows, rows_at_once))
    for section, start, row in starts:
        lanes = slice(section * shape.width + start, section * shape.width + min(start + size, shape.width))
        yield _Piece(section, slice(row, min(row + rows_at_once, rows)), lanes)


def apply_change(shape: AttentionShape, qkv: FusedQKV, tables: tuple[Array, ...]) -> FusedQKV:
    """Returns the queries, keys and values that attention gets: queries and keys after the change, if there is one."""
    if shape.change is None:
        return qkv

    def change(pack: Float[Array, "rows qkv_width"]) -> Float[Array, "rows qkv_width"]:
        pieces = _pieces(shape, shape.packing.rows)
        parts = [_apply(shape, piece, pack[:, piece.lanes], tables) for piece in pieces]
        return jnp.concatenate([*parts, pack[:, 2 * shape.width :]], axis=1)

    return jax.vmap(change)(qkv)


def write_changed(shape: AttentionShape, qkv: Any, tables: tuple[Any, ...], changed: Any) -> None:
    """Writes the changed queries and keys to `changed`, in the first step of the grid over the queries only."""

    @_in_step(shape, 0)
    def _() -> None:
        for pack, piece in itertools.product(range(shape.packs), _pieces(shape, CHANGED_ROWS)):
            where = pack, piece.rows, piece.lanes
            changed[where] = _apply(shape, piece, qkv[where], tables)


def differentiate_change(
    shape: AttentionShape, qkv: Any, tables: tuple[Any, ...], grad_qkv: Any, sums: Any, of_norms: tuple[Any, ...]
) -> None:
    """Replaces, in `grad_qkv`, the gradients of changed queries and keys by the gradients of the projected ones.

    It also writes the sums of these gradients over rows, and the gradient of the norms' table. All this happens in the
    last step of the grid over the queries only.
    """
    change = shape.change
    assert change is not None

    @_in_step(shape, shape.query_steps - 1)
    def _() -> None:
        for ref in of_norms:
            ref[...] = jnp.zeros(ref.shape, ref.dtype)
        sums[0, :, : 2 * shape.width] = jnp.zeros((ROW_TILE, 2 * shape.width), sums.dtype)
        for pack, piece in itertools.product(range(shape.packs), _pieces(shape, CHANGED_ROWS)):
            where, section = (pack, piece.rows, piece.lanes), piece.section
            x, own = qkv[where], piece.take(shape, tables)
            grads, of_parameters = change.transpose(x, grad_qkv[where], section, shape.head_dim, own)
            grad_qkv[where] = grads.astype(grad_qkv.dtype)
            sums[0, :, piece.lanes] += grads.reshape(-1, ROW_TILE, grads.shape[1]).sum(0)
            for ref in of_norms:
                ref[0, 2 * section : 2 * section + 2, : x.shape[1]] += of_parameters


def _in_step(shape: AttentionShape, step: int) -> Callable[[Callable[[], None]], Any]:
    """Returns a decorator that calls a function in one step of the grid over the queries."""
    return pl.when(pl.program_id(1) == step) if shape.query_steps > 1 else lambda function: function()


def _apply(shape: AttentionShape, piece: _Piece, x: Array, tables: tuple[Any, ...]) -> Array:
    assert shape.change is not None
    return shape.change.apply(x, piece.section, shape.head_dim, piece.take(shape, tables))
