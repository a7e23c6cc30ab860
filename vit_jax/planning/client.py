"""Asks a compiler, in a process of its own, what a program needs, and shows on stderr how long that takes."""

import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from vit_jax import UserError, printable
from vit_jax.planning import targets
from vit_jax.planning.chips import is_topology
from vit_jax.planning.records import Compilation, PlanRequest, compilation_from_json
from vit_jax.planning.schedules import dump_environment

QUIET_SECONDS = 3.0  # after which the first line is shown
LINE_SECONDS = 30.0  # between two lines where stderr is not a terminal


def compile_in_subprocess(request: PlanRequest) -> Compilation:
    """Returns what the compiler reports of a program, which another process compiles or finds in the cache.

    Raises:
        UserError: the flags are wrong, or the compiler does not answer.
    """
    if request.reads_schedules and not is_topology(request.target):
        raise UserError("only the compiler for TPUs writes schedules; omit --schedule with --cpu and --gpu.")
    command = [sys.executable, "-m", "vit_jax.planning.worker", json.dumps(dataclasses.asdict(request))]
    environment = targets.compiler_environment(request)
    answer: dict[str, Any] = {}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        tempfile.TemporaryDirectory(prefix="vit_jax_schedules_") as folder,
    ):
        environment |= dump_environment(folder) if request.reads_schedules else {}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            try:
                assert process.stdout
                line = process.stdout.readline()
                while line and "compiled" not in (answer := json.loads(line)):
                    with show_progress(f"compiling {answer['compiling']}"):
                        line = process.stdout.readline()
            except BaseException:
                process.kill()
                raise
        if process.returncode or "compiled" not in answer:
            raise UserError(_failure(errors, process.returncode))
    return compilation_from_json(answer["compiled"])


@contextmanager
def show_progress(text: str) -> Iterator[None]:
    """Shows a text and the elapsed seconds on stderr while the body of the `with` statement runs.

    Shows nothing if the body ends within `QUIET_SECONDS`.
    """
    done, began, terminal = threading.Event(), time.monotonic(), sys.stderr.isatty()

    def show() -> None:
        if done.wait(QUIET_SECONDS):
            return
        while True:
            line = f"{text}: {time.monotonic() - began:.0f} s"
            print(f"\r{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr)
            if done.wait(1.0 if terminal else LINE_SECONDS):
                if terminal:
                    print(f"\r{' ' * len(line)}\r", end="", file=sys.stderr)
                return

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _failure(errors: IO[str], code: int) -> str:
    """Returns why the compiler's process failed, by what it wrote to stderr and its exit code."""
    errors.seek(0)
    lines = [line for line in errors.read().splitlines() if line.strip()]
    sentences = [line.removeprefix("vit_jax: ") for line in lines if line.startswith("vit_jax: ")]
    if code == 2 and sentences:
        return sentences[-1]
    last = printable(lines[-1] if lines else "it printed nothing", 500)
    if code < 0:  # a fault of the compiler; another strategy or accum_steps makes another program
        return f"the compiler crashed on this program with signal {-code}: {last}"
    return f"the compiler's process ended with exit code {code}: {last}"
