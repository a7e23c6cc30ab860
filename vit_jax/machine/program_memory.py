"""How much memory devices have for programs.

This is apart from `memory.py`, since it imports jax, which `doctor --help` does without.
"""

from collections.abc import Sequence

import jax

from vit_jax.machine.memory import host_memory


def device_memory(devices: Sequence[jax.Device]) -> int | None:
    """Returns the bytes that each of the devices of one host has for a program; None: jax does not know.

    The devices of a CPU share the memory of the host equally.
    """
    if devices[0].platform == "cpu":
        return host_memory() // len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit")
