"""Checks of a command before machines are requested: where it writes, and whether its configuration is valid."""

import dataclasses
import difflib
import itertools
import os
import re
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import PurePath
from typing import Any

from ml_collections import ConfigDict

from launch.job import Job, run_command
from vit_jax import UserError, nearest
from vit_jax.__main__ import COMMANDS
from vit_jax.config import Place, list_places, parse_command_line, place_of

BUCKET = re.compile(r"gs://.")  # not s3://, which can take checkpoints from a single host only
SHARED_PLACE = re.compile(r"(gs|s3)://.|/")
DOOR = "vit-jax"  # the script of vit_jax.__main__
SHELLS = ("sh", "bash", "dash", "zsh")
PYTHON = re.compile(r"python[\d.]*")
PYTHON_OPTION = re.compile(r"-([bBdEIOPqsSuvx]+|[WX].+)")  # an option of Python whose value is not a separate word
PACKAGES = ("vit_jax", "benchmarks", "launch")
TRAINERS = ("vit_jax.main", "vit_jax.sweep", "vit_jax.finetune")


@dataclasses.dataclass(frozen=True)
class Output:
    """Where a command writes its results.

    Attributes:
        flag: the name of the flag that gives the place, without dashes; None: a positional argument gives it, `out`.
        bucket: whether the place can be a bucket. If it can, the command also writes without the flag, to a local
            folder of its own choice. If it cannot, the command writes to a local folder and, if it has a flag, only
            when the flag is given.
    """

    flag: str | None = None
    bucket: bool = False


# Module of every command of the project -> where the command writes; None: it only prints.
OUTPUTS: dict[str, Output | None] = {
    "vit_jax.main": Output("workdir", bucket=True),
    "vit_jax.sweep": Output("workdir", bucket=True),
    "vit_jax.finetune": Output("workdir", bucket=True),
    "vit_jax.record": Output(),
    "vit_jax.vtab": Output("workdir", bucket=True),
    "vit_jax.embed": Output(bucket=True),
    "vit_jax.pack": Output(),
    "vit_jax.describe": Output(),
    "vit_jax.convert": Output(),
    "vit_jax.look": Output("out"),
    "vit_jax.doubts": Output("out", bucket=True),
    "vit_jax.measure": Output("out", bucket=True),
    "vit_jax.report": Output(),
    "benchmarks.bucket": Output(),
    "benchmarks.calibration": Output("write"),
    "benchmarks.curve_big_vision": Output("write"),
    "benchmarks.dependencies": Output("write"),
    "benchmarks.duplicates": Output("write"),
    "benchmarks.export": Output("write"),
    "benchmarks.feed": Output("write"),
    "benchmarks.goodput": Output("write"),
    "benchmarks.gpu": Output("out"),
    "benchmarks.input": Output("write"),
    "benchmarks.mutants": Output("write"),
    "benchmarks.neighbourhoods": Output("write"),
    "benchmarks.optimizers": Output("write"),
    "benchmarks.patterns": Output("write"),
    "benchmarks.programs": Output("out"),
    "benchmarks.serving": Output("write"),
    "benchmarks.stream": Output("write"),
    "benchmarks.stream_accuracy": Output("write"),
    "benchmarks.timm_catalog": Output(),
    "benchmarks.timm_models": Output(),
    "benchmarks.tpu": Output("write"),
    "docs.architecture": Output("write"),
    "docs.fields": Output("write"),
    "docs.imagenet": Output("write"),
    "docs.packages": Output("write"),
    "docs.paper_plans": None,
    "docs.pictures": Output("write"),
    "docs.plans": Output("write"),
    "docs.results_page": Output("write"),
    "docs.screenshots": Output("out"),
    "docs.serve": None,
    "docs.studies": Output("write"),
    "tests.faults.table": Output("write"),
    **dict.fromkeys([f"vit_jax.{name}" for name in ("doctor", "evaluate", "plan", "predict")]),
    **dict.fromkeys(
        [
            f"benchmarks.{name}"
            for name in ("agreement", "coordination", "embed", "load", "loader", "overhead", "tpu_check", "train_step")
        ]
    ),
}

