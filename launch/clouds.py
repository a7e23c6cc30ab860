"""The names of TPUs in Cloud TPU, Compute Engine and GKE.

They are as documented: Cloud TPU (docs.cloud.google.com/tpu/docs, one page per chip), Compute Engine
(docs.cloud.google.com/compute/docs/tpus/tpu-machines) and GKE (its page on planning TPUs).
"""

import dataclasses
import re

from vit_jax import UserError
from vit_jax.planning.chips import Slice


@dataclasses.dataclass(frozen=True)
class ChipNames:
    """The names of a kind of chip.

    Attributes:
        label: the value of GKE's label of nodes with this chip.
        machine: the series of its machine types, to which the number of chips is added, as in ct6e-standard-4t.
        accelerator: the name of the chip in Cloud TPU, with which the accelerator types begin; empty: Cloud TPU does
            not have it.
        runtime: the usual version of the software of a TPU VM.
        image: the family of images that Compute Engine has for it; empty: it is no Compute Engine instance.
        numa_nodes: the number of NUMA nodes of a machine with this chip that GKE can bind containers to.
    """

    label: str
    machine: str
    accelerator: str = ""
    runtime: str = ""
    image: str = ""
    numa_nodes: int = 1


CHIP_NAMES = {
    "v4": ChipNames("tpu-v4-podslice", "ct4p-hightpu", "v4", "tpu-ubuntu2204-base"),
    "v5e": ChipNames("tpu-v5-lite-podslice", "ct5lp-hightpu", "v5litepod", "v2-alpha-tpuv5-lite"),
    "v5p": ChipNames(
        "tpu-v5p-slice", "ct5p-hightpu", "v5p", "v2-alpha-tpuv5", "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
    ),
    "v6e": ChipNames(
        "tpu-v6e-slice", "ct6e-standard", "v6e", "v2-alpha-tpuv6e", "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
    ),
    # docs.cloud.google.com/kubernetes-engine/docs/concepts/tpu-ironwood: four chips and two NUMA nodes a machine
    "tpu7x": ChipNames("tpu7x", "tpu7x-standard", image="ubuntu-accel-2404-amd64-tpu-tpu7x", numa_nodes=2),
}


def shape_text(tpu: Slice) -> str:
    """Returns the shape of a slice as clouds write it, such as 4x4x8."""
    return str(tpu).partition(":")[2]


def machine_type(tpu: Slice) -> str:
    """Returns the machine type of the machines of a slice in Compute Engine and GKE, such as ct6e-standard-4t."""
    return f"{CHIP_NAMES[tpu.kind].machine}-{tpu.chips_per_host}t"


def region_of(zone: str) -> str:
    """Returns the region of a zone: us-west4 of us-west4-a."""
    return zone.rpartition("-")[0]


def check_cloud_tpu(tpu: Slice) -> None:
    """Raises UserError if Cloud TPU does not have the chips of a slice."""
    if not CHIP_NAMES[tpu.kind].accelerator:
        raise UserError(f"Cloud TPU does not have {tpu.kind}; use launch.compute_engine, with the same words.")


def check_compute_engine(tpu: Slice) -> None:
    """Raises UserError if Compute Engine has no machines with the chips of a slice."""
    if not CHIP_NAMES[tpu.kind].image:
        raise UserError(f"Compute Engine has no machines with {tpu.kind}; use launch.tpu_vm, with the same words.")


def accelerator_flags(tpu: Slice) -> list[str]:
    """Returns gcloud's flags for a slice.

    For chips with a two-dimensional network only the number of chips is given, from which the cloud derives the shape.
    """
    name = CHIP_NAMES[tpu.kind].accelerator
    if tpu.chip.dimensions == 2:
        return [f"--accelerator-type={name}-{tpu.chips}"]
    return [f"--type={name}", f"--topology={shape_text(tpu)}"]


def check_zone(zone: str) -> None:
    """Raises UserError if a text does not have the form of a zone's name, such as us-west4-a."""
    if not re.fullmatch(r"[a-z]+(-[a-z]+)+\d+-(ai\d+)?[a-z]", zone):  # us-central1-ai1a is a zone for accelerators
        parts = re.fullmatch(r"([a-z]+(?:-[a-z]+)*?)[-_]?(\d+)[-_]?([a-z])", zone.strip().lower())
        near = "{}{}-{}".format(*parts.groups()) if parts and "-" in parts[1] else None
        hint = f"did you mean {near}?" if near else "zones are named like us-west4-a."
        raise UserError(f"--zone={zone} is not the name of a zone; {hint}")
