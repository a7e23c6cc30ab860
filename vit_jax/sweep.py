"""Trains with every combination of the values of some fields, one after the other, and reports which is best.

Example:
  python -m vit_jax.sweep --config=configs/digits.py --sweep.base_lr=0.0005,0.002 --config.total_epochs=5

  --config   as for vit_jax.main; likewise --config.KEY=VALUE
  --sweep.KEY=VALUE,VALUE,...   values of a field to try; with several fields, all their combinations
  --workdir  folder of the sweep, local, gs:// or s3:// [workdirs/<config name>]; each combination trains in a folder
             inside it
  --json     print one JSON object, the same as in sweep.json in the workdir

The same command continues where it was stopped: combinations that have finished or diverged are not run again. The best
one has the largest checkpoint.best_metric at the end: with --sweep.seed=0,1,2 the largest mean over the seeds, which is
printed with the standard deviation. The exit codes are those of vit_jax.main.
"""

import dataclasses
import gc
import itertools
import json
import math
import posixpath
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from ml_collections import ConfigDict

from vit_jax import NonFiniteLoss, UserError, cli, data, train
from vit_jax.config_flags import parse_command_line
from vit_jax.distributed import Supervisor
from vit_jax.program import prepare
from vit_jax.results import fields_as_text, read_run
from vit_jax.storage import check_workdir, filesystem

RESULT_FILE = "sweep.json"  # one in the folder of each finished combination, and one of all in that of the sweep
FieldValues = dict[str, list[str]]  # field -> its values, as written


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


@dataclasses.dataclass(frozen=True)
class Combination:
    """One value of each field that is varied.

    Attributes:
        name: see `Outcome`.
        words: the flags of `vit_jax.main` that train with it.
        config: its configuration.
        folder: in which it trains.
    """

    name: str
    words: list[str]
    config: ConfigDict
    folder: str


@dataclasses.dataclass(frozen=True)
class Average:
    """The metric at the end over the seeds of a combination of the other fields.

    Attributes:
        name: that of the outcomes without the seed; empty: nothing but the seed was varied.
        mean: of the outcomes; None: at least one diverged.
        std: of the sample, with n - 1 in the denominator (the paper does not state which); None: there is no mean, or
            only one seed.
        runs: number of outcomes.
    """

    name: str
    mean: float | None
    std: float | None
    runs: int


@dataclasses.dataclass(frozen=True)
class SweepReport:
    """What a sweep prints and writes.

    Attributes:
        metric: the name of the metric that is compared.
        runs: the outcomes, best first.
        averages: over the seeds, best first.
        best: the name of the best of them.
        workdir: its folder; with several seeds, that of the first.
        command: that trains with it on the whole training split; None: no part of the split was held out.
    """

    metric: str
    runs: list[Outcome]
    averages: list[Average]
    best: str
    workdir: str
    command: str | None


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
        print(f"[{number}/{len(combinations)}] {combination.name}{note}", file=sys.stderr, flush=True)
        outcomes.append(train_combination(combination, supervisor) if outcome is None else outcome)
    return sorted(outcomes, key=lambda outcome: (outcome.last is None, -(outcome.last or 0.0)))


def read_outcome(combination: Combination) -> Outcome | None:
    """Returns the outcome that `train_combination` wrote, or None if it has not finished.

    Raises:
        UserError: the configuration is wrong; the folder holds a run of another configuration or an invalid file; or it
            is remote, and the store refuses or does not answer.
    """
    config, _, _ = prepare(combination.config)
    begun, result = (filesystem.join_path(combination.folder, name) for name in ("config.json", RESULT_FILE))
    if not filesystem.exists(begun):
        return None
    saved = read_run(combination.folder, combination.name).config
    old, new = (_comparable_fields(each) for each in (saved, config))
    if differ := [key for key in new if old.get(key) != new[key]]:
        raise UserError(
            f"{combination.folder} contains a run with other values of {', '.join(differ)}; choose another --workdir."
        )
    return _parse_outcome(combination, result) if filesystem.exists(result) else None


def _comparable_fields(config: ConfigDict) -> dict[str, Any]:
    """Returns the fields by name, those of evaluations' preprocessing with the resolution filled in.

    The same preprocessing may be written in several ways.
    """
    told = data.describe_evals(config)
    return fields_as_text(config) | {f"evals.{name}.preprocess": fields["preprocess"] for name, fields in told.items()}


