"""The table of relative positions in the form that the attention kernels take."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.kernels.packing import BFLOAT16_TILE, Packing, round_up
from vit_jax.kernels.tpu_kinds import LANES


class RelativeKind(NamedTuple):
    """Which pairs of tokens have a relative position, and which heads share a table.

    Attributes:
        first: the number of tokens at the beginning of an image that have no place; all after them have one.
        per_head: whether each head has a table of its own.
    """

    first: int = 0
    per_head: bool = False

    def rows_of_pairs(
        self, table: Float[Array, "rows lanes"], packing: Packing, head_dim: int
    ) -> Float[Array, "queries keys heads head_dim"]:
        """Returns the row for each pair of tokens, given `spread_table`'s result; zeros if one has no place.

        There is one head if all heads share the table.
        """
        token = np.arange(packing.tokens)
        number = packing.count_blocks(LANES) * LANES - 1 + token - token[:, None]
        row = np.minimum(number, len(table) - 1)  # the rows after the last lie beside it
        placed = np.minimum.outer(token, token) >= self.first
        rows = table.reshape(len(table), -1, count_phases(head_dim), head_dim)[row, :, number - row]
        return rows * placed[..., None, None].astype(table.dtype)


def count_phases(head_dim: int) -> int:
    """Returns how many rows of the table lie beside one another in the 128 lanes of a row: a power of two."""
    return 1 << max(0, (LANES // head_dim).bit_length() - 1)


def count_rows(keys: int, head_dim: int) -> int:
    """Returns how many rows of the table one block of 128 queries needs.

    Args:
        keys: the number of rows that hold the keys.
        head_dim: the channels of a head.
    """
    return round_up(keys + LANES - count_phases(head_dim), BFLOAT16_TILE)


def table_rows(packing: Packing, head_dim: int) -> int:
    """Returns how many rows of the table all blocks of queries need together."""
    return (packing.count_blocks(LANES) - 1) * LANES + count_rows(packing.longest_window, head_dim)


def spread_table(table: Float[Array, "*heads offsets head_dim"], packing: Packing) -> Float[Array, "rows lanes"]:
    """Returns the table of relative positions as the attention kernels read it, with a row for every offset they meet.

    Row r belongs to the offset 128 x blocks - 1 - r, where `blocks` is the number of blocks of 128 queries. So offsets
    fall from row to row. Besides its own channels, row r holds those of the following rows, `count_phases` rows in
    all; then come the same of the other heads, if each head has a table.

    Args:
        table: a row for each offset (place of the query - place of the key), the lowest first. The first and the last
            row also stand for all offsets beyond.
        packing: the packing of the rows of queries and keys.
    """
    *heads, offsets, head_dim = table.shape
    phases, rows = count_phases(head_dim), table_rows(packing, head_dim)
    before = packing.count_blocks(LANES) * LANES - 1 - offsets // 2
    after = rows + phases - 1 - before - offsets
    added = (*((0, 0),) * len(heads), (max(before, 0), max(after, 0)), (0, 0))
    extended = jnp.pad(jnp.flip(table, -2), added, mode="edge")[..., max(-before, 0) :, :]
    beside = jnp.concatenate([extended[..., phase : phase + rows, :] for phase in range(phases)], axis=-1)
    return jnp.moveaxis(beside, -2, 0).reshape(rows, -1)
