"""The hardware of a run in words."""

import math
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import jax


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


def count_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Returns the cores that this process may use; `quota` is the file with a container's share, in microseconds."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = re.match(r"(\d+) (\d+)", quota.read_text()) if quota.is_file() else None
    return min(cores, math.ceil(int(granted[1]) / int(granted[2]))) if granted else cores
