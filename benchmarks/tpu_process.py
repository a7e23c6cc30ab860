"""A process of its own in which libtpu compiles a program for chips that are not here and writes its schedules."""

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
from vit_jax.planning import plan_types, targets
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
    request = plan_types.Request((), target)
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
        argv: of the command; with a case alone, the command prints in JSON what the compiler reports of it.
        description: of the command.
        cases: name -> slice.
        module: whose command it is.
        compile_case: returns what the compiler reports of a case.
        make_sections: returns the sections, of the reports by name.
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
