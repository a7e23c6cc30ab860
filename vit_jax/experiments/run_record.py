"""The record of a finished run: its configuration, metrics at the end, time, hardware and commit, as a JSON file."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, checkpoint, data, interop
from vit_jax.config import parse_config
from vit_jax.data.sources import source_label
from vit_jax.json_text import to_json
from vit_jax.monitoring import RunFolder, Start, read_run, total_seconds
from vit_jax.storage import filesystem

UNRECORDED = ("norm/", "perf/")  # metrics with these starts of names are not recorded
HARDWARE = "hardware"  # the folder of the records of vit_jax.measure
FOLDERS = re.compile(r"(^|(?<=:))/(?!/)(?:[^/]+/)*")  # the folders of an absolute local path, also after `folder:`


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A finished run: its configuration and its results.

    Attributes:
        name: the name of the run's folder, or its path relative to a folder of several runs.
        config: the configuration, as in config.json, with absolute local paths shortened to their last part.
        steps: the number of training steps.
        metrics: metric -> its value for the exported weights, which are the last or, with `stop_after`, the best; None:
            the value was not finite.
        processes: the processes that trained the run, see `vit_jax.monitoring.Processes`.
        evaluations: name of an evaluation that was made after the run -> its `data.identify_evals`.
        ledger: category of time -> seconds, see `vit_jax.monitoring.Category`; empty in records of earlier versions.
        curve: a row for each step with evaluations: `step` and the metrics of the evaluations. Empty in records of
            earlier versions.
    """

    name: str
    config: dict[str, Any]
    steps: int
    metrics: dict[str, float | None]
    processes: list[dict[str, Any]]
    evaluations: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    ledger: dict[str, float] = dataclasses.field(default_factory=dict)
    curve: list[dict[str, float]] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The seconds of training, summed over the starts of the run, each up to its last save.

        Compilation and evaluations are included.
        """
        return sum(process["seconds"] for process in self.processes)

    @property
    def dataset(self) -> str:
        """The short name of the training data, as it occurs in names of evaluations; see `source_label`."""
        return source_label(self.config["data"]["source"])

    def as_run(self, location: str) -> RunFolder:
        """Returns the run as if it were read from its folder.

        It has the metrics of the evaluations at all steps, and of all other metrics only the last values.

        Args:
            location: the location of the record, for messages.
        """
        metrics = {name: math.nan if value is None else value for name, value in self.metrics.items()}
        earlier = [(int(row["step"]), row) for row in self.curve if row["step"] < self.steps]
        ended = next((row for row in self.curve if row["step"] == self.steps), {})  # perhaps not of exported weights
        rows = [*earlier, (self.steps, metrics | ended)]
        config = parse_config(json.dumps(self.config).encode(), location)  # an earlier version may have written it
        finished = Start(0, self.steps, 0.0, {}, complete=True)  # perhaps before `total_steps`
        return RunFolder(self.name, location, config, rows, self.processes, None, {}, [finished])

    def stopped_by(self, metric: str) -> dict[str, float | None]:
        """Returns the metrics at the step where `metric` was largest (early stopping).

        Metrics that were not evaluated at that step have their last values, as have all if the curve has no `metric`.
        """
        rows = [row for row in self.curve if metric in row]
        return self.metrics | (max(rows, key=lambda row: row[metric]) if rows else {})

    def distinct(self, field: str) -> list[str]:
        """Returns the different values of a field of `processes`, as text; processes without the field are skipped."""
        return list(dict.fromkeys(str(process[field]) for process in self.processes if process.get(field)))


def make_record(workdir: str, name: str, evaluations: list[dict[str, Any]] | None = None) -> RunRecord:
    """Returns the record of a finished run.

    Args:
        workdir: the folder of the run, local or remote.
        name: the name of the record.
        evaluations: evaluations of the run's last checkpoint, as `vit_jax.evaluate --json` prints them. Their metrics
            are added to those of the run.

    Raises:
        UserError: there is no run, the run is not finished or not evaluated at its end, or see `check_evaluation`.
    """
    run = read_run(workdir, name)
    config, step = run.config, run.step
    metrics: dict[str, Any] = {key: value if math.isfinite(value) else None for key, value in run.exported.items()}
    if not run.is_complete and (step < config.total_steps or not metrics):
        raise UserError(f"{workdir} is at step {step:,} of {config.total_steps:,}; finish the run first.")
    if not run.is_complete:
        raise UserError(f"{workdir} is not evaluated at its last step, {step:,}; finish the run first.")
    if not run.processes:
        old = "an earlier version of vit_jax trained this run"
        raise UserError(f"{workdir} does not name the processes that trained it, since {old}; train it again.")
    later: dict[str, dict[str, str]] = {}
    for row in evaluations or []:
        check_evaluation(row, workdir, run.exported_step, config)
        later |= {key: evaluation for key, evaluation in row["evals"].items() if key not in config.evals}
        metrics |= {key: value for key, value in row.items() if "/" in key}
    kept = {key: value for key, value in metrics.items() if not key.startswith(UNRECORDED)}
    ledger = {str(category): round(spent, 1) for category, spent in total_seconds(run.starts).items() if spent}
    curve = [{"step": at} | row for at, metrics in run.metrics if (row := evaluated(metrics, config))]
    fields = without_folders(config.to_dict())
    return RunRecord(name, fields, step, kept, run.processes, without_folders(later), ledger, curve)


def evaluated(metrics: dict[str, float], config: ConfigDict) -> dict[str, float]:
    """Returns the finite metrics of a step that belong to an evaluation in `config.evals`."""
    return {
        key: value for key, value in metrics.items() if key.partition("/")[0] in config.evals and math.isfinite(value)
    }


def check_evaluation(row: dict[str, Any], workdir: str, step: int, config: ConfigDict) -> None:
    """Checks that an evaluation can be recorded with a run.

    Args:
        row: the JSON object that `vit_jax.evaluate --json` printed.
        workdir: the folder of the run, local or remote.
        step: the step of the run's exported weights.
        config: the configuration of the run.

    Raises:
        UserError: the evaluated weights are not those that the run exported, or an evaluation has the name of one in
            `config.evals` but other images or another preprocessing.
    """
    again = f"write it anew with python -m vit_jax.evaluate {workdir} --json > FILE"
    if not {"weights", "evals"} <= row.keys():
        old = "since an earlier version of vit_jax wrote it"
        raise UserError(f"an evaluation in --evaluations=FILE does not state its weights, {old}; {again}.")
    if row.get("step") != step:
        at_step = f"an evaluation in --evaluations=FILE is of step {row.get('step')}"
        raise UserError(f"{at_step}, but {workdir} exports step {step}; {again}.")
    best = config.stop_after is not None
    found = checkpoint.find_checkpoint(checkpoint.local_workdir(workdir, best), best)
    if found is None or int(found.name) != step:
        absent = f"{workdir} has no checkpoint of step {step}, by which --evaluations could be checked"
        raise UserError(f"{absent}; leave out --evaluations.")
    if row["weights"] != interop.digest_weights(found):
        other = f"an evaluation in --evaluations=FILE is not of the weights of {workdir} at step {step}"
        raise UserError(f"{other}; {again}.")
    own = without_folders(data.identify_evals(config))
    for name, evaluation in without_folders(row["evals"]).items():
        if changed := [field for field in own.get(name, ()) if own[name][field] != evaluation.get(field)]:
            stated, wanted = ({field: one.get(field) for field in changed} for one in (evaluation, own[name]))
            raise UserError(
                f"the evaluation {name} in --evaluations=FILE has {_as_words(stated)}, but the evaluation {name} of "
                f"the run has {_as_words(wanted)}; evaluate again under another name, as in "
                f"--evals=other={name}:FIELD=VALUE."
            )


def _as_words(fields: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def without_folders(value: Any) -> Any:
    """Returns a copy of nested fields in which absolute local paths are shortened to their last part.

    The place of the data on a machine is not part of a result.
    """
    if isinstance(value, dict):
        return {key: without_folders(inner) for key, inner in value.items()}
    return FOLDERS.sub("", value) if isinstance(value, str) else value


def write_record(record: RunRecord, folder: Path) -> Path:
    """Writes a record to `<folder>/<name>.json`, replacing an earlier record of that name, and returns the path.

    Raises:
        UserError: the file cannot be written.
    """
    path = folder / f"{record.name}.json"
    text = to_json(dataclasses.asdict(record), indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    filesystem.write_bytes(str(path), text.encode())
    return path


def read_records(folder: Path) -> dict[Path, RunRecord]:
    """Returns file -> record for all records in a folder and its subfolders, sorted by file.

    The records of `vit_jax.measure` in the subfolder `hardware` are left out.

    Raises:
        UserError: a file is not a record.
    """
    records = {}
    for path in sorted(set(folder.rglob("*.json")) - set((folder / HARDWARE).glob("*.json"))):
        try:
            records[path] = RunRecord(**json.loads(path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise UserError(f"cannot read {path}: it is not the record of a run; remove it.") from error
    return records
