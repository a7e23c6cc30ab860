"""How much memory this machine has."""

import os
from pathlib import Path


def host_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Returns the bytes of this machine's memory, at most those of its container, which the file `limit` states."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return min(size, int(allowed)) if allowed.isdigit() else size


def free_host_memory() -> int:
    """Returns the bytes of this machine's memory that programs can still take; all of it where Linux does not tell."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return min(host_memory(), int(fields["MemAvailable"].split()[0]) * 2**10)
    except (OSError, ValueError, KeyError):
        return host_memory()