# Module of a command whose inputs are not all fields -> its arguments that name one, positional or a flag.
ARGUMENT_PLACES = {
    "vit_jax.convert": {"source": Place.WEIGHTS},
    "vit_jax.describe": {"source": Place.SOURCE},
    "vit_jax.doubts": {"workdir": Place.FOLDER, "--source": Place.SOURCE},
    "vit_jax.embed": {"source": Place.SOURCE, "--of": Place.WEIGHTS, "--data-dir": Place.FOLDER},
    "vit_jax.evaluate": {
        "models": Place.WEIGHTS,
        "--workdir": Place.WEIGHTS,
        "--source": Place.SOURCE,
        "--data-dir": Place.FOLDER,
        "--features": Place.FOLDER,
    },
    "vit_jax.look": {"checkpoint": Place.WEIGHTS, "images": Place.FILE},
    "vit_jax.measure": {"--against": Place.FILE},
    "vit_jax.pack": {"source": Place.SOURCE, "--without": Place.SOURCE, "--data-dir": Place.FOLDER},
    "vit_jax.plan": {"--measured": Place.FOLDER},
    "vit_jax.predict": {
        "checkpoint": Place.WEIGHTS,
        "images": Place.FILE,
        "--data-dir": Place.FOLDER,
        "--texts": Place.FILE,
    },
    "vit_jax.record": {"workdirs": Place.FOLDER, "--evaluations": Place.FILE},
    "vit_jax.report": {"workdirs": Place.FOLDER},
    "vit_jax.vtab": {"checkpoint": Place.WEIGHTS, "--data-dir": Place.FOLDER},
}


def check_module(job: Job) -> None:
    """Checks that the module which a command runs is not a misspelt module of this project.

    Raises:
        UserError: the module is misspelt.
    """
    name, _ = parse_program(job.command) or ("", [])
    package = name.partition(".")[0]
    of_project = package in PACKAGES
    meant = of_project or (difflib.get_close_matches(package, PACKAGES, cutoff=0.8) and not find_spec(package))
    if name not in OUTPUTS and meant and not (of_project and find_spec(name)):
        near = nearest(name, OUTPUTS)
        raise UserError(f"there is no module {name}" + (f"; did you mean {near}?" if near else "."))


