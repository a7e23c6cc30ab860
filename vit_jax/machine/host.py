"""What this machine gives to a process: memory, cores, open files, and free space on its disks."""

import contextlib
import ctypes
import math
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vit_jax import UserError
from vit_jax.machine.finding import Finding
from vit_jax.storage import cache

MANY = 8192  # files; macOS allows 10,240 even where it states no limit
FEW = 512  # files, which Windows allows
# Parameters of glibc's `mallopt` (malloc.h) that keep freed memory in the process. There is only one arena, since the
# arenas of threads map big blocks anew each time. No block is mapped by itself. The top of the heap is never returned.
# A step of S/16 with 32 images on two cores takes 6.8 s, with the defaults 7.6 s.
MALLOPT_SETTINGS = {"M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1)}
# What is checked -> its folder, the least GB that should be free, and the remedy.
FOLDERS: dict[str, tuple[Callable[[], Path], float, str]] = {
    "this folder": (Path.cwd, 1.0, "run elsewhere, or give --workdir a folder with more space"),
    "cache": (cache.root, 5.0, "export VIT_JAX_CACHE=FOLDER, with a folder that has more space"),
}


def host_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Returns the bytes of this machine's memory, at most those of its container, which the file `limit` states."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return min(size, int(allowed)) if allowed.isdigit() else size


def count_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Returns the cores that this process may use; `quota` is the file with a container's share, in microseconds."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = re.match(r"(\d+) (\d+)", quota.read_text()) if quota.is_file() else None
    return min(cores, math.ceil(int(granted[1]) / int(granted[2]))) if granted else cores


def free_host_memory() -> int:
    """Returns the bytes of this machine's memory that programs can still take; all of it where Linux does not tell."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return min(host_memory(), int(fields["MemAvailable"].split()[0]) * 2**10)
    except (OSError, ValueError, KeyError):
        return host_memory()


def raise_open_files_limit() -> int:
    """Lets this process, and those that it starts, have as many files open as the system allows, up to `MANY`.

    The limit that a shell sets is often 1,024, on macOS 256, and may be raised. Returns the number of files that may be
    open now.
    """
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        return FEW
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY if hard == resource.RLIM_INFINITY else min(hard, MANY)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # another limit of the system is lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return MANY if soft == resource.RLIM_INFINITY else soft


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory for later, and returns whether it does.

    XLA allocates a program's temporary arrays, gigabytes of a training step, at each call, and frees them at its end.
    By default the kernel takes these pages back, and clears and maps each anew in the next step. Only threads that
    start afterwards use what is set here: call it before jax starts its CPU client. Nothing changes under another C
    library, or where the environment sets up the allocator by a MALLOC_ variable.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    accepted = [library.mallopt(*setting) for setting in MALLOPT_SETTINGS.values()]
    return all(accepted)


def check_space(disk_usage: Callable[[Path], Any] = shutil.disk_usage) -> Iterator[Finding]:
    """Yields the memory of this machine, and the free space on the disks of the current folder and of the cache."""
    yield Finding("ok", "memory", f"{host_memory() / 1e9:.0f} GB")
    for subject, (find_folder, least, remedy) in FOLDERS.items():
        try:
            folder = find_folder()
        except UserError as error:
            yield Finding("warning", subject, str(error), remedy)
            continue
        free = disk_usage(folder).free / 1e9
        message = f"{folder}, {free:.3g} GB free"
        yield Finding("warning", subject, message, remedy) if free < least else Finding("ok", subject, message)
