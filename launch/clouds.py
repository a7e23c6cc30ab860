"""The names of TPUs in Cloud TPU and GKE.

They are as documented for Cloud TPU (cloud.google.com/tpu/docs, one page per chip) and GKE (its page on planning TPUs).
"""

import dataclasses
import re

from vit_jax import UserError
from vit_jax.planning.chips import Slice


@dataclasses.dataclass(frozen=True)
class ChipNames:
    """The names of a kind of chip.

    Attributes:
        accelerator: the name of the chip in Cloud TPU, with which the accelerator types begin.
        runtime: the usual version of the software of a TPU VM.
        label: the value of GKE's label of nodes with this chip.
    """

    accelerator: str
    runtime: str
    label: str


CHIP_NAMES = {
    "v4": ChipNames("v4", "tpu-ubuntu2204-base", "tpu-v4-podslice"),
    "v5e": ChipNames("v5litepod", "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
    "v5p": ChipNames("v5p", "v2-alpha-tpuv5", "tpu-v5p-slice"),
    "v6e": ChipNames("v6e", "v2-alpha-tpuv6e", "tpu-v6e-slice"),
}


def accelerator_flags(tpu: Slice) -> list[str]:
    """Returns gcloud's flags for a slice.

    For chips with a two-dimensional network only the number of chips is given, from which the cloud derives the shape.
    """
    name = CHIP_NAMES[tpu.kind].accelerator
    if tpu.chip.dimensions == 2:
        return [f"--accelerator-type={name}-{tpu.chips}"]
    return [f"--type={name}", f"--topology={str(tpu).partition(':')[2]}"]


def check_zone(zone: str) -> None:
    """Raises UserError if a text does not have the form of a zone's name, such as us-west4-a."""
    if not re.fullmatch(r"[a-z]+(-[a-z]+)+\d+-[a-z]", zone):
        parts = re.fullmatch(r"([a-z]+(?:-[a-z]+)*?)[-_]?(\d+)[-_]?([a-z])", zone.strip().lower())
        near = "{}{}-{}".format(*parts.groups()) if parts and "-" in parts[1] else None
        hint = f"did you mean {near}?" if near else "zones are named like us-west4-a."
        raise UserError(f"--zone={zone} is not the name of a zone; {hint}")
