"""How the attention kernels divide their work: steps of the grid, windows of channels, blocks of queries, tiles."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from vit_jax.kernels.packing import LANES, NARROW, ROW_TILE, Packing
from vit_jax.kernels.qk_change import QKChange
from vit_jax.kernels.relative_table import RelativeKind

Value = TypeVar("Value")

# Queries of a tile -> how many tiles' scores are computed before the softmax of the first: the matrix unit then does
# not wait for a softmax. On chips with little vector memory it is one tile, where so many heads share lanes: a layer of
# H/14 with 256 tokens takes 0.348 million cycles and 13.5 MiB on v4, with seven tiles 0.353 and 15.5.
LOOKAHEAD, MANY_HEADS = {128: 7, 256: 5}, 8


class AttentionShape(NamedTuple):
    """The sizes of a call of the attention kernels, and how their grid divides it."""

    heads: int
    head_dim: int
    packing: Packing
    packs: int  # in one step of the grid
    query_steps: int  # over the queries of an image, each of one block; 1: all queries in one step
    queries: int  # of a block, which is what a tile has
    change: QKChange | None = None  # of queries and keys, before they are compared
    relative: RelativeKind | None = None  # the relative positions

    @property
    def change_tables(self) -> int:
        """The number of tables that the change of queries and keys needs; 0 without a change."""
        return self.change.num_tables if self.change is not None else 0

    @property
    def num_tables(self) -> int:
        """The number of all tables: those of the change, then that of the relative positions, if there are any."""
        return self.change_tables + (self.relative is not None)

    @property
    def norm_tables(self) -> int:
        """The number of tables, the first ones, that hold the trained parameters of the norms of queries and keys."""
        return self.change.norm_tables if self.change is not None else 0

    @property
    def trained_tables(self) -> list[int]:
        """The indices of the tables that are trained: that of the norms, then that of the relative positions."""
        return [*range(self.norm_tables), *([self.num_tables - 1] if self.relative is not None else [])]

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def group_size(self) -> int:
        """The number of heads whose channels fill lanes, see `Group`."""
        return math.lcm(self.head_dim, LANES) // self.head_dim

    @property
    def lookahead(self) -> int:
        """How many tiles' scores are computed before the softmax of the first."""
        little_memory = self.packing.division == NARROW
        return 1 if little_memory and self.group_size >= MANY_HEADS else LOOKAHEAD[self.queries]

    @property
    def blocks(self) -> int:
        """The number of blocks of queries of the image that has most of them."""
        return self.packing.count_blocks(self.queries)

    @property
    def lse_rows(self) -> int:
        """The number of blocks of the log-sum-exp that a pack has in one step of the grid."""
        return self.packing.images * self.blocks // self.query_steps


def count_blocks(packing: Packing, image: int, queries: int) -> int:
    """Returns how many blocks of queries hold an image of a pack."""
    return math.ceil(len(packing.window(image)) / queries)


def count_registers(packing: Packing, heads: int, queries: int = LANES) -> int:
    """Returns how many vector registers hold the scores of a pack."""
    windows = ((count_blocks(packing, image, queries), packing.window(image)) for image in range(packing.images))
    return heads * queries // LANES * sum(blocks * len(window) // ROW_TILE for blocks, window in windows)


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
