"""The sizes of a call of the attention kernels: how it is divided, what vector memory that needs, and the choice."""

import math
from typing import NamedTuple

from vit_jax.kernels.packing import ROW_TILE, Packing, round_up
from vit_jax.kernels.qk_change import CHANGED_ROWS, NORM_ROWS, QKChange, lanes_of_heads
from vit_jax.kernels.relative_table import RelativeKind, count_phases, count_rows, table_rows
from vit_jax.kernels.tpu_kinds import LANES, NARROW, Division

# A step of the grid is what the compiler unrolls and schedules together. Packs share a step up to so many heads,
# counted in each image and in whole groups. An image is divided into several steps above so many vector registers of
# scores. Images share a pack up to so many vector registers.
STEP_HEADS, MAX_STEP_REGISTERS, PACK_REGISTERS = 100, 2048, 2600
# By how much more queries may be computed, with the empty ones, in wide tiles than in tiles of 128.
WIDE_TILES = 1.25
IMAGES_OF_PACK = 1, 2, 4, 8

# Queries of a tile -> how many tiles' scores are computed before the softmax of the first: the matrix unit then does
# not wait for a softmax. On chips with little vector memory it is one tile, where so many heads share lanes: a layer of
# H/14 with 256 tokens takes 0.348 million cycles and 13.5 MiB on v4, with seven tiles 0.353 and 15.5.
LOOKAHEAD, MANY_HEADS = {128: 7, 256: 5}, 8

# Arrays of [rows, queries] in float32 that the compiler keeps in the backward pass for each block of queries of an
# image, where a step of the grid has all blocks. libtpu 0.0.42 reports for v4 11 to 17 for 196 tokens of 64 channels.
# With a lookahead of one tile it reports 12 for groups of 8 heads, and 20 for groups of 16. Several packs of long
# images keep more, up to 60 in three of 257 tokens in float32, on chips whose memory is no limit.
TILES_OF_IMAGE, FEW_TILES, TILES_OF_HEAD = 22, 6, 7 / 8
# Where a step has one block: 16 for 577 and 1,025 tokens of 16 x 64, and 26 for 1,370 of 16 x 80.
TILES_OF_BLOCK = 28
# Arrays of [rows, lanes of heads] in float32, for the rows of queries and keys that are normalised at once. From what
# libtpu reports: 17.6 MiB in all for two images of 196 tokens of 12 x 64 on v4.
CHANGED = 14
# Arrays of [rows of the table for a block of queries, 128] in float32 that relative positions add: 40 for a step of the
# grid, or 9 for each of its images if that is more. libtpu reports for v5e 23 for two images of 196 tokens of 12 x 64,
# 24 for 257 of 16 x 80, at most 36 for 577 and 1,370, and 57 and 72 for eight images of 49 of 12 x 64 and of 50 of
# 16 x 64.
RELATIVE, RELATIVE_OF_IMAGE = 40, 9
FLOAT32 = 4  # bytes


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


