"""Compares the kernels that this machine's accelerator would run with their plain forms."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from vit_jax.machine.accelerators import has_gpu, has_tpu
from vit_jax.machine.finding import Finding

SECONDS = 300.0  # that the comparison may take, compilation included

# Run in another process, as the query of the devices is, so that this process does not hold them.
COMPARISON = """
import json
from vit_jax.kernel_trials.correctness import check_example
print(json.dumps(check_example()))
"""


def check_kernel(
    seconds: float = SECONDS,
    comparison: str = COMPARISON,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Finding]:
    """Yields whether each kernel equals its plain form on the accelerator here; nothing without one.

    Args:
        seconds: the most seconds that the comparison may take.
        comparison: the program that prints each kernel, the form chosen, and its fault.
        root: the root of the file system.
        environment: the environment variables of this process.
    """
    if not (has_tpu(root, environment) or has_gpu(root, environment)):
        return
    try:
        asked = subprocess.run([sys.executable, "-c", comparison], capture_output=True, text=True, timeout=seconds)
        found = json.loads(asked.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        yield Finding("warning", "kernels", f"were not compared within {seconds:g} s")
        return
    except (IndexError, ValueError):  # the finding about the devices says why
        yield Finding("warning", "kernels", f"were not compared: exit code {asked.returncode}")
        return
    for kernel, kind, fault in found:
        if fault:
            remedy = "nothing: training uses the plain form, which is slower; please report this line"
            yield Finding("warning", kernel, f"{kind} {fault}", remedy)
        else:
            yield Finding("ok", kernel, kind)
