"""Chooses how the attention kernels divide a call: which images share rows, and which packs a step of the grid."""

from vit_jax.kernels.packing import LANES, NARROW, ROW_TILE, Division, Packing, round_up
from vit_jax.kernels.qk_change import QKChange
from vit_jax.kernels.relative_table import RelativeKind
from vit_jax.kernels.tiles import AttentionShape, count_registers
from vit_jax.kernels.vmem import vmem_bytes

# A step of the grid is what the compiler unrolls and schedules together. Packs share a step up to so many heads,
# counted in each image and in whole groups. An image is divided into several steps above so many vector registers of
# scores. Images share a pack up to so many vector registers.
STEP_HEADS, MAX_STEP_REGISTERS, PACK_REGISTERS = 100, 2048, 2600
# By how much more queries may be computed, with the empty ones, in wide tiles than in tiles of 128.
WIDE_TILES = 1.25
IMAGES_OF_PACK = 1, 2, 4, 8


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
