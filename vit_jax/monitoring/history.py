"""Which processes trained a run: on what hardware, with which code, and for how long; history.json in its folder."""

import contextlib
import functools
import json
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from vit_jax import UserError, __version__
from vit_jax.json_text import to_json
from vit_jax.machine import describe_hardware
from vit_jax.storage import atomic_write

HISTORY = "history.json"
EVERY = {"first", "last", "seconds", "hardware"}  # the keys that every process has
PACKAGE = Path(__file__).parents[1]


@functools.cache
def package_commit() -> str | None:
    """Returns the commit of the package, with -dirty if files differ from it; None: it is not a checkout of git."""
    if not (PACKAGE.parent / ".git").exists():
        return None  # a folder above may be under git for another reason
    command = [
        "git",
        "--no-optional-locks",
        "-C",
        str(PACKAGE),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None


def read_history(text: bytes, path: str) -> list[dict[str, Any]]:
    """Returns the processes of a run, in order, from the text of its file.

    Each is a dict. `first` and `last` are the numbers of steps done before and after the process. `seconds` is its
    duration up to its last save. `hardware` describes the devices in words. `vit_jax`, `commit`, `jax` and `python` are
    versions. `peak_bytes` is the most memory in use on a device of the first host, where devices tell. `teacher_macs`
    are the multiply-accumulates of the forward pass of a teacher on an image, where there is one.

    Raises:
        UserError: the text is not that of such a file.
    """
    try:
        processes = json.loads(text)
        valid = isinstance(processes, list) and all(process.keys() >= EVERY for process in processes)
    except (ValueError, AttributeError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise UserError(f"cannot read {path}: it is not the history of a run; move the file away.")
    return processes


def peak_bytes(devices: Sequence[jax.Device]) -> int:
    """Returns the most bytes that one of the devices has had in use; 0: the devices do not tell, as CPUs never do."""
    told = list[dict[str, int]]()
    for device in devices:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            told.append(device.memory_stats() or {})
    return max((stats.get("peak_bytes_in_use", 0) for stats in told), default=0)


class History:
    """Writes how far this process has come, after what earlier processes of the run have written."""

    def __init__(self, workdir: Path, start: int, devices: Sequence[jax.Device], teacher_macs: int = 0):
        """Starts the clock. A damaged file is begun anew: it is no reason not to train.

        Args:
            workdir: the folder of the run, or the local side of it.
            start: steps done before this process. If it is 0, a file there is of another run and is replaced.
            devices: the devices of the mesh.
            teacher_macs: the multiply-accumulates of the forward pass of a teacher on an image; 0: there is none.
        """
        self._path, self._began = workdir / HISTORY, time.monotonic()
        self._devices = [device for device in devices if device.process_index == jax.process_index()]
        self._before: list[dict[str, Any]] = []
        if start and self._path.exists():
            with contextlib.suppress(UserError):
                self._before = read_history(self._path.read_bytes(), str(self._path))
        self._process = {
            "first": start,
            "last": start,
            "seconds": 0.0,
            "hardware": describe_hardware(devices),
            "vit_jax": __version__,
            "commit": package_commit(),
            "jax": jax.__version__,
            "python": platform.python_version(),
        } | ({"teacher_macs": teacher_macs} if teacher_macs else {})

    def write(self, step: int) -> None:
        """Writes that `step` steps are done.

        A disk that refuses is ignored here, since writing the next checkpoint reports it. Nothing is written if this
        process has resumed a run and made no step.
        """
        if step == self._process["first"] > 0:
            return  # a complete run that is looked at again
        self._process |= {"last": step, "seconds": round(time.monotonic() - self._began, 1)}
        if peak := peak_bytes(self._devices):
            self._process["peak_bytes"] = peak
        with contextlib.suppress(OSError), atomic_write(self._path) as temporary:
            temporary.write_text(to_json([*self._before, self._process], indent=2) + "\n")
