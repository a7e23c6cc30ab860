"""The terms of the scores of a tile that come from relative positions, and the gradients of these terms.

The score of a query i and a key j gets the product of the query with the table's row of the offset i - j. In a tile,
keys lie along sublanes and 128 consecutive queries along lanes. One product of the table with the queries has all that
a tile needs, but each query's column begins one row higher than that of the query before it. The columns are moved up
by 64, 32, ... rows, in each step those that need it: from 8 rows on, this moves whole vector registers. The last steps
are saved where a head has at most half of the 128 channels that the matrix unit contracts at a time. The table then
holds the next rows beside each row. A query's channels stand in the lanes of the row that it needs; the number of that
row among its neighbours is the query's phase.
"""

import collections
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from vit_jax.kernels.attention_shape import AttentionShape
from vit_jax.kernels.matrix_products import dot, dot_transposed
from vit_jax.kernels.packing import ROW_TILE, round_up
from vit_jax.kernels.relative_table import count_phases, count_rows
from vit_jax.kernels.tiles import Tile
from vit_jax.kernels.tpu_kinds import LANES


class RelativeScores:
    """The terms of relative positions in the tiles of one step of the grid.

    Args:
        shape: the sizes of the call.
        table: the table, see `relative_table.spread_table`.
        grad: where the gradient of the table is summed, in the backward pass.
    """

    def __init__(self, shape: AttentionShape, table: Any, grad: Any = None):
        assert shape.relative is not None
        self.kind, self.shape, self.table, self.grad = shape.relative, shape, table, grad
        self.phases = count_phases(shape.head_dim)
        # (block, first lane) -> for each head of a group, a window of the table, its gradients, and the queries.
        self.factors: dict[tuple[int, int], list[tuple[Any, Array, Array]]] = collections.defaultdict(list)
        if grad is not None:
            before = jnp.where(pl.program_id(1) == 0, 0.0, grad[...]) if shape.query_steps > 1 else 0.0
            grad[...] = jnp.broadcast_to(before, grad.shape)

    def add(self, scores: Array, tile: Tile, queries: Array) -> Array:
        """Returns the scores of a tile, [rows of keys, 128], with what the relative positions add to them.

        Args:
            scores: the products of queries and keys.
            tile: the tile.
            queries: the queries of the tile's block and group, [channels, 128].
        """
        x = dot(self.table[self._window(tile)], self._by_phase(queries[tile.channels]))
        for step, rows in reversed(self._steps(tile)):
            x = jnp.where(_is_moved(step, rows), _move_up(x, step)[:rows], x[:rows])
        return scores + self._only_placed(tile, x)

    def differentiate(self, tile: Tile, grad: Array, queries: Array, scale: float) -> Array:
        """Returns the gradient of a head's queries, [head_dim, 128], and adds to that of the table.

        Args:
            tile: the tile.
            grad: the gradient of the scores, without their scale.
            queries: the head's queries, [head_dim, 128], with zeros for those that an earlier step of the grid had.
            scale: the scale of the scores.
        """
        x, window = self._only_placed(tile, grad), self._window(tile)
        sizes = [rows for _, rows in self._steps(tile)[1:]] + [self._rows(tile)]
        for (step, rows), size in zip(self._steps(tile), sizes, strict=True):
            x = jnp.concatenate([x, jnp.zeros((size - rows, LANES), x.dtype)]) if size > rows else x
            x = jnp.where(_is_moved(step, size), _move_down(x, step), x)
        x = x.astype(queries.dtype)
        self.factors[tile.block, window[1].start].append((window, x, self._by_phase(queries)))
        if tile.last_of_group:
            self._add_to_table(scale)
        by_phase = dot(self.table[window].T, x).reshape(self.phases, self.shape.head_dim, LANES)
        return sum(self._only_phase(phase, part) for phase, part in enumerate(by_phase))

    def _add_to_table(self, scale: float) -> None:
        """Adds the products of a group's heads to the gradient of the table, those of one window in one product."""
        for heads in self.factors.values():
            (window, *_), grads, queries = zip(*heads, strict=True)
            added = dot_transposed(jnp.concatenate(grads, 1), jnp.concatenate(queries, 1))
            self.grad[0, window[0], window[1]] += added * scale
        self.factors.clear()

    def _window(self, tile: Tile) -> tuple[Any, slice]:
        """Returns the rows and the lanes of the table that a tile needs."""
        size = self.phases * self.shape.head_dim
        first = (self.shape.blocks - 1) * LANES - tile.first_query
        rows = slice(first, first + self._rows(tile))
        if self.shape.query_steps > 1:
            rows = pl.ds(pl.multiple_of(first, ROW_TILE), self._rows(tile))
        return rows, slice(tile.head * size, (tile.head + 1) * size) if self.kind.per_head else slice(0, size)

    def _rows(self, tile: Tile) -> int:
        """Returns the number of rows of a tile's window of the table."""
        return count_rows(len(tile.group.window), self.shape.head_dim)

    def _steps(self, tile: Tile) -> list[tuple[int, int]]:
        """Returns the steps in which columns are moved up, the smallest first: (its rows, rows left after it)."""
        steps = itertools.takewhile(lambda step: step < LANES, (self.phases << bit for bit in range(LANES)))
        return [(step, round_up(len(tile.group.window) + step - self.phases, ROW_TILE)) for step in steps]

    def _by_phase(self, queries: Array) -> Array:
        """Returns a head's queries, [head_dim, 128], at the place of their phases, [lanes of the table, 128]."""
        return jnp.concatenate([self._only_phase(phase, queries) for phase in range(self.phases)])

    def _only_phase(self, phase: int, x: Array) -> Array:
        return jnp.where(_row_shifts(x.shape[0]) % self.phases == phase, x, jnp.zeros_like(x))

    def _only_placed(self, tile: Tile, x: Array) -> Array:
        """Returns `x`, [rows of keys, 128], with zeros for the pairs with a token that has no place."""
        if not self.kind.first:
            return x
        first = tile.group.first_token + self.kind.first
        key, query = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in range(2))
        return jnp.where((key >= first) & (query + tile.first_query >= first), x, 0.0)


def _row_shifts(rows: int) -> Array:
    """Returns by how many rows the column of each of 128 queries is moved up, the same in every row: [rows, 128]."""
    return LANES - 1 - jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)


def _is_moved(step: int, rows: int) -> Array:
    """Returns whether a step of `step` rows, a power of two, moves the column of each of 128 queries: [rows, 128]."""
    return (_row_shifts(rows) & step) != 0


def _move_up(x: Array, step: int) -> Array:
    """Returns `x` moved up by `step` rows, [rows, 128]; the last `step` rows are left out, or have arbitrary values."""
    return x[step:] if step % ROW_TILE == 0 else pltpu.roll(x, len(x) - step, 0)


def _move_down(x: Array, step: int) -> Array:
    """Returns `x` moved down by `step` rows, given zeros in its last `step` rows: [rows, 128]."""
    if step % ROW_TILE == 0:
        return jnp.concatenate([jnp.zeros((step, LANES), x.dtype), x[:-step]])
    return pltpu.roll(x, step, 0)
