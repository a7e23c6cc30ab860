"""The kinds of TPU: how the kernels divide their work on each, and what its compiler needs to be told.

A chip is one row of `TPU_KINDS`. Its published speeds are in `planning/chips.py`, under the same name.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias, TypeVar

Row = TypeVar("Row")
Options: TypeAlias = dict[str, str | bool]  # name of an option, as the compiler spells it -> value

LANES = 128  # of a vector register


class Division(NamedTuple):
    """The limits by which the attention kernels divide their work on a kind of chip."""

    queries: int = LANES  # of a tile of scores, at most: the columns of the matrix unit
    registers: int = 1300  # vector registers of scores in a step of the grid, at most, if images share it
    memory: int = 16 * 2**20  # bytes of a core's vector memory


NARROW = Division()  # of the cores with the least vector memory, and of devices that are not known


class TpuKind(NamedTuple):
    """A kind of TPU. The attention kernel is used on all of them, if it fits the vector memory.

    Attributes:
        name: of the chip, as in the name of a slice: a key of `planning.CHIPS`.
        device_kinds: how the kinds of device begin, as JAX names them.
        division: how the kernels divide their work.
        options: options of the compiler. None may let it assume that there is no NaN or infinity: the step tests for
            them.
        fused_mlp: whether the MLP's kernel is faster than the compiler.
        compiler_crashes: whether the compiler ends by a stack overflow where it fuses a norm's gradient with that of a
            strided convolution after it.
    """

    name: str
    device_kinds: tuple[str, ...]
    division: Division
    options: Options
    fused_mlp: bool = False
    compiler_crashes: bool = False


# Figures of the options are millions of cycles of a training step: the schedule of the compiler, then its own estimate,
# from libtpu 0.0.42 without a chip.

# The MiB from which the compiler cuts a product with weights that are split over chips into a loop over the chips, to
# hide the gathers. Whole products are faster, and other products hide their gathers. B/16 with 128 images a chip and
# weights over v5e:2x4, before there was an attention kernel: 256.6, 484 -> 176.8, 337, and 13.9 -> 9.9 GB.
WHOLE_PRODUCTS: Options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}

# The memory on the chip that one operation may use, twice the default: products then work on larger tiles. S/16 with
# 256 images 73.7, 128.5 -> 70.4, 121.2; with 24 MiB 71.1, 123.2, with 48 MiB 71.6, 120.0.
LARGER_TILES: Options = {"xla_tpu_scoped_vmem_limit_kib": "32768"}

# The matrix units of v6e have 256 columns, those of the others 128. More registers make longer steps of the grid, which
# need more vector memory. Millions of cycles of a layer, forward and backward, by the compiler's schedule (libtpu
# 0.0.42, no chip), with NARROW and with the division below:
#
#                          v5e             v5p             v6e
#     B/16, 128 images     0.940, 0.899    0.476, 0.461    0.769, 0.494
#     L/16, 64 images      0.648, 0.601    0.329, 0.313    0.540, 0.347
#
# The MLP's kernel: cycles of a layer of B/16 with 128 images, forward and backward, with LayerNorm and residual: v6e
# 2.26 million by the compiler, 1.55 by the kernel. On v5e the products take as long as the chip can do them either way.
# On v4 and v5p the kernel would use one of the two cores of a chip.
TPU_KINDS = (
    TpuKind("v4", ("TPU v4",), NARROW, {}),
    TpuKind("v5e", ("TPU v5 lite", "TPU v5e"), Division(128, 5200, 128 * 2**20), WHOLE_PRODUCTS | LARGER_TILES),
    TpuKind("v5p", ("TPU v5",), Division(128, 2600, 64 * 2**20), {}),
    TpuKind("v6e", ("TPU v6",), Division(256, 5200, 128 * 2**20), {}, fused_mlp=True, compiler_crashes=True),
    TpuKind("tpu7x", ("TPU7x",), Division(256, 2600, 64 * 2**20), {}),
)


def find_row(rows: Mapping[str, Row], device_kind: str) -> Row | None:
    """Returns the row of a kind of device, as JAX names it; None: there is none.

    Args:
        rows: beginning of the kind of device -> row. The longest that applies counts: v5e is "TPU v5 lite", v5p
            "TPU v5".
        device_kind: the kind of device.
    """
    return rows.get(max(filter(device_kind.startswith, rows), key=len, default=""))


def find_tpu_kind(device_kind: str) -> TpuKind | None:
    """Returns what is known of a kind of device, as JAX names it; None: it is no TPU that is known."""
    return find_row({beginning: tpu for tpu in TPU_KINDS for beginning in tpu.device_kinds}, device_kind)


def choose_division(device_kind: str) -> Division:
    """Returns how the TPU kernels divide their work on a kind of device, as JAX names it."""
    tpu = find_tpu_kind(device_kind)
    return tpu.division if tpu else NARROW
