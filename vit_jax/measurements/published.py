"""The speeds and sizes that the makers of accelerators state."""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from vit_jax.kernels import find_row, find_tpu_kind
from vit_jax.planning import CHIPS, Slice


class ChipSpec(NamedTuple):
    """Speeds of one device.

    Attributes:
        flops: operations per second in bfloat16, without sparsity.
        hbm_bandwidth: bytes per second of its memory.
    """

    flops: float
    hbm_bandwidth: float


# Beginning of the kind of device, as JAX names it, in NVIDIA's data sheets of A100, H100 and H200.
GPUS = {
    "NVIDIA A100-SXM4-40GB": ChipSpec(312e12, 1555e9),
    "NVIDIA A100-SXM4-80GB": ChipSpec(312e12, 2039e9),
    "NVIDIA H100 80GB HBM3": ChipSpec(989.4e12, 3350e9),
    "NVIDIA H200": ChipSpec(989.4e12, 4800e9),
}


def find_tpu(device_kind: str) -> str | None:
    """Returns the key of `planning.CHIPS` for a kind of device; None: it is no TPU that is known."""
    tpu = find_tpu_kind(device_kind)
    return tpu.name if tpu else None


def find_published(device_kind: str) -> ChipSpec | None:
    """Returns what is published of a kind of device; None: nothing is known here."""
    if chip := find_tpu(device_kind):
        return ChipSpec(CHIPS[chip].device_flops, CHIPS[chip].device_hbm_bandwidth)
    return find_row(GPUS, device_kind)


def find_slice(devices: Sequence[jax.Device]) -> Slice | None:
    """Returns the slice that the devices form; where they form several, each of them. None: they are no known TPUs."""
    chip = find_tpu(devices[0].device_kind)
    if chip is None:
        return None
    places = [device.coords for device in devices]  # type: ignore[attr-defined]
    return Slice(chip, tuple(max(along) + 1 for along in zip(*places, strict=True))[: CHIPS[chip].dimensions])
