"""How much of a core's vector memory the attention kernels need."""

from vit_jax.kernels.packing import LANES, ROW_TILE
from vit_jax.kernels.qk_change import CHANGED_ROWS, NORM_ROWS, lanes_of_heads
from vit_jax.kernels.relative_table import count_phases, count_rows, table_rows
from vit_jax.kernels.tiles import AttentionShape

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