def choose_attention_shape(
    images: int,
    tokens: int,
    heads: int,
    head_dim: int,
    itemsize: int,
    change: QKChange | None = None,
    relative: RelativeKind | None = None,
    division: Division = NARROW,
) -> AttentionShape | None:
    """Returns the sizes of a call: the fewest empty rows that the vector memory allows; None if it allows none.

    Several images share a pack only where the kernels take it whole in one step.

    Args:
        images: the number of images on one device, in one of the `accum_steps` parts of a batch; the number of images
            in a pack divides it.
        tokens: the number of tokens of an image.
        heads: the number of heads on one device.
        head_dim: the channels of a head.
        itemsize: the bytes of a channel.
        change: the change of queries and keys; None: there is none.
        relative: the kind of the relative positions; None: there are none.
        division: how the kernels divide their work on these devices.
    """
    most = min(division.registers, PACK_REGISTERS)
    packings = (Packing(tokens, count, round_up(count * tokens, ROW_TILE), division) for count in IMAGES_OF_PACK)
    shapes = [
        make_shape((images // each.images, each.rows, 3 * heads * head_dim), each, heads, itemsize, change, relative)
        for each in packings
        if images % each.images == 0 and (each.images == 1 or count_registers(each, heads) <= most)
    ]
    fitting = [each for each in shapes if vmem_bytes(each, itemsize) <= division.memory]
    return min(fitting, key=lambda each: each.packing.rows / each.packing.images, default=None)


def choose_queries(packing: Packing) -> int:
    """Returns how many queries a tile has: as many as the division allows, unless too many of them would be empty."""
    narrow, wide = (round_up(packing.longest_window, each) for each in (LANES, packing.division.queries))
    return packing.division.queries if wide <= WIDE_TILES * narrow else LANES


def make_shape(
    qkv_shape: tuple[int, ...],
    packing: Packing,
    heads: int,
    itemsize: int,
    change: QKChange | None = None,
    relative: RelativeKind | None = None,
) -> AttentionShape:
    """Returns the sizes of a call, with steps of the grid long enough to schedule and short enough to compile.

    A step has as many packs as the vector memory allows, at least one.

    Args:
        qkv_shape: (packs, rows, 3 x heads x head_dim).
        packing: the packing of the rows.
        heads: the number of heads.
        itemsize: the bytes of a channel.
        change: the change of queries and keys; None: there is none.
        relative: the relative positions, which are computed for 128 queries at a time; None: there are none.
    """
    packs, _, qkv_width = qkv_shape
    queries = choose_queries(packing) if relative is None else LANES
    shape = AttentionShape(heads, qkv_width // (3 * heads), packing, 1, 1, queries, change, relative)
    registers = count_registers(packing, heads, queries)
    if registers > MAX_STEP_REGISTERS and packing.images == 1:
        divided = shape if shape.blocks > 1 else shape._replace(queries=LANES)
        return divided._replace(query_steps=divided.blocks)
    heads_of_pack = packing.images * round_up(heads, shape.group_size)
    most = min(packing.division.registers // registers, STEP_HEADS // heads_of_pack)
    shapes = (shape._replace(packs=count) for count in range(most, 1, -1) if packs % count == 0)
    return next((each for each in shapes if vmem_bytes(each, itemsize) <= packing.division.memory), shape)


def vmem_bytes(shape: AttentionShape, itemsize: int) -> int:
    """Returns an estimate of the bytes that the backward pass needs, which needs more than the forward pass.

    Args:
        shape: the sizes of the call.
        itemsize: the bytes of a channel.
    """
    rows, heads, head_dim = shape.packing.rows, shape.heads, shape.head_dim
    change, relative = shape.change, shape.relative
    pack = 8 * rows * shape.width * itemsize  # projections, result, and their gradients
    lse = shape.lse_rows * heads * shape.queries * FLOAT32
    bias = 3 * shape.width * ROW_TILE * FLOAT32
    sums = 2 * rows * shape.width * FLOAT32 if shape.query_steps > 1 else 0
    tiles = _count_tiles(shape) * len(shape.packing.window(0)) * shape.queries * FLOAT32
    changed = tables = 0
    if change is not None:
        window = lanes_of_heads(head_dim, shape.width)
        changed = shape.packs * rows * 2 * shape.width * itemsize
        changed += CHANGED * change.norm_tables * min(rows, CHANGED_ROWS) * window * FLOAT32
        tables = (NORM_ROWS * change.norm_tables + 2 * rows * change.rotates) * window * FLOAT32
    if relative is not None:
        lanes = count_phases(head_dim) * head_dim * (heads if relative.per_head else 1)
        tables += table_rows(shape.packing, head_dim) * lanes * (itemsize + FLOAT32)
    tiles += relative_bytes(shape)
    return round(2 * (shape.packs * (pack + lse) + bias + tables) + changed + sums + tiles)


def _count_tiles(shape: AttentionShape) -> float:
    """Returns how many arrays of [rows, queries] the compiler keeps."""
    if shape.query_steps > 1:
        return TILES_OF_BLOCK
    if shape.lookahead == 1:
        return (FEW_TILES + TILES_OF_HEAD * shape.group_size) * shape.blocks
    return TILES_OF_IMAGE * shape.blocks


def relative_bytes(shape: AttentionShape) -> int:
    """Returns an estimate of the bytes that relative positions add, besides their table; 0 without them."""
    if shape.relative is None:
        return 0
    window = count_rows(shape.packing.longest_window, shape.head_dim) * LANES * FLOAT32
    return max(RELATIVE, RELATIVE_OF_IMAGE * shape.packing.images * shape.packs) * window
