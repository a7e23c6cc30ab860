"""Trains the combinations of a sweep one after the other, and records the outcome of each."""

import dataclasses
import gc
import math
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from ml_collections import ConfigDict

from vit_jax import NonFiniteLoss, UserError, data, tell, train
from vit_jax.distributed import Supervisor
from vit_jax.experiments.combination_inputs import check_inputs, describe_inputs, read_object, write_inputs
from vit_jax.experiments.combinations import Combination
from vit_jax.json_text import to_json
from vit_jax.monitoring import fields_as_text, read_run
from vit_jax.program import prepare
from vit_jax.storage import filesystem

RESULT_FILE = "sweep.json"  # in the folder of each finished combination; the sweep's folder has one of all of them


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of training a combination. If the training diverged, the values are those up to then.

    Attributes:
        name: the name of the combination.
        last: the metric at the end, or None if the training diverged.
        best: the largest value of the metric during the training, or None if it was never evaluated.
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
    return sorted(outcomes, key=lambda outcome: (outcome.last is None, -(outcome.last or 0.0)))


def read_outcome(combination: Combination) -> Outcome | None:
    """Returns the outcome that `train_combination` wrote, or None if the combination has not finished or not begun.

    Raises:
        UserError: the configuration is wrong, the folder holds a run of another configuration or an invalid file, the
            data or weights were replaced (see `check_inputs`), or the folder is remote and cannot be read.
    """
    config, info, _ = prepare(combination.config)
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
    if jax.process_index() == 0:
        write_inputs(combination.folder, describe_inputs(*prepare(combination.config)[:2]))
    try:
        last = train.train(combination.config, combination.folder, supervisor=supervisor)[metric]
    except NonFiniteLoss as error:
        tell(f"{combination.name}: {error}")
        last = None
    run = read_run(combination.folder, combination.name)
    values = [row[metric] for _, row in run.metrics if math.isfinite(row.get(metric, math.nan))]
    best, steps = max(values, default=last), run.step
    outcome = Outcome(combination.name, last, best, steps, round(time.monotonic() - start, 1))
    if jax.process_index() == 0:
        text = to_json(dataclasses.asdict(outcome)) + "\n"
        filesystem.write_bytes(filesystem.join_path(combination.folder, RESULT_FILE), text.encode())
    return outcome
