"""What Google's clouds call TPUs, and how many of their chips one machine holds.

As documented for Cloud TPU (cloud.google.com/tpu/docs, one page per chip) and GKE (its page on planning TPUs).
"""

import dataclasses

from vit_jax.planning import Slice


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


def accelerator(tpu: Slice) -> list[str]:
    """Returns the flags by which gcloud knows a slice: of flat ones the number of chips tells the shape."""
    name = CLOUDS[tpu.kind].name
    if tpu.chip.dimensions == 2:
        return [f"--accelerator-type={name}-{tpu.chips}"]
    return [f"--type={name}", f"--topology={str(tpu).partition(':')[2]}"]


def hosts(tpu: Slice) -> int:
    """Returns how many machines hold a slice."""
    return tpu.hosts


def chips_per_host(tpu: Slice) -> int:
    """Returns how many chips of a slice each of its machines holds."""
    return tpu.chips // hosts(tpu)
