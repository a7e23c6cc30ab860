"""A process of its own in which libtpu compiles a program for chips that are not here and writes its schedules."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from vit_jax.planning import records, targets
from vit_jax.planning.client import show_progress
from vit_jax.planning.schedules import dump_environment

ROOT = Path(__file__).resolve().parents[1]

Report = dict[str, Any]


def compile_in_process(name: str, target: str, module: str, *words: str) -> Report:
    """Returns what a module reports of a program, or why it does not compile.

    Args:
        name: of the program, for the line of progress.
        target: a slice.
        module: that calls `answer`.
        words: its arguments.
    """
    request = records.Request((), target)
    with tempfile.TemporaryDirectory(prefix="vit_jax_schedules_") as folder, show_progress(f"compiling {name}"):
        environment = targets.compiler_environment(request) | dump_environment(folder)
        command = [sys.executable, "-m", module, *words]
        found = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode == 0:
        return json.loads(found.stdout)
    lines = [line for line in found.stderr.splitlines() if line.strip()]
    return {"error": f"exit code {found.returncode}: {lines[-1][:200] if lines else 'nothing was printed'}"}


def answer(compile_program: Callable[[], Report]) -> None:
    """Prints a report in JSON, in the process that was started."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not part of the answer
    jax.config.update("jax_platforms", "cpu")
    json.dump(compile_program(), answers)
    answers.close()
