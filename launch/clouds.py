"""What Google's clouds call TPUs, and how many of their chips one machine holds.

As documented for Cloud TPU (cloud.google.com/tpu/docs, one page per chip) and GKE (its page on planning TPUs).
"""

import dataclasses

from vit_jax import UserError
from vit_jax.planning.chips import Slice

FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL = 8  # chips of a flat slice, at most, that one machine holds alone


@dataclasses.dataclass(frozen=True)
class Cloud:
    """The names of a chip.

    Attributes:
        name: Cloud TPU's, of the chip, or how its accelerator types begin.
        runtime: version of the software of a TPU VM.
        label: GKE's, of the nodes.
    """

    name: str
    runtime: str
    label: str


CLOUDS = {
    "v4": Cloud("v4", "tpu-ubuntu2204-base", "tpu-v4-podslice"),
    "v5e": Cloud("v5litepod", "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
    "v5p": Cloud("v5p", "v2-alpha-tpuv5", "tpu-v5p-slice"),
    "v6e": Cloud("v6e", "v2-alpha-tpuv6e", "tpu-v6e-slice"),
}


def check(tpu: Slice) -> None:
    """Sees to it that a cloud has such a slice.

    Raises:
        UserError: it has none.
    """
    shape = str(tpu).partition(":")[2]
    if tpu.chip.dimensions == 2 and shape not in FLAT:
        raise UserError(f"no cloud has a {tpu.kind} of {shape}; choose from {', '.join(FLAT)}.")
    if tpu.chip.dimensions == 3 and tpu.chips % tpu.chip.chips_per_host:
        raise UserError(f"no cloud has a {tpu.kind} of {shape}: the smallest is 2x2x1, one machine.")


def accelerator(tpu: Slice) -> list[str]:
    """Returns the flags by which gcloud knows a slice: of flat ones the number of chips tells the shape."""
    name = CLOUDS[tpu.kind].name
    if tpu.chip.dimensions == 2:
        return [f"--accelerator-type={name}-{tpu.chips}"]
    return [f"--type={name}", f"--topology={str(tpu).partition(':')[2]}"]


def hosts(tpu: Slice) -> int:
    """Returns how many machines hold a slice."""
    alone = tpu.chip.dimensions == 2 and tpu.chips <= SMALL
    return 1 if alone else tpu.chips // tpu.chip.chips_per_host


def chips_per_host(tpu: Slice) -> int:
    """Returns how many chips of a slice each of its machines holds."""
    return tpu.chips // hosts(tpu)
