"""How the attention kernels divide their work: steps of the grid, windows of channels, blocks of queries, tiles."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

Value = TypeVar("Value")

LANES, ROW_TILE = 128, 8
# Tiles whose scores are computed before the softmax of the first: the matrix unit then does not wait for a softmax.
LOOKAHEAD = 7
# Vector registers of scores in one step of the grid: what the compiler unrolls and schedules together.
STEP_REGISTERS, MAX_STEP_REGISTERS = 1300, 2048


class Shape(NamedTuple):
    """The sizes of a call, and how the grid divides it."""

    heads: int
    head_dim: int
    tokens: int
    rows: int  # of which the first `tokens` are tokens
    images: int  # in one step of the grid
    query_steps: int  # over the queries of an image, each of 128 queries; 1: all queries in one step

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def blocks(self) -> int:
        """Blocks of 128 queries; the last may be partial."""
        return -(-self.rows // LANES)

    @property
    def blocks_per_step(self) -> int:
        """Blocks in one step of the grid."""
        return self.blocks // self.query_steps


def make_shape(qkv_shape: tuple[int, ...], tokens: int, heads: int) -> Shape:
    """Returns the sizes of a call, with steps of the grid long enough to schedule and short enough to compile.

    Args:
        qkv_shape: (batch, rows, 3 x heads x head_dim).
        tokens: the number of rows that are tokens.
        heads: the number of heads.
    """
    batch, rows, qkv_width = qkv_shape
    head_dim, blocks = qkv_width // (3 * heads), -(-rows // LANES)
    registers = heads * blocks * rows // ROW_TILE
    if registers > MAX_STEP_REGISTERS:
        return Shape(heads, head_dim, tokens, rows, 1, blocks)
    images = max(count for count in range(1, 1 + max(1, STEP_REGISTERS // registers)) if batch % count == 0)
    return Shape(heads, head_dim, tokens, rows, images, 1)


@dataclass(frozen=True)
class Group:
    """Consecutive heads of an image whose channels fill lanes: they are loaded, transposed and stored together."""

    shape: Shape
    image: int
    heads: range

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
    """One head's scores of a block of 128 queries.

    Where the grid has steps over the queries, the last block starts early enough to end with the array: it sees some
    queries again.
    """

    group: Group
    head: int
    block: int  # in this step of the grid

    @property
    def shape(self) -> Shape:
        """The sizes of the call."""
        return self.group.shape

    @property
    def image(self) -> int:
        """The image in this step of the grid."""
        return self.group.image

    @property
    def channels(self) -> slice:
        """The head's channels among those of the group."""
        return self.group.channels(self.head)

    @property
    def last_of_head(self) -> bool:
        """Whether it is the last tile of its head."""
        return self.block == self.shape.blocks_per_step - 1

    @property
    def last_of_group(self) -> bool:
        """Whether it is the last tile of its group."""
        return self.last_of_head and self.head == self.group.heads[-1]

    def only_tokens(self, x: Array, otherwise: float) -> Array:
        """Returns [rows, 128] with the values of keys that are no tokens replaced."""
        if self.shape.tokens == self.shape.rows:
            return x
        row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return jnp.where(row < self.shape.tokens, x, otherwise)


def tiles(shape: Shape) -> Iterator[Tile]:
    """Yields the tiles of a step of the grid, group after group and head after head."""
    size = math.lcm(shape.head_dim, LANES) // shape.head_dim
    for image in range(shape.images):
        for start in range(0, shape.heads, size):
            group = Group(shape, image, range(start, min(start + size, shape.heads)))
            for head in group.heads:
                for block in range(shape.blocks_per_step):
                    yield Tile(group, head, block)


def pipelined(tiles: Iterable[Tile], first: Callable[[Tile], Value], then: Callable[[Tile, Value], None]) -> None:
    """Calls `first` on every tile, and `then` on it and what `first` returned, `LOOKAHEAD` tiles later.

    The compiler keeps to the order of a program more than it should: this order lets products of some tiles run beside
    the softmax of others.
    """
    waiting: list[tuple[Tile, Value]] = []
    for tile in tiles:
        waiting.append((tile, first(tile)))
        if len(waiting) > LOOKAHEAD:
            then(*waiting.pop(0))
    for tile, value in waiting:
        then(tile, value)
