"""Asks a compiler, in a process of its own, what a program needs, and shows on stderr how long that takes.

How long is known from the last time that such a function was compiled here: of the same model, for the same kind of
device.
"""

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
from vit_jax.storage import memo

QUIET_SECONDS = 3.0  # after which the first line is shown
LINE_SECONDS = 30.0  # between two lines where stderr is not a terminal
MEMO = "compile_seconds"  # the kind of what is remembered
FIRST_TIME = "no such function was compiled here before; all of ViT-B/16 takes 11 minutes of a CPU core"


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
    took: list[tuple[str, float]] = []  # kind of function, and the seconds that it took
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
                    kind, began = kind_of_function(answer["compiling"], request), time.monotonic()
                    with show_progress(f"compiling {answer['compiling']}", memo.recall(MEMO, kind, float)):
                        line = process.stdout.readline()
                    took.append((kind, time.monotonic() - began))
            except BaseException:
                process.kill()
                raise
        if process.returncode or "compiled" not in answer:
            raise UserError(_failure(errors, process.returncode))
    compilation = compilation_from_json(answer["compiled"])
    remembered = [compilation.step.remembered]
    remembered += [compilation.evaluation.remembered] if compilation.evaluation else []
    for (kind, seconds), known in zip(took, remembered, strict=True):
        if not known:
            memo.remember(MEMO, kind, f"{seconds:.1f}")
    return compilation


def kind_of_function(text: str, request: PlanRequest) -> str:
    """Returns what functions have in common that take about as long to compile.

    Args:
        text: the function in words, which begin with what it is and its model, up to a comma.
        request: the request that it is compiled for.
    """
    schedules = ", with schedules" if request.reads_schedules else ""
    return f"{text.partition(',')[0]} for {request.target.partition(':')[0]}{schedules}"


@contextmanager
def show_progress(text: str, last: float | None = None) -> Iterator[None]:
    """Shows a text and the elapsed seconds on stderr while the body of the `with` statement runs.

    Shows nothing if the body ends within `QUIET_SECONDS`.

    Args:
        text: what the body does.
        last: the seconds that the like took the last time, which are shown first, and then the share done.
    """
    done, began, terminal = threading.Event(), time.monotonic(), sys.stderr.isatty()

    def show() -> None:
        if done.wait(QUIET_SECONDS):
            return
        print(f"{text}; {f'the last time, such a function took {last:.0f} s' if last else FIRST_TIME}", file=sys.stderr)
        while True:
            elapsed = time.monotonic() - began
            share = f", {min(elapsed / last, 0.99):.0%}" if last else ""
            line = f"{elapsed:.0f} s{share}"
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
