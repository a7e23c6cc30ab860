"""Asks a process in which libtpu writes schedules for the cycles of kernels, and keeps them in the cache."""

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from vit_jax.planning import hlo
from vit_jax.planning.schedules import dumps, pallas_kernels
from vit_jax.storage import atomic_write, cache, versions


def sum_kernel_cycles(text: str, target: str) -> int | None:
    """Returns the cycles of all Pallas kernels of a program.

    The cycles of a kernel are those of its schedule when it is compiled alone.

    Args:
        text: the text of the compiled program.
        target: the TPU slice for which the program was compiled.

    Returns:
        The sum over all executions, or None if there are no kernels or the cycles of one are unknown.
    """
    times: dict[pallas_kernels.Kernel, int] = {}
    for each in hlo.read_instructions(text):
        if each.is_kernel and not each.fused:
            kernel = pallas_kernels.parse_kernel(each)
            times[kernel] = times.get(kernel, 0) + each.times
    paths = {kernel: _cache_path(kernel, target) for kernel in times}
    cycles_by_kernel: dict[pallas_kernels.Kernel, int | None] = {}
    for kernel, path in paths.items():
        with contextlib.suppress(OSError, ValueError):  # it was never compiled, or the file is damaged
            cycles_by_kernel[kernel] = int(json.loads(path.read_text()))
    unknown = [kernel for kernel in times if kernel not in cycles_by_kernel]
    for kernel, cycles in zip(unknown, _compile(unknown, target), strict=True):
        cycles_by_kernel[kernel] = cycles
        if cycles is None:
            continue
        with contextlib.suppress(OSError):  # on a full disk it is not remembered
            paths[kernel].parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(paths[kernel]) as temporary:
                temporary.write_text(json.dumps(cycles))
    known = [cycles * times[kernel] for kernel, cycles in cycles_by_kernel.items() if cycles is not None]
    return sum(known) if times and len(known) == len(times) else None


def _compile(unknown: list[pallas_kernels.Kernel], target: str) -> list[int | None]:
    """Returns the cycles of kernels; None for one that cannot be compiled alone, or for all if the process fails."""
    if not unknown:
        return []
    with tempfile.TemporaryDirectory(prefix="vit_jax_schedules_") as folder:
        answer = subprocess.run(
            [sys.executable, "-m", "vit_jax.planning.schedules.pallas_kernels", target],
            input=json.dumps([dataclasses.asdict(kernel) for kernel in unknown]),
            env=os.environ | dumps.dump_environment(folder),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    return json.loads(answer.stdout) if answer.returncode == 0 else [None] * len(unknown)


def _cache_path(kernel: pallas_kernels.Kernel, target: str) -> Path:
    code = versions.library_versions(versions.COMPILERS), versions.source_digest(Path(__file__).parents[1])
    key = json.dumps([dataclasses.asdict(kernel), target.partition(":")[0], code, dumps.other_flags()])
    return cache.root() / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
