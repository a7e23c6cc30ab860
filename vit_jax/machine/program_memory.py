"""How much memory devices have for programs; apart from the rest, as `doctor --help` needs no jax."""

from collections.abc import Sequence

import jax

from vit_jax.machine.memory import host_memory


def device_memory(devices: Sequence[jax.Device]) -> int | None:
    """Returns the bytes that each of some devices of one host has for a program; None: jax does not know."""
    if devices[0].platform == "cpu":
        return host_memory() // len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit")
