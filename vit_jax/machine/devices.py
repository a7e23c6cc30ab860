"""The devices of a run: what they are, in words, and how much memory they have for programs.

This is apart from `host.py`, since it imports jax, which `doctor --help` does without.
"""

import platform
import re
from collections.abc import Sequence
from pathlib import Path

import jax

from vit_jax.machine.host import count_cores, host_memory


def describe_hardware(devices: Sequence[jax.Device], cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns what some devices of one kind are, such as `8 x TPU v5 lite, 2 hosts` or `2 cores of AMD EPYC 7B13`.

    Args:
        devices: the devices of a mesh. Several devices of a CPU are emulated.
        cpuinfo: the file in which Linux names the CPU.
    """
    hosts = len({device.process_index for device in devices})
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}, {hosts} {'host' if hosts == 1 else 'hosts'}"
    named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M) if cpuinfo.is_file() else None
    cores = count_cores()
    words = [f"{cores} {'core' if cores == 1 else 'cores'} of {named[1].strip() if named else platform.machine()}"]
    words += [f"{len(devices)} emulated devices"] if len(devices) > 1 else []
    words += [f"{hosts} hosts"] if hosts > 1 else []
    return ", ".join(words)


def count_chips(devices: Sequence[jax.Device]) -> int:
    """Returns the number of chips that some devices form: of TPUs, several devices may lie at one place of a slice."""
    if devices[0].platform != "tpu":
        return len(devices)
    return len({(getattr(device, "slice_index", 0), *device.coords) for device in devices})  # type: ignore[attr-defined]


def device_memory(devices: Sequence[jax.Device]) -> int | None:
    """Returns the bytes that each of the devices of one host has for a program; None: jax does not know.

    The devices of a CPU share the memory of the host equally.
    """
    if devices[0].platform == "cpu":
        return host_memory() // len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit")
