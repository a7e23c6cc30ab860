"""How much memory this machine has."""

import os
from pathlib import Path


def host_memory() -> int:
    """Returns the bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_host_memory() -> int:
    """Returns the bytes of this machine's memory that programs can still take; all of it where Linux does not tell."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 2**10
    except (OSError, ValueError, KeyError):
        return host_memory()
