"""Runs libtpu in a process of its own, where it compiles a program for chips that are not here and writes schedules."""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from docs.pages import print_sections
from vit_jax.planning import records, targets
from vit_jax.planning.client import show_progress
from vit_jax.planning.schedules import dump_environment

ROOT = Path(__file__).resolve().parents[1]

Report = dict[str, Any]

LIMIT = 3600.0  # seconds after which a compilation is given up


def compile_in_process(name: str, target: str, module: str, *words: str, schedules: bool = True) -> Report:
    """Runs a module in a new process, and returns the report that it prints.

    It returns {"error": ...} if the module fails, if a signal ends it, or if it takes longer than `LIMIT`.

    Args:
        name: the name of the program in the line of progress.
        target: the slice to compile for.
        module: the module, whose command calls `answer`.
        *words: the arguments of the command.
        schedules: whether libtpu writes schedules.
    """
    request = records.PlanRequest((), target)
    with tempfile.TemporaryDirectory(prefix="vit_jax_schedules_") as folder, show_progress(f"compiling {name}"):
        environment = targets.compiler_environment(request) | (dump_environment(folder) if schedules else {})
        command = [sys.executable, "-m", module, *words]
        try:
            found = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return {"error": f"not compiled within {LIMIT / 60:.0f} minutes"}
    if found.returncode == 0:
        return json.loads(found.stdout)
    if found.returncode < 0:
        return {"error": f"the compiler ended by signal {-found.returncode}"}
    lines = [line for line in found.stderr.splitlines() if line.strip()]
    return {"error": f"exit code {found.returncode}: {lines[-1][:200] if lines else 'nothing was printed'}"}


def answer(compile_program: Callable[[], Report]) -> None:
    """Compiles a program and prints its report as JSON; for the process that `compile_in_process` starts."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries goes to stderr, as it is not part of the answer
    jax.config.update("jax_platforms", "cpu")
    json.dump(compile_program(), answers)
    answers.close()


def write_cases(
    argv: list[str],
    description: str,
    cases: Mapping[str, str],
    module: str,
    compile_case: Callable[[str], Report],
    make_sections: Callable[[dict[str, Report]], Iterable[tuple[str, Iterable[str]]]],
) -> None:
    """Runs a command line that compiles cases, each in a process of its own, and writes sections of a page about them.

    Args:
        argv: the command line. If its only argument is the name of a case, the command prints the compiler's report on
            that case as JSON.
        description: the description of the command in its help.
        cases: name of a case -> slice to compile for.
        module: the module of the command.
        compile_case: name of a case -> the compiler's report.
        make_sections: {name of a case: report} -> (name, lines) of each section.
    """
    if len(argv) == 2 and argv[1] in cases:
        answer(lambda: compile_case(argv[1]))
        return
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    example = next(iter(cases)).rpartition(" ")[0]
    parser.add_argument("--only", default="*", help=f"cases to compile, as in '{example} *'; none: no case [all]")
    parser.add_argument("--write", type=Path, help="Markdown file whose tables to replace")
    args = parser.parse_args(argv[1:])
    chosen = fnmatch.filter(cases, args.only)
    found = {name: compile_in_process(name, cases[name], module, name) for name in chosen}
    if failed := [f"{name}: {report['error']}" for name, report in found.items() if "error" in report]:
        sys.exit("\n".join(failed))
    print_sections(make_sections(found), args.write)