def check_output(job: Job, shared_disk: bool, allowed: bool) -> None:
    """Checks that the results of a command are not lost when its machines are deleted.

    A shell or a program that is not of this project may write anywhere. It is accepted if the machines share a disk,
    because it starts in a folder of that disk, and otherwise only if `allowed` is set.

    Args:
        job: the run.
        shared_disk: whether its machines share a disk that outlives them.
        allowed: whether the user has confirmed (--allow-local-output) that nothing of value is lost.

    Raises:
        UserError: the command writes, or may write, to a folder of its own machine.
    """
    name, words = parse_program(job.command) or (job.command[0], [])
    output = OUTPUTS.get(name)
    if allowed or (name in OUTPUTS and output is None):
        return
    if output and output.bucket:
        written = _flag_value(words, output.flag) if output.flag else _parse_arguments(name, words)["out"]
        if not (SHARED_PLACE if shared_disk else BUCKET).match(written):
            reason = f"what {name} writes would be deleted with the machine that wrote it"
            place = ", or the absolute path of a shared disk" if shared_disk else ""
            advice = f"add --{output.flag}=" if output.flag else "write to "
            raise UserError(f"{reason}; {advice}gs://BUCKET/FOLDER{place}.")
    elif not shared_disk and not (output and output.flag and not _flag_value(words, output.flag)):
        reason = f"{name} writes to local folders only" if output else "it is unknown where this command writes"
        hint = (
            "if your command writes nothing that you need, or copies its own output elsewhere, add --allow-local-output"
        )
        raise UserError(f"{reason}, and the disks of the machines are deleted with them; {hint}.")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The files that a command reads, as far as its words tell.

    Attributes:
        file: the config file, without its argument; empty: none.
        configs: the configurations of all its runs. Empty: it trains nothing, or its model is known only where it runs.
        places: (name, value, kind) of each field or argument that names data, weights, a folder or a file.
    """

    file: str = ""
    configs: Sequence[ConfigDict] = ()
    places: Sequence[tuple[str, str, Place]] = ()


def read_inputs(job: Job) -> Inputs:
    """Parses the words of a command of the project; there are no inputs of others.

    Raises:
        UserError: the command would end with the same error.
    """
    name, words = parse_program(job.command) or ("", [])
    if {"--help", "-h"} & set(words):
        return Inputs()
    if name not in TRAINERS:
        return Inputs(places=_list_arguments(name, words))
    configs = _list_configs(name, words)
    places = dict.fromkeys(place for config in configs for place in list_places(config))
    file = _flag_value(words, "config").partition(":")[0]
    return Inputs(file, configs, list(places))


def check_config(inputs: Inputs, devices: int) -> None:
    """Checks the configurations of a command as far as this is possible without data.

    Args:
        inputs: what the command reads.
        devices: the number of devices of all its machines.

    Raises:
        UserError: the run would end with the same error.
    """
    if not inputs.configs:
        return
    # These imports take seconds, and commands that do not train do not need them.
    from vit_jax import sharding
    from vit_jax.config import check_config
    from vit_jax.data import sources
    from vit_jax.program import model_without_data

    for config in inputs.configs:
        check_config(config)
        model_without_data(config)
        sharding.axis_sizes(config, devices)
        sources.parse_source(config.data.source)


def check_places(inputs: Inputs) -> None:
    """Checks that a command finds what it reads on machines that share no disk with this one.

    Raises:
        UserError: only this machine has it.
    """
    if _is_outside(inputs.file) or PurePath(inputs.file).is_absolute():
        raise UserError(f"--config={inputs.file} is not on the new machines; use a path in the folder of the code.")
    for name, value, place in inputs.places:
        if (instead := _reachable_place(value, place)) != value:
            raise UserError(f"{name}={value} is not on the new machines; use {instead}.")


def check_cloud_job(job: Job, devices: int, allow_local_output: bool) -> Inputs:
    """Checks the command of a run on cloud machines, whose disks vanish with them, and returns its inputs.

    Args:
        job: the run.
        devices: the number of all devices.
        allow_local_output: whether the user states that nothing worth keeping is written to local folders.

    Raises:
        UserError: see the functions above.
    """
    check_module(job)
    check_output(job, shared_disk=False, allowed=allow_local_output)
    inputs = read_inputs(job)
    check_config(inputs, devices)
    check_places(inputs)
    return inputs


def _list_configs(name: str, words: list[str]) -> list[ConfigDict]:
    """Returns the configurations of all runs of a command that trains.

    Args:
        name: the module of the command, one of `TRAINERS`.
        words: its arguments.

    Raises:
        UserError: see the modules.
    """
    from vit_jax import experiments, finetune

    argv = [name, *words]
    if name == "vit_jax.sweep":
        return [combination.config for combination in experiments.list_combinations(argv)]
    if name == "vit_jax.finetune":
        return [trial.config for trial in finetune.list_all_trials(argv)]
    return [parse_command_line(argv)[0]]


def _list_arguments(name: str, words: list[str]) -> list[tuple[str, str, Place]]:
    """Returns (name, value, kind) of each place that a command names in arguments or in fields on its command line.

    Args:
        name: the module of the command.
        words: its arguments. If they are not those of the command, its parser ends this process with exit code 2.
    """
    fields = [word.removeprefix("--config.").partition("=") for word in words if word.startswith("--config.")]
    places = [(field, value, place) for field, _, value in fields if value and (place := place_of(field))]
    if name not in ARGUMENT_PLACES:
        return places
    given = _parse_arguments(name, words)
    for argument, place in ARGUMENT_PLACES[name].items():
        kind = Place.SOURCE if argument == "images" and given.get("split") else place
        values = given[argument.strip("-").replace("-", "_")] or ()
        places += [(argument, value, kind) for value in ([values] if isinstance(values, str) else values)]
    from vit_jax import evals

    for request in given.get("evals", ()):
        places += evals.list_request_places(request)
    return places


def _parse_arguments(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Returns argument -> value of a command of `ARGUMENT_PLACES`.

    If the words are not those of the command, its parser ends this process with exit code 2.
    """
    # These imports take seconds, and other commands do not need them.
    from vit_jax import convert, describe, embed, evaluate, look, measure, pack, plan, predict, record, report, vtab

    commands = (convert, describe, embed, evaluate, look, measure, pack, plan, predict, record, report, vtab)
    parsers = {module.__name__: module.make_parser for module in commands}
    return vars(parsers[name]().parse_known_args(words)[0])


