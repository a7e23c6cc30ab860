"""Asks a process in which libtpu writes schedules for the cycles of kernels, and keeps them in the cache."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from vit_jax.planning import hlo
from vit_jax.planning.schedules import dumps, pallas_kernels
from vit_jax.storage import memo, versions


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
    keys = {kernel: _memo_key(kernel, target) for kernel in times}
    cycles_by_kernel = {kernel: memo.recall("kernels", key, int) for kernel, key in keys.items()}
    unknown = [kernel for kernel, cycles in cycles_by_kernel.items() if cycles is None]
    for kernel, cycles in zip(unknown, _compile(unknown, target), strict=True):
        cycles_by_kernel[kernel] = cycles
        if cycles is not None:
            memo.remember("kernels", keys[kernel], str(cycles))
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


def _memo_key(kernel: pallas_kernels.Kernel, target: str) -> str:
    code = versions.library_versions(versions.COMPILERS), versions.source_digest(Path(__file__).parents[1])
    return json.dumps([dataclasses.asdict(kernel), target.partition(":")[0], code, dumps.other_flags()])
