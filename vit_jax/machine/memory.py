"""How much memory this machine has."""

import os


def host_memory() -> int:
    """Returns the bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_host_memory() -> int:
    """Returns the bytes of this machine's memory that nothing uses now, not even as a cache of files."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