def _reachable_place(value: str, place: Place) -> str:
    """Returns the value of a field that names a place, with a bucket instead of what only this machine has.

    An absolute path stays, because it may be on a disk that the new machines mount too, and so does a file in the
    folder of the code, which is copied to them.
    """
    from vit_jax import interop
    from vit_jax.data import sources

    def move_folder(path: str) -> str:
        return path if "://" in path or PurePath(path).is_absolute() else "gs://BUCKET/FOLDER"

    def move_file(path: str) -> str:
        return "gs://BUCKET/FILE" if _is_outside(path) else path

    if place is Place.SOURCE:
        return sources.change_paths(value, move_folder, move_file)
    if place is Place.FILE:
        return move_file(value)
    return value if place is Place.WEIGHTS and interop.is_download_name(value) else move_folder(value)


def _is_outside(path: str) -> bool:
    """Returns whether a path that is not absolute leaves the current folder, which is that of the code."""
    return path.startswith("~") or (".." in PurePath(path).parts and not PurePath(path).is_absolute())


def check_files_in_git(inputs: Inputs) -> None:
    """Checks that git tracks the files that a command reads from the folder of the code.

    They are its config file, labels, class maps, renamings of classes and images. It is for launchers that copy only
    tracked files.

    Raises:
        UserError: git does not track a file.
    """
    from vit_jax.data import sources

    files = dict.fromkeys([inputs.file] if inputs.file else [])

    def note_file(path: str) -> str:
        if not PurePath(path).is_absolute() and os.path.isfile(path):
            files[path] = None
        return path

    for _, value, place in inputs.places:
        if place is Place.FILE:
            note_file(value)
        elif place is Place.SOURCE:
            sources.change_paths(value, str, note_file)
    for file in files:
        listed = run_command(
            ["git", "ls-files", "--error-unmatch", file], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        if listed.returncode == 1:  # 128 means that this is not a repository, which is reported when code is packed
            raise UserError(
                f"git does not track {file}, so it would not be copied to the machines; run git add {file}."
            )


def _flag_value(words: Sequence[str], flag: str) -> str:
    """Returns the last value of a flag, written --flag=VALUE or --flag VALUE; an empty text if there is none."""
    value = ""
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if match := re.fullmatch(rf"--?{flag}(?:=(.*))?", word, re.S):
            value = following if match[1] is None else match[1]
    return value


def parse_program(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """Returns the Python module that a command runs and the arguments of that module.

    A module is written `python -m MODULE` or `python FOLDER/MODULE.py`. A command of the package may also be written
    `vit-jax NAME` or `python -m vit_jax NAME`. Other programs than shells may precede it, such as env, timeout or a
    profiler.

    Returns:
        (dotted name of the module, its arguments), or None if the command runs no Python module or starts with a shell.
    """
    names = [PurePath(word).name for word in command]
    first = next((i for i, name in enumerate(names) if name in (*SHELLS, DOOR) or PYTHON.fullmatch(name)), None)
    if first is None or names[first] in SHELLS:
        return None
    words = list(itertools.dropwhile(PYTHON_OPTION.fullmatch, command[first + 1 :]))
    if names[first] == DOOR:
        words = ["-m", "vit_jax", *words]
    if words[:2] == ["-m", "vit_jax"] and words[2:3] and words[2] in COMMANDS:
        return f"vit_jax.{COMMANDS[words[2]]}", words[3:]
    if words[:1] == ["-m"] and len(words) > 1:
        return words[1], words[2:]
    if words and words[0].endswith(".py"):
        return ".".join(PurePath(words[0]).with_suffix("").parts[-2:]), words[1:]
    return None