def _parse_outcome(combination: Combination, path: str) -> Outcome:
    number = int | float
    kinds = {"name": str, "last": number | None, "best": number | None, "steps": int, "seconds": number}
    try:
        fields = json.loads(filesystem.read_bytes(path))
    except ValueError:
        fields = None
    valid = isinstance(fields, dict) and fields.keys() == kinds.keys()
    if not valid or not all(isinstance(fields[key], kind) for key, kind in kinds.items()):
        raise _invalid(path)
    if fields["name"] != combination.name:
        raise _invalid(path)
    return Outcome(**fields)


def _invalid(path: str) -> UserError:
    return UserError(f"cannot read {path}: a sweep did not write it; remove it, or choose another --workdir.")


def train_combination(combination: Combination, supervisor: Supervisor | None = None) -> Outcome:
    """Trains a combination from its last checkpoint on, and writes the outcome to its folder."""
    gc.collect()  # frees the arrays that the run before left on the devices
    metric, start = combination.config.checkpoint.best_metric, time.monotonic()
    try:
        last = train.train(combination.config, combination.folder, supervisor=supervisor)[metric]
    except NonFiniteLoss as error:
        print(f"{combination.name}: {error}", file=sys.stderr, flush=True)
        last = None
    run = read_run(combination.folder, combination.name)
    found = [row[metric] for _, row in run.metrics if math.isfinite(row.get(metric, math.nan))]
    best, steps = max(found, default=last), run.step
    outcome = Outcome(combination.name, last, best, steps, round(time.monotonic() - start, 1))
    if jax.process_index() == 0:
        text = json.dumps(dataclasses.asdict(outcome)) + "\n"
        filesystem.write_bytes(filesystem.join_path(combination.folder, RESULT_FILE), text.encode())
    return outcome


def list_combinations(argv: list[str]) -> list[Combination]:
    """Returns the combinations that a command line asks for; equal configurations, such as of 0.1 and 1e-1, count once.

    Raises:
        UserError: no field or an unknown field is varied, one is varied twice, two combinations would share a folder,
            the workdir cannot be written to, or see `vit_jax.config_flags.parse_command_line`.
    """
    words = [word for word in argv if not word.startswith("--sweep.") and word != "--json"]
    values_by_field = _parse_values(argv, words)
    found: dict[str, Combination] = {}
    for values in itertools.product(*values_by_field.values()):
        pairs = [f"{key}={value}" for key, value in zip(values_by_field, values, strict=True)]
        given = [*words, *(f"--config.{pair}" for pair in pairs)]
        config, workdir = parse_command_line(given)
        name = ",".join(sorted(pairs))
        folder = filesystem.join_path(check_workdir(workdir), re.sub(r"[^\w.,=+-]", "_", name))
        if any(other.config == config for other in found.values()):
            continue
        if folder in found:
            raise UserError(
                f"{found[folder].name} and {name} would both use {folder}; run them as two sweeps with different "
                "--workdir."
            )
        found[folder] = Combination(name, given[1:], config, folder)
    return list(found.values())


def _parse_values(argv: list[str], words: list[str]) -> FieldValues:
    given: FieldValues = {}
    for word in argv:
        if word.startswith("--sweep."):
            key, _, values = word.removeprefix("--sweep.").partition("=")
            if not all(values.split(",")):
                raise UserError(f"{word} gives no values; write --sweep.base_lr=0.003,0.01.")
            if key in given or any(other.startswith(f"--config.{key}=") for other in words):
                raise UserError(f"{key} is given twice; write all its values in one --sweep.{key}=VALUE,VALUE.")
            given[key] = list(dict.fromkeys(values.split(",")))
    if not given:
        raise UserError("add --sweep.KEY=VALUE,VALUE, the values to try, for example --sweep.base_lr=0.003,0.01.")
    return given


def full_split_words(combination: Combination) -> list[str] | None:
    """Returns the flags that train with a combination on the whole training split, without a workdir.

    Returns None unless split=dev in the argument of the config held a part of the split out.
    """
    words = [word for word in combination.words if not word.startswith("--workdir=")]
    whole = [re.sub(r"^(--config=.*)\bsplit=dev\b", r"\1split=full", word) for word in words]
    return None if whole == words else whole


def full_split_command(combination: Combination, seeds: Sequence[int] = ()) -> str | None:
    """Returns the command for `full_split_words`; with `seeds`, it trains with each of them."""
    words, module = full_split_words(combination), "main"
    if words is None:
        return None
    if seeds:
        words, module = [*without_seed(words), f"--sweep.seed={','.join(map(str, seeds))}"], "sweep"
    workdir = f"--workdir={filesystem.join_path(posixpath.dirname(combination.folder), 'full')}"
    return f"python -m vit_jax.{module} {shlex.join([*words, workdir])}"


