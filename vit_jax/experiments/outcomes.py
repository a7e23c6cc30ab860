"""Trains the combinations of a sweep one after the other, and records the inputs and the outcome of each."""

import contextlib
import dataclasses
import gc
import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
from ml_collections import ConfigDict

from vit_jax import NonFiniteLoss, UserError, data, interop, tell, train, user_errors
from vit_jax.config import Place, is_lowest_best, keep_choices, list_places
from vit_jax.distributed import Supervisor
from vit_jax.experiments.combinations import Combination
from vit_jax.json_text import to_json
from vit_jax.monitoring import fields_as_text, read_run
from vit_jax.program import prepare
from vit_jax.storage import filesystem

RESULT_FILE = "sweep.json"  # in the folder of each finished combination; the sweep's folder has one of all of them
INPUTS_FILE = "inputs.json"  # in the folder of a combination; written before its first step


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of training a combination. If the training diverged, the values are those up to then.

    Attributes:
        name: the name of the combination.
        last: the metric at the end, or None if the training diverged.
        best: the best value of the metric during the training, or None if it was never evaluated.
        steps: the number of training steps.
        seconds: how long the training took; after an interruption, only the last part.
    """

    name: str
    last: float | None
    best: float | None
    steps: int
    seconds: float


# Trains the combinations that have not finished and returns all outcomes: `train_combinations` with some supervisor.
Train: TypeAlias = Callable[[list[Combination]], list[Outcome]]


def train_combinations(combinations: list[Combination], supervisor: Supervisor | None = None) -> list[Outcome]:
    """Trains the combinations that have not finished, and returns the outcomes of all, best first.

    Diverged trainings come last.

    Raises:
        UserError: before any training, if a configuration is wrong or a folder holds a run of another configuration;
            later, if something in the data or the workdir is wrong.
    """
    done = [read_outcome(combination) for combination in combinations]
    outcomes = []
    for number, (combination, outcome) in enumerate(zip(combinations, done, strict=True), start=1):
        note = "" if outcome is None else ": already done"
        tell(f"[{number}/{len(combinations)}] {combination.name}{note}")
        outcomes.append(train_combination(combination, supervisor) if outcome is None else outcome)
    sign = 1 if is_lowest_best(combinations[0].config) else -1
    return sorted(outcomes, key=lambda outcome: (outcome.last is None, sign * (outcome.last or 0.0)))


def read_outcome(combination: Combination) -> Outcome | None:
    """Returns the outcome that `train_combination` wrote, or None if the combination has not finished or not begun.

    Raises:
        UserError: the configuration is wrong, the folder holds a run of another configuration or an invalid file, the
            data or weights were replaced (see `check_inputs`), or the folder is remote and cannot be read.
    """
    config, info, _ = prepare(share_program(combination))
    begun, result = (filesystem.join_path(combination.folder, name) for name in ("config.json", RESULT_FILE))
    if not filesystem.exists(begun):
        return None
    saved = read_run(combination.folder, combination.name).config
    old, new = (_comparable_fields(each) for each in (saved, config))
    if differ := [key for key in new if old.get(key) != new[key]]:
        raise UserError(
            f"{combination.folder} contains a run with other values of {', '.join(differ)}; choose another --workdir."
        )
    is_finished = filesystem.exists(result)
    check_inputs(combination.folder, config, info, is_finished)
    return _parse_outcome(combination, result) if is_finished else None


def share_program(combination: Combination) -> ConfigDict:
    """Returns the configuration with which a combination trains.

    If it leaves `step_numbers` open, its step has the form of the run in its folder or, at the first start, takes
    numbers as arguments, so that the combinations share one program.

    Raises:
        UserError: the folder cannot be read.
    """
    config = keep_choices(combination.config, combination.folder).copy_and_resolve_references()
    if config.step_numbers == "auto":
        config.step_numbers = "arguments"
    return config


def _comparable_fields(config: ConfigDict) -> dict[str, Any]:
    """Returns field -> value, in a form in which equal configurations are equal.

    The same preprocessing may be written in several ways, so that the preprocessing of each evaluation has its resolved
    form, with the resolution filled in.
    """
    told = data.describe_evals(config)
    return fields_as_text(config) | {f"evals.{name}.preprocess": fields["preprocess"] for name, fields in told.items()}


def _parse_outcome(combination: Combination, path: str) -> Outcome:
    number = int | float
    kinds = {"name": str, "last": number | None, "best": number | None, "steps": int, "seconds": number}

    def is_own(fields: dict[str, Any]) -> bool:
        typed = fields.keys() == kinds.keys() and all(isinstance(fields[key], kind) for key, kind in kinds.items())
        return typed and fields["name"] == combination.name

    return Outcome(**read_object(path, is_own))


def train_combination(combination: Combination, supervisor: Supervisor | None = None) -> Outcome:
    """Trains a combination, starting from its last checkpoint if there is one, and writes the outcome to its folder."""
    gc.collect()  # frees the arrays that the run before left on the devices
    metric, start = combination.config.checkpoint.best_metric, time.monotonic()
    config = share_program(combination)
    if jax.process_index() == 0:
        write_inputs(combination.folder, describe_inputs(*prepare(config)[:2]))
    try:
        last = train.train(config, combination.folder, supervisor=supervisor)[metric]
    except NonFiniteLoss as error:
        tell(f"{combination.name}: {error}")
        last = None
    run = read_run(combination.folder, combination.name)
    values = [row[metric] for _, row in run.metrics if math.isfinite(row.get(metric, math.nan))]
    best = (min if is_lowest_best(combination.config) else max)(values, default=last)
    steps = run.step
    outcome = Outcome(combination.name, last, best, steps, round(time.monotonic() - start, 1))
    if jax.process_index() == 0:
        text = to_json(dataclasses.asdict(outcome)) + "\n"
        filesystem.write_bytes(filesystem.join_path(combination.folder, RESULT_FILE), text.encode())
    return outcome


def describe_inputs(config: ConfigDict, info: data.DataInfo) -> dict[str, str]:
    """Returns field -> digest of what its path or name stands for now.

    The fields are `data.source` and those that name weights or files, such as labels and class maps. What is downloaded
    by name or part of the package is left out, as it never changes, and so is what cannot be read any more.
    """
    evals = {name: [one["contents"], one.get("sample", "")] for name, one in info.evals.items()}
    contents = json.dumps([info.fingerprint["contents"], info.sample, evals], sort_keys=True)
    inputs = {"data.source": hashlib.sha256(contents.encode()).hexdigest()[:16]}
    for field, source, place in list_places(config):
        with contextlib.suppress(UserError):
            if place is Place.WEIGHTS and not interop.is_download_name(source):
                inputs[field] = interop.digest_weights(source)
    files = {name: data.digest_files(own) for name, own in config.evals.items()}
    return inputs | {f"evals.{name}.{field}": text for name, own in files.items() for field, text in own.items()}


def check_inputs(folder: str, config: ConfigDict, info: data.DataInfo, is_finished: bool) -> None:
    """Compares the data, weights and files of a combination now with those that it began with.

    The data of an unfinished combination are not compared here: its run compares them when it resumes, and the user may
    allow other data.

    Args:
        folder: the folder of the combination.
        config: the configuration of the combination.
        info: what is known of its data now.
        is_finished: whether the combination has ended.

    Raises:
        UserError: the data, the weights or a file differ, or the file of digests is not what `write_inputs` wrote.
    """
    path = filesystem.join_path(folder, INPUTS_FILE)
    if not filesystem.exists(path):  # an older version wrote no such file
        return
    begun, inputs = read_object(path), describe_inputs(config, info)
    compared = [field for field in inputs if is_finished or field != "data.source"]
    if differ := [field for field in compared if begun.get(field, inputs[field]) != inputs[field]]:
        raise UserError(
            f"the contents of {' and '.join(differ)} were replaced after the run in {folder} began; choose another "
            "--workdir."
        )


def write_inputs(folder: str, inputs: dict[str, str]) -> None:
    """Writes the digests of `describe_inputs` into the folder of a combination, unless the combination has begun.

    Raises:
        UserError: the file cannot be written.
    """
    if not filesystem.exists(filesystem.join_path(folder, "config.json")):
        if not filesystem.is_remote(folder):
            with user_errors(f"cannot write to {folder}"):
                Path(folder).mkdir(parents=True, exist_ok=True)
        filesystem.write_bytes(filesystem.join_path(folder, INPUTS_FILE), (json.dumps(inputs) + "\n").encode())


def read_object(path: str, is_valid: Callable[[dict[str, Any]], bool] = lambda content: True) -> dict[str, Any]:
    """Returns the JSON object in a file that a sweep wrote.

    Args:
        path: the file, local or remote.
        is_valid: returns whether the object has the expected form.

    Raises:
        UserError: the file contains something else.
    """
    try:
        content = json.loads(filesystem.read_bytes(path))
    except ValueError:
        content = None
    if not isinstance(content, dict) or not is_valid(content):
        advice = "remove it, or choose another --workdir"
        raise UserError(f"cannot read {path}: it is damaged or was not written by a sweep; {advice}.")
    return content
