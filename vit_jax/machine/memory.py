"""How much memory there is for programs."""

import os
from collections.abc import Sequence

import jax


def host_memory() -> int:
    """Returns the bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_memory(devices: Sequence[jax.Device]) -> int | None:
    """Returns the bytes that each of some devices of one host has for a program; None: jax does not know."""
    if devices[0].platform == "cpu":
        return host_memory() // len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit")
