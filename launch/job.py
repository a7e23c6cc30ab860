"""What every way of launching knows of a run, and which ends of it are answered by starting it again."""

import argparse
import dataclasses
import itertools
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from vit_jax import Preempted, UserError, exit_code, list_models

PREEMPTED = exit_code(Preempted())
SLICE = "--config.mesh.slice="
BUCKET = re.compile(r"gs://.")  # to s3:// one host alone can write checkpoints, and machines of Google's have no need
SHARED = re.compile(r"(gs|s3)://.|/")
SHELLS = ("sh", "bash", "dash", "zsh")
PYTHON = re.compile(r"python[\d.]*")
SWITCH = re.compile(r"-([bBdEIOPqsSuvx]+|[WX].+)")  # of Python, without a value in a word of its own


@dataclasses.dataclass(frozen=True)
class Output:
    """Where a command writes what it is there to keep.

    Attributes:
        flag: that says where; None: a word without a flag does.
        bucket: whether that can be a bucket. Such a command writes without the flag too, to a folder of its own
            choice; the others write to local folders, and those with a flag only where it says so.
    """

    flag: str | None = None
    bucket: bool = False


# Every command of the project -> where it writes; None: it prints.
OUTPUTS: dict[str, Output | None] = {
    "vit_jax.main": Output("workdir", bucket=True),
    "vit_jax.sweep": Output("workdir", bucket=True),
    "vit_jax.pack": Output(),
    "vit_jax.convert": Output(),
    "benchmarks.architecture": Output("write"),
    "benchmarks.faults": Output("write"),
    "benchmarks.plans": Output("write"),
    **dict.fromkeys([f"vit_jax.{name}" for name in ("doctor", "evaluate", "plan", "predict")]),
    **dict.fromkeys([f"benchmarks.{name}" for name in ("input", "load", "loader", "overhead", "train_step")]),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        name: of the run and of all that a cloud makes for it.
        command: its words, the same on every host.
        slices: TPU slices, or groups of nodes, between which only gradients pass.
        restarts: how often it may be started again after a fault; after a preemption it always is.
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
    parser.add_argument("--restarts", type=int, default=10, help="after faults, at most; preemptions do not count [10]")
    parser.add_argument(
        "--allow-local-output",
        action="store_true",
        help="the command keeps nothing, or saves what it writes from the disks of its machines itself",
    )
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


def check_output(job: Job, shared: bool, allowed: bool) -> None:
    """Sees to it that a command keeps what it has learnt where machines that go do not take it with them.

    A shell or another program may write anywhere. Where the machines share a disk it passes, since it starts on that
    disk; elsewhere the user answers for it.

    Args:
        job: the run.
        shared: whether its machines share a disk that outlives them.
        allowed: whether the user answers for what the command writes.

    Raises:
        UserError: it writes, or may write, to a folder of its own machine.
    """
    name, words = program(job.command) or (job.command[0], [])
    output = OUTPUTS.get(name)
    if allowed or (name in OUTPUTS and output is None):
        return
    if output and output.bucket:
        if not (SHARED if shared else BUCKET).match(_given(words, str(output.flag))):
            told = f"what {name} keeps would go with the machine that wrote it"
            place = ", or the absolute path of a shared disk" if shared else ""
            raise UserError(f"{told}; say --{output.flag}=gs://BUCKET/FOLDER{place}.")
    elif not shared and not (output and output.flag and not _given(words, output.flag)):
        told = f"{name} writes to local folders only" if output else "nobody can tell where this command writes"
        hint = "if it keeps nothing, or copies that elsewhere itself, say --allow-local-output"
        raise UserError(f"{told}, and the disks of the machines are deleted with them; {hint}.")


def check_config(job: Job, shared: bool, devices: int) -> None:
    """Parses the configuration of a command that trains, and checks what needs no data, before machines cost.

    Args:
        job: the run.
        shared: whether its machines share the disk that this stands on.
        devices: of all its machines.

    Raises:
        UserError: there it would end with it, or look for data on the disk of a machine that is new.
    """
    name, words = program(job.command) or ("", [])
    if name not in ("vit_jax.main", "vit_jax.sweep") or {"--help", "-h"} & set(words):
        return
    # They import what trains: seconds, of which other commands have no need.
    from vit_jax import data, models, sharding, sweep
    from vit_jax.config import check_config
    from vit_jax.config_flags import parse_command_line
    from vit_jax.data import sources

    argv = [name, *words]
    swept = name == "vit_jax.sweep"
    configs = [run.config for run in sweep.combinations(argv)] if swept else [parse_command_line(argv)[0]]
    for config in configs:
        check_config(config)
        models.create(config.model.name)
        shape = data.train_preprocess(config).shape
        for evaluation in config.evals:
            data.eval_preprocess(config, evaluation, shape)
        sharding.axis_sizes(config, devices)
        kind, _ = sources.parse_source(config.data.source)
        if not shared:
            bucket = "gs://BUCKET/FOLDER"
            _check_place("--config", _given(words, "config"), "a path in the folder of the code", inside=True)
            if kind in ("folder", "array_record"):
                _check_place("data.source", config.data.source, f"{kind}:{bucket}")
            if config.data.data_dir:
                _check_place("data.data_dir", config.data.data_dir, bucket)
            if config.init_from and config.init_from not in {one.name for one in list_models()}:
                _check_place("init_from", config.init_from, bucket)


def _check_place(what: str, value: str, instead: str, inside: bool = False) -> None:
    """Refuses a path that is of this machine alone; an absolute one may be a disk that is mounted on the new ones too.

    Args:
        what: names it.
        value: the path, after the kind of a data source.
        instead: to write.
        inside: whether it must lie in the folder of the code, which the machines get.
    """
    path = value if inside or "://" in value else value.rpartition(":")[2]
    if "://" not in value and (path.startswith(("~", "..")) or PurePath(path).is_absolute() == inside):
        raise UserError(f"{what}={value} would be sought on new machines, which do not have it; say {instead}.")


def check_known(job: Job) -> None:
    """Sees to it that git knows the config file of a command that trains, where only such files are copied.

    Raises:
        UserError: it does not.
    """
    name, words = program(job.command) or ("", [])
    file = _given(words, "config").partition(":")[0]
    if name in ("vit_jax.main", "vit_jax.sweep") and file:
        known = call(["git", "ls-files", "--error-unmatch", file], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if known.returncode == 1:  # 128: this is no repository, which is told when the code is packed
            raise UserError(f"git does not know {file}, so the machines would not get it; git add {file}.")


def _given(words: Sequence[str], flag: str) -> str:
    """Returns the last value of a flag, written --flag=VALUE or --flag VALUE; without one, nothing."""
    value = ""
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if match := re.fullmatch(rf"--?{flag}(?:=(.*))?", word, re.S):
            value = following if match[1] is None else match[1]
    return value


def program(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """Returns the module that a command's Python runs, written `python -m MODULE` or `python FOLDER/MODULE.py`, and the
    words for it, whatever starts that Python (env, timeout, a profiler), except a shell; None if there is none.
    """
    names = [PurePath(word).name for word in command]
    first = next((place for place, name in enumerate(names) if name in SHELLS or PYTHON.fullmatch(name)), None)
    if first is None or names[first] in SHELLS:
        return None
    words = list(itertools.dropwhile(SWITCH.fullmatch, command[first + 1 :]))
    if words[:1] == ["-m"] and len(words) > 1:
        return words[1], words[2:]
    if words and words[0].endswith(".py"):
        return ".".join(PurePath(words[0]).with_suffix("").parts[-2:]), words[1:]
    return None


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
