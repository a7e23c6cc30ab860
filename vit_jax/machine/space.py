"""The memory of this machine and the free space on its disks."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vit_jax import UserError
from vit_jax.machine.finding import Finding
from vit_jax.machine.memory import host_memory
from vit_jax.storage import cache

# What is checked -> its folder, the least GB that should be free, and the remedy.
FOLDERS: dict[str, tuple[Callable[[], Path], float, str]] = {
    "this folder": (Path.cwd, 1.0, "run elsewhere, or give --workdir a folder with more space"),
    "cache": (cache.root, 5.0, "export VIT_JAX_CACHE=FOLDER, with a folder that has more space"),
}


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
