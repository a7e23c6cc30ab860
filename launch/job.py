"""The common part of all launchers: a run, the flags that describe it, and the exit codes that have it restarted."""

import argparse
import dataclasses
import re
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

from vit_jax import Preempted, UserError, exit_code

PREEMPTED = exit_code(Preempted())
INFRASTRUCTURE = 128  # exit codes from this one on are faults of the machines, not of the run
PROGRAM = re.compile(r"(.*/)?(python[\d.]*|bash|sh|env|timeout)")  # words with which a command usually begins
SLICE_FLAG = "--config.mesh.slice="


@dataclasses.dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        name: the name of the run and of everything that a cloud creates for it.
        command: the words of the command, the same on every host.
        slices: the number of TPU slices, or of groups of nodes, between which only gradients pass.
        restarts: how often the run may be restarted after a fault. Restarts after preemptions are not limited.
    """

    name: str
    command: tuple[str, ...]
    slices: int
    restarts: int


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns the parser of the launcher `launch.<name>`, with `doc` as the text of its help."""
    return argparse.ArgumentParser(
        prog=f"python -m launch.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `make_job` reads."""
    parser.add_argument("name", help="of the run, also in the cloud")
    parser.add_argument("--slices", type=int, default=1, help="TPU slices, or groups of nodes: sets mesh.slice [1]")
    parser.add_argument("--restarts", type=int, default=10, help="after faults, at most; preemptions do not count [10]")
    parser.add_argument(
        "--allow-local-output",
        action="store_true",
        help="the command writes nothing worth keeping, or copies it from the disks of its machines itself",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    parser.usage = parser.format_usage().removeprefix("usage: ").rstrip() + " -- COMMAND ..."


def split_command_line(argv: list[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into the options before `--` and the words of the command after it.

    Args:
        argv: the program's name, then its arguments.

    Raises:
        UserError: there seems to be a command, but no `--` before it.
    """
    words = argv[1:]
    if "--" not in words and (start := next((i for i, word in enumerate(words) if PROGRAM.fullmatch(word)), None)):
        raise UserError(
            f"put -- before the command: {shell_line([*words[:start], '--', *words[start : start + 3]])} ..."
        )
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def make_job(args: argparse.Namespace, command: Sequence[str]) -> Job:
    """Returns the run that a command line asks for.

    With several slices, --config.mesh.slice is added to the command.

    Args:
        args: the arguments of `add_job_arguments`.
        command: the words of the command.

    Raises:
        UserError: clouds do not accept the name, there is no command, a number is out of range, or the command sets
            --config.mesh.slice to another number of slices.
    """
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", args.name):
        rule = "use at most 40 of a-z, 0-9 and -, starting with a letter and not ending with -"
        raise UserError(f"clouds do not accept the name {args.name!r}; {rule}.")
    if not command:
        raise UserError(
            "put the command to run after --, for example -- python -m vit_jax.main --config=configs/digits.py."
        )
    if args.slices < 1 or args.restarts < 0:
        raise UserError("--slices must be at least 1, and --restarts at least 0.")
    return Job(args.name, _with_slices(tuple(command), args.slices), args.slices, args.restarts)


def _with_slices(command: tuple[str, ...], slices: int) -> tuple[str, ...]:
    """Returns the command with --config.mesh.slice set to the number of slices; unchanged for one slice."""
    if slices == 1:  # the command may itself divide the slice into several
        return command
    given = {word for word in command if word.startswith(SLICE_FLAG)}
    if given - {f"{SLICE_FLAG}{slices}"}:
        fields = " ".join(sorted(given))
        raise UserError(f"--slices={slices} contradicts {fields}; omit {fields}.")
    return command if given else (*command, f"{SLICE_FLAG}{slices}")


def should_restart(code: int) -> bool:
    """Returns whether a run is restarted after this exit code, which means a preemption or a fault of the machines."""
    return code == PREEMPTED or code >= INFRASTRUCTURE


def combined_exit_code(codes: Sequence[int]) -> int:
    """Returns the exit code of a run from the exit codes of its hosts.

    It is the first code that is neither 0 nor one after which runs are restarted. If there is none, it is the largest.
    """
    return next((code for code in codes if code and not should_restart(code)), max(codes))


def shell_line(argv: Sequence[str]) -> str:
    """Returns a command as one line for a shell."""
    return shlex.join(argv)


def run_command(argv: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs a command and returns its result, with output as text; a failing exit code raises nothing.

    Raises:
        UserError: the program is not installed.
    """
    try:
        return subprocess.run(argv, text=True, check=False, **options)
    except FileNotFoundError:
        raise UserError(
            f"{argv[0]} is not installed; install it, or use --dry-run to see what would be done."
        ) from None
