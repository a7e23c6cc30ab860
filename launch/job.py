"""What every launcher knows of a run, and after which exit codes it is started again."""

import argparse
import dataclasses
import re
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

from vit_jax import Preempted, UserError, exit_code

PREEMPTED = exit_code(Preempted())
INFRASTRUCTURE = 128  # the least of the exit codes for which the machines, and not the run, are to blame
PROGRAM = re.compile(r"(.*/)?(python[\d.]*|bash|sh|env|timeout)")  # with which a command begins
SLICE_FLAG = "--config.mesh.slice="


@dataclasses.dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        name: of the run, and of everything that a cloud creates for it.
        command: its words, the same on every host.
        slices: TPU slices, or groups of nodes, between which only gradients pass.
        restarts: how often it may be started again after a fault; after a preemption it always is.
    """

    name: str
    command: tuple[str, ...]
    slices: int
    restarts: int


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a launcher."""
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
    """Splits a command line, which begins with the program's name, into the options and the words after `--`.

    Raises:
        UserError: there is a command, but no `--` before it.
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

    Raises:
        UserError: clouds do not accept the name, there is no command, a number is out of range, or the command has a
            mesh of another number of slices.
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
    """Returns a command whose mesh has the slices."""
    if slices == 1:  # the command may divide one slice further
        return command
    given = {word for word in command if word.startswith(SLICE_FLAG)}
    if given - {f"{SLICE_FLAG}{slices}"}:
        raise UserError(f"--slices={slices} contradicts {' '.join(sorted(given))}; omit the latter.")
    return command if given else (*command, f"{SLICE_FLAG}{slices}")


def should_restart(code: int) -> bool:
    """Returns whether a run that ended with this exit code is started again: preempted, or lost by its machines."""
    return code == PREEMPTED or code >= INFRASTRUCTURE


def combined_exit_code(codes: Sequence[int]) -> int:
    """Returns the exit code of a run by those of its hosts; one that somebody should look at takes precedence."""
    return next((code for code in codes if code and not should_restart(code)), max(codes))


def shell_line(argv: Sequence[str]) -> str:
    """Returns a command as one line for a shell."""
    return shlex.join(argv)


def run_command(argv: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs a command.

    Raises:
        UserError: it is not installed.
    """
    try:
        return subprocess.run(argv, text=True, check=False, **options)
    except FileNotFoundError:
        raise UserError(
            f"{argv[0]} is not installed; install it, or use --dry-run to see what would be done."
        ) from None
