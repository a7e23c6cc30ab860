"""What every way of launching knows of a run, and which ends of it are answered by starting it again."""

import argparse
import dataclasses
import re
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

from vit_jax import Preempted, UserError, exit_code

PREEMPTED = exit_code(Preempted())
SLICE = "--config.mesh.slice="
REMOTE = re.compile(r"\w+://.")
SHARED = re.compile(r"\w+://.|/")


@dataclasses.dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        name: of the run and of all that a cloud makes for it.
        command: its words, the same on every host.
        slices: TPU slices, or groups of nodes, between which only gradients pass.
        restarts: how often it may be started again.
    """

    name: str
    command: tuple[str, ...]
    slices: int
    restarts: int


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a command of this folder."""
    return argparse.ArgumentParser(
        prog=f"python -m launch.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `make` reads."""
    parser.add_argument("name", help="of the run, on the cloud too")
    parser.add_argument("--slices", type=int, default=1, help="TPU slices, or groups of nodes: sets mesh.slice [1]")
    parser.add_argument("--restarts", type=int, default=10, help="how often it is started again, at most [10]")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    parser.usage = parser.format_usage().removeprefix("usage: ").rstrip() + " -- COMMAND ..."


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Splits a command line, given with the program's name first, into options and the words after `--`."""
    words = argv[1:]
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def make(args: argparse.Namespace, command: Sequence[str]) -> Job:
    """Returns the run that a command line asks for.

    Raises:
        UserError: a name that clouds refuse, no command, numbers that cannot be, or a mesh of other slices.
    """
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", args.name):
        rule = "at most 40 of a-z, 0-9 and -, a letter first, no - last"
        raise UserError(f"the name {args.name!r} is not one that clouds accept: {rule}.")
    if not command:
        raise UserError("say what to run after --, for example -- python -m vit_jax.main --config=configs/digits.py.")
    if args.slices < 1 or args.restarts < 0:
        raise UserError("--slices is at least 1, --restarts at least 0.")
    return Job(args.name, _sliced(tuple(command), args.slices), args.slices, args.restarts)


def _sliced(command: tuple[str, ...], slices: int) -> tuple[str, ...]:
    """Returns a command whose mesh knows of the slices."""
    if slices == 1:  # whatever it says: one slice may be split further
        return command
    said = {word for word in command if word.startswith(SLICE)}
    if said - {f"{SLICE}{slices}"}:
        raise UserError(f"--slices={slices} contradicts {' '.join(sorted(said))}; leave that to the launcher.")
    return command if said else (*command, f"{SLICE}{slices}")


def check_workdir(job: Job, shared: bool) -> None:
    """Sees to it that a run keeps what it has learnt where machines that go do not take it with them.

    Args:
        job: the run.
        shared: whether its machines share a disk that outlives them.

    Raises:
        UserError: it trains into a folder of its own machine.
    """
    said = [word.partition("=")[2] for word in job.command if word.startswith("--workdir=")]
    fit = REMOTE if not shared else SHARED
    if "vit_jax.main" in job.command and not (said and fit.match(said[-1])):
        words = "its checkpoints would go with the machine that wrote them"
        place = ", or the absolute path of a shared disk" if shared else ""
        raise UserError(f"{words}; say --workdir=gs://BUCKET/FOLDER{place}.")


def again(code: int) -> bool:
    """Returns whether a run that ended with this exit code is to be started again: preempted, or infrastructure."""
    return code == PREEMPTED or code >= 128


def verdict(codes: Sequence[int]) -> int:
    """Returns the exit code of a run by those of its hosts: what somebody should look at comes first."""
    return next((code for code in codes if code and not again(code)), max(codes))


def line(argv: Sequence[str]) -> str:
    """Returns a command as one pastes it into a shell."""
    return shlex.join(argv)


def call(argv: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs a command.

    Raises:
        UserError: it is not installed.
    """
    try:
        return subprocess.run(argv, text=True, check=False, **options)
    except FileNotFoundError:
        raise UserError(f"there is no {argv[0]} here; install it, or see with --dry-run what it would do.") from None
