"""How the kernels divide their work on each kind of chip: queries of a tile, registers of a step, vector memory."""

from typing import NamedTuple

LANES = 128  # of a vector register


class Division(NamedTuple):
    """The limits by which the attention kernels divide their work on a kind of chip."""

    queries: int = LANES  # of a tile of scores, at most: the columns of the matrix unit
    registers: int = 1300  # vector registers of scores in a step of the grid, at most, if images share it
    memory: int = 16 * 2**20  # bytes of a core's vector memory


NARROW = Division()

# Beginning of the kind of device, as JAX names it (v5e: TPU v5 lite, v5p: TPU v5) -> the division; the first row that
# applies. The last row is of v4, whose cores have the least vector memory, and of devices that are not known. The
# matrix units of v6e have 256 columns, those of the others 128. More registers make longer steps of the grid, which
# need more vector memory.
#
# Millions of cycles of a layer, forward and backward, by the compiler's schedule (libtpu 0.0.42, no chip), with NARROW
# and with the division below:
#
#                          v5e             v5p             v6e
#     B/16, 128 images     0.940, 0.899    0.476, 0.461    0.769, 0.494
#     L/16, 64 images      0.648, 0.601    0.329, 0.313    0.540, 0.347
DIVISIONS: tuple[tuple[str, Division], ...] = (
    ("TPU v5 lite", Division(128, 5200, 128 * 2**20)),
    ("TPU v5e", Division(128, 5200, 128 * 2**20)),
    ("TPU v5", Division(128, 2600, 64 * 2**20)),
    ("TPU v6", Division(256, 5200, 128 * 2**20)),
    ("", NARROW),
)


def choose_division(device_kind: str) -> Division:
    """Returns how the TPU kernel divides its work on a kind of device, as JAX names it."""
    return next(division for kind, division in DIVISIONS if device_kind.startswith(kind))
