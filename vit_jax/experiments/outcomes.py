"""The training of combinations one after the other, and what became of each."""

import dataclasses
import gc
import json
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
from vit_jax.monitoring import fields_as_text, read_run
from vit_jax.program import prepare
from vit_jax.storage import filesystem

RESULT_FILE = "sweep.json"  # one in the folder of each finished combination, and one of all in that of the sweep


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a combination; if it diverged, until then.

    Attributes:
        name: KEY=VALUE,... as written, which is also the name of its folder.
        last: the metric at the end; None: the training diverged.
        best: the largest value of the metric during the training; None: it was never evaluated.
        steps: of the training.
        seconds: of the training, without those before an interruption.
    """

    name: str
    last: float | None
    best: float | None
    steps: int
    seconds: float


# What trains those combinations that have not finished: `train_combinations`, for some supervisor.
Train: TypeAlias = Callable[[list[Combination]], list[Outcome]]


def train_combinations(combinations: list[Combination], supervisor: Supervisor | None = None) -> list[Outcome]:
    """Trains the combinations that have not finished, and returns the outcomes of all, best first.

    Raises:
        UserError: one of the configurations is wrong or a folder holds a run of another one, and nothing was started;
            or something in the data or the workdir is wrong.
    """
    done = [read_outcome(combination) for combination in combinations]
    outcomes = []
    for number, (combination, outcome) in enumerate(zip(combinations, done, strict=True), start=1):
        note = "" if outcome is None else ": already done"
        tell(f"[{number}/{len(combinations)}] {combination.name}{note}")
        outcomes.append(train_combination(combination, supervisor) if outcome is None else outcome)
    return sorted(outcomes, key=lambda outcome: (outcome.last is None, -(outcome.last or 0.0)))


def read_outcome(combination: Combination) -> Outcome | None:
    """Returns the outcome that `train_combination` wrote, or None if it has not finished.

    Raises:
        UserError: the configuration is wrong; the folder holds a run of another configuration or an invalid file; or it
            is remote, and the store refuses or does not answer.
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
    """Returns the fields by name, those of evaluations' preprocessing with the resolution filled in.

    The same preprocessing may be written in several ways.
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
    """Trains a combination from its last checkpoint on, and writes the outcome to its folder."""
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
    found = [row[metric] for _, row in run.metrics if math.isfinite(row.get(metric, math.nan))]
    best, steps = max(found, default=last), run.step
    outcome = Outcome(combination.name, last, best, steps, round(time.monotonic() - start, 1))
    if jax.process_index() == 0:
        text = json.dumps(dataclasses.asdict(outcome)) + "\n"
        filesystem.write_bytes(filesystem.join_path(combination.folder, RESULT_FILE), text.encode())
    return outcome
