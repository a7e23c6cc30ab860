"""How much of a core's vector memory the attention kernels need."""

from vit_jax.kernels.changes import LANES, NORM_ROWS, window
from vit_jax.kernels.packing import ROW_TILE
from vit_jax.kernels.tiles import choose_packing, make_shape

# Arrays of [rows, 128] in float32 that the compiler keeps in the backward pass for each block of queries, at most. From
# what libtpu 0.0.42 reports for v4 and v5p: 16 for 577 and 1,025 tokens of 16 x 64, 26 for 1,370 of 16 x 80, 20 for 257
# of 16 x 80.
TILES = 28
FLOAT32 = 4  # bytes


def vmem_bytes(images: int, tokens: int, heads: int, head_dim: int, itemsize: int, changes: bool = False) -> int:
    """Returns about how many bytes the backward pass needs, which is the larger one.

    Args:
        images: on one device, in one part of the batch.
        tokens: of an image.
        heads: on one device.
        head_dim: channels of a head.
        itemsize: bytes of a channel.
        changes: queries and keys are normalised or rotated.
    """
    packing = choose_packing(tokens, heads, images)
    rows = packing.rows
    shape = make_shape((images // packing.images, rows, 3 * heads * head_dim), packing, heads)
    pack = 8 * rows * shape.width * itemsize  # projections, result, and their gradients
    lse = shape.lse_rows * heads * LANES * FLOAT32
    bias = 3 * shape.width * ROW_TILE * FLOAT32
    sums = 2 * rows * shape.width * FLOAT32 if shape.query_steps > 1 else 0
    tiles = TILES * (shape.blocks // shape.query_steps) * len(packing.window(0)) * LANES * FLOAT32
    changed = shape.packs * rows * 2 * shape.width * itemsize if changes else 0
    tables = (NORM_ROWS + 2 * rows) * window(head_dim, shape.width) * FLOAT32 if changes else 0
    return 2 * (shape.packs * (pack + lse) + bias + tables) + changed + sums + tiles