def without_seed(words: list[str]) -> list[str]:
    """Returns the flags without that of the seed."""
    return [word for word in words if not word.startswith("--config.seed=")]


def average_name(name: str) -> str:
    """Returns the name of a combination without the seed."""
    return ",".join(pair for pair in name.split(",") if not pair.startswith("seed="))


def average_seeds(outcomes: list[Outcome]) -> list[Average]:
    """Returns mean and standard deviation over the seeds, best first."""
    groups: dict[str, list[float | None]] = {}
    for outcome in outcomes:
        groups.setdefault(average_name(outcome.name), []).append(outcome.last)
    averages = []
    for name, values in groups.items():
        whole = [value for value in values if value is not None]
        complete = len(whole) == len(values)
        mean = statistics.mean(whole) if complete else None
        std = statistics.stdev(whole) if complete and len(whole) > 1 else None
        averages.append(Average(name, mean, std, len(values)))
    return sorted(averages, key=lambda average: (average.mean is None, -(average.mean or 0.0)))


def best_combinations(averages: list[Average], combinations: list[Combination]) -> list[Combination]:
    """Returns the combination with the largest mean, once with each seed."""
    return [combination for combination in combinations if average_name(combination.name) == averages[0].name]


def make_report(outcomes: list[Outcome], combinations: list[Combination]) -> SweepReport:
    """Returns the report of a sweep, whose outcomes are given best first."""
    averages = average_seeds(outcomes)
    first, *others = best = best_combinations(averages, combinations)
    command = full_split_command(first, [one.config.seed for one in best] if others else [])
    return SweepReport(first.config.checkpoint.best_metric, outcomes, averages, averages[0].name, first.folder, command)


def format_averages(averages: list[Average]) -> str:
    """Returns a line for each mean over several seeds; nothing if there is none."""
    if not any(average.runs > 1 for average in averages):
        return ""
    width = max(len(average.name) for average in averages)
    lines = ["\n", f"{'':{width}}  {'mean':>10}  {'std':>8}  {'seeds':>7}"]
    for average in averages:
        mean, std = ("-" if value is None else f"{value:.4f}" for value in (average.mean, average.std))
        mean = "diverged" if average.mean is None else mean
        lines.append(f"{average.name:{width}}  {mean:>10}  {std:>8}  {average.runs:>7,}")
    return "\n".join(lines)


def format_table(outcomes: list[Outcome]) -> str:
    """Returns a line for each outcome."""
    width = max(len(outcome.name) for outcome in outcomes)
    lines = [f"{'':{width}}  {'at the end':>10}  {'best':>8}  {'steps':>7}  {'seconds':>9}"]
    for outcome in outcomes:
        last, best = ("-" if value is None else f"{value:.4f}" for value in (outcome.last, outcome.best))
        last = "diverged" if outcome.last is None else last
        lines.append(f"{outcome.name:{width}}  {last:>10}  {best:>8}  {outcome.steps:>7,}  {outcome.seconds:>9,.1f}")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `list_combinations` and `train_combinations`.
        NonFiniteLoss: every combination diverged.
    """
    if {"--help", "-h"} & set(argv[1:]):
        print(__doc__)
        return
    combinations = list_combinations(argv)
    with cli.supervised() as supervisor:
        outcomes = train_combinations(combinations, supervisor)
    report = make_report(outcomes, combinations)
    if jax.process_index() == 0:
        fields = dataclasses.asdict(report)
        path = filesystem.join_path(posixpath.dirname(combinations[0].folder), RESULT_FILE)
        filesystem.write_bytes(path, (json.dumps(fields, indent=2) + "\n").encode())
        text = f"{report.metric}\n{format_table(outcomes)}{format_averages(report.averages)}"
        print(json.dumps(fields) if "--json" in argv else text)
    if report.averages[0].mean is None:
        raise NonFiniteLoss("every combination diverged; try lower learning rates, or set grad_norm_clip.")
    if jax.process_index() == 0 and "--json" not in argv:
        if report.best:  # more than the seed was varied
            print(f"Best: {report.best}, in {report.workdir}")
        if report.command:
            print(f"On the whole training split: {report.command}")


if __name__ == "__main__":
    cli.run(main, again=cli.AGAIN)
