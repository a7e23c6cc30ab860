"""The parts of a step of the attention kernels: groups of heads, and tiles, a block of queries of one head each."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from vit_jax.kernels.attention_shape import AttentionShape, count_blocks
from vit_jax.kernels.packing import ROW_TILE

Value = TypeVar("Value")


@dataclass(frozen=True)
class Group:
    """Consecutive heads of an image whose channels fill lanes: they are loaded, transposed and stored together."""

    shape: AttentionShape
    pack: int  # its number in this step of the grid
    image: int  # its number in the pack
    heads: range

    @property
    def window(self) -> range:
        """The rows of the pack in which the image lies; it shares the first and the last few with its neighbours."""
        return self.shape.packing.window(self.image)

    @property
    def rows(self) -> slice:
        """The window as a slice."""
        return slice(self.window.start, self.window.stop)

    @property
    def shared_rows(self) -> int:
        """How many of the first of these rows also belong to the image before."""
        return max(0, self.shape.packing.window(self.image - 1).stop - self.rows.start) if self.image else 0

    @property
    def blocks(self) -> int:
        """Blocks of queries in this step of the grid."""
        return count_blocks(self.shape.packing, self.image, self.shape.queries) // self.shape.query_steps

    @property
    def first_token(self) -> int:
        """The row, counted from the first of `rows`, of the image's first token."""
        return self.image * self.shape.packing.tokens - self.rows.start

    def is_token(self, row: Array) -> Array:
        """Returns whether rows, counted from the first of `rows`, are the image's tokens."""
        first = self.first_token
        below = row < first + self.shape.packing.tokens
        return below & (row >= first) if first else below

    def only_own(self, x: Array) -> Array:
        """Returns `x`, [rows, channels], with zeros in rows that are not this image's; unchanged if it is alone."""
        if self.shape.packing.images == 1:
            return x
        return jnp.where(self.is_token(jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)), x, jnp.zeros_like(x))

    def lanes(self, section: int) -> slice:
        """Returns where the queries (section 0), keys (1) or values (2) of the heads are in the fused layout."""
        start, size = section * self.shape.width, self.shape.head_dim
        return slice(start + self.heads.start * size, start + self.heads.stop * size)

    def channels(self, head: int) -> slice:
        """Returns where a head's channels are among those of the group."""
        size = self.shape.head_dim
        return slice((head - self.heads.start) * size, (head - self.heads.start + 1) * size)


@dataclass(frozen=True)
class Tile:
    """One head's scores of a block of queries.

    Where the grid has steps over the queries, the last block starts early enough to end with the array. So it has some
    queries of the block before.
    """

    group: Group
    head: int
    block: int  # in this step of the grid

    @property
    def shape(self) -> AttentionShape:
        """The sizes of the call."""
        return self.group.shape

    @property
    def first_query(self) -> Any:
        """The row of the first query, counted from the first of the group's rows."""
        return first_query(self.shape, self.block)

    @property
    def lse(self) -> tuple[int, int, slice]:
        """The index of the tile's log-sum-exp in the array of all: (pack, block, head)."""
        return self.group.pack, self.group.image * self.shape.blocks + self.block, slice(self.head, self.head + 1)

    @property
    def channels(self) -> slice:
        """The head's channels among those of the group."""
        return self.group.channels(self.head)

    @property
    def last_of_head(self) -> bool:
        """Whether it is the last tile of its head."""
        return self.block == self.group.blocks - 1

    @property
    def last_of_group(self) -> bool:
        """Whether it is the last tile of its group."""
        return self.last_of_head and self.head == self.group.heads[-1]

    def only_tokens(self, x: Array, otherwise: float) -> Array:
        """Returns `x`, [rows, queries], with `otherwise` in the rows of keys that are not the image's tokens."""
        if len(x) == self.shape.packing.tokens:
            return x
        return jnp.where(self.group.is_token(jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)), x, otherwise)

    def only_queries(self, x: Array, otherwise: float) -> Array:
        """Returns `x`, [any, queries], with `otherwise` in the columns of queries that are not the image's tokens.

        If the image is alone in its pack, `x` is returned as it is: nothing depends on empty rows, so that their
        gradient is zero.
        """
        if self.shape.packing.images == 1:
            return x
        row = self.block * self.shape.queries + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jnp.where(self.group.is_token(row), x, otherwise)


def first_query(shape: AttentionShape, block: int) -> Any:
    """Returns the row at which a block of queries of this step of the grid begins, counted from the image's first."""
    if shape.query_steps == 1:
        return block * shape.queries
    last = shape.packing.rows - shape.queries
    return pl.multiple_of(jnp.minimum(pl.program_id(1) * shape.queries, last), ROW_TILE)


def tiles(shape: AttentionShape) -> Iterator[Tile]:
    """Yields the tiles of a step of the grid, group after group and head after head."""
    for pack, image in itertools.product(range(shape.packs), range(shape.packing.images)):
        for start in range(0, shape.heads, shape.group_size):
            group = Group(shape, pack, image, range(start, min(start + shape.group_size, shape.heads)))
            for head in group.heads:
                for block in range(group.blocks):
                    yield Tile(group, head, block)


def pipelined(tiles: Iterable[Tile], first: Callable[[Tile], Value], then: Callable[[Tile, Value], None]) -> None:
    """Calls `first` on every tile, and some tiles later `then` on the tile and on what `first` returned.

    The compiler keeps to the order of a program more than it should. This order lets the products of some tiles run
    beside the softmax of others.
    """
    waiting: list[tuple[Tile, Value]] = []
    for tile in tiles:
        waiting.append((tile, first(tile)))
        if len(waiting) > tile.shape.lookahead:
            then(*waiting.pop(0))
    for tile, value in waiting:
        then(tile, value)
