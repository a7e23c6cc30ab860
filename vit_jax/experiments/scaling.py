"""Accuracy of any runs over the compute of pre-training or over a config field, as in the paper's Figure 5."""

import contextlib
import dataclasses
import functools
import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path

from vit_jax import UserError, choose, user_errors
from vit_jax.config import flatten_config, is_error, is_lowest_best
from vit_jax.experiments.run_record import read_records
from vit_jax.monitoring import RunFolder, find_runs, read_run
from vit_jax.planning import run_exaflops
from vit_jax.storage import filesystem
from vit_jax.text_tables import align

COMPUTE = "compute"  # the value of `ScalingPlot.against` that is not a field
BASE = "base"  # the name of the line whose points belong to all other lines


@dataclasses.dataclass(frozen=True)
class ScalingPlot:
    """A choice of what to plot.

    Attributes:
        metric: the metric on the vertical axis; None: the `checkpoint.best_metric` of each run.
        against: the config field on the horizontal axis, or `COMPUTE` for exaFLOPs of pre-training.
        stop: early stopping: `metric` is taken at the step where this metric is largest; None: at the last step.
    """

    metric: str | None = None
    against: str = COMPUTE
    stop: str | None = None


@dataclasses.dataclass(frozen=True)
class Point:
    """A point of the plot: the runs that differ in the seed only.

    Attributes:
        line: the name of the line that the point belongs to. It is the path of the runs within the given folder without
            its last part, as in a folder of several studies, and FIELD=VALUE for each of `fields_apart`. If there is
            neither, it is the family of the model.
        name: the name of the folder of the first run, without its seed if there are several runs.
        model: the name of the model.
        x_value: the position on the horizontal axis: exaFLOPs, or the value of a field.
        metric: the name of the metric on the vertical axis.
        mean: the mean of the metric over the runs.
        std: the standard deviation of the sample, with n - 1 in the denominator; None: there is a single run.
        runs: the number of runs.
        best: whether no point has a better mean; never against the compute, where the largest run is expected to win.
    """

    line: str
    name: str
    model: str
    x_value: float
    metric: str
    mean: float
    std: float | None
    runs: int
    best: bool = False


def read_points(folders: list[str], request: ScalingPlot) -> tuple[list[Point], list[str]]:
    """Returns the points of the runs or records in some folders, and why other runs have no point.

    Returns:
        The points, sorted by line and position, and a sentence for each run that cannot be plotted.

    Raises:
        UserError: a folder has no run, a field or a metric is unknown, or no run can be plotted.
    """
    studies: dict[str, list[tuple[RunFolder, float]]] = {}
    notes = []
    for folder in folders:
        top = filesystem.absolute_path(folder).rstrip("/")
        for location, read in find_readers(folder, request).items():
            try:
                run = read()
                value = measured(run, request)
            except UserError as error:
                notes.append(str(error))
                continue
            studies.setdefault(location[len(top) + 1 :].rpartition("/")[0], []).append((run, value))
    groups: dict[tuple[str, str], list[tuple[RunFolder, float]]] = {}
    for study, runs in studies.items():
        apart = fields_apart([run for run, _ in runs], request.against)
        for run, value in runs:
            words = [*filter(None, [study]), *(f"{field}={run.fields[field]}" for field in apart)]
            line = ", ".join(words) or family(run.config.model.name)
            groups.setdefault((line, repr(_without_seed(run))), []).append((run, value))
    points, lowest = [], set()
    for (line, _), runs in groups.items():
        try:
            points.append(make_point(line, runs, request))
            lowest.add(is_error(request.metric) if request.metric else is_lowest_best(runs[0][0].config))
        except UserError as error:
            notes.append(str(error))
    if not points:
        raise UserError(f"no run in {', '.join(folders)} can be plotted: {notes[-1]}")
    if request.against != COMPUTE and len({point.metric for point in points}) == len(lowest) == 1:
        best = (min if lowest == {True} else max)(point.mean for point in points)
        points = [dataclasses.replace(point, best=point.mean == best) for point in points]
    return sorted(points, key=lambda point: (point.line, point.x_value)), notes


def _without_seed(run: RunFolder) -> dict[str, str]:
    """Returns field -> value without the seed, also without that of the run whose weights a path names."""
    return {name: re.sub(r"\bseed=\d+", "", value) for name, value in run.fields.items() if name != "seed"}


def fields_apart(runs: list[RunFolder], against: str) -> list[str]:
    """Returns the fields, other than the seed, in which runs with the same value of the field `against` differ.

    Runs that differ in them are not points of one line. Fields that follow `against`, as the split follows the number
    of images, are not among them, nor those that follow others of them. Against the compute, there are none.
    """
    if against == COMPUTE:
        return []
    fields, apart = [_without_seed(run) for run in runs], [against]

    def count_parts(names: list[str]) -> int:
        return len({tuple(own.get(name) for name in names) for own in fields})

    for name in fields[0]:
        by_place: dict[str | None, set[str | None]] = {}
        for own in fields:
            by_place.setdefault(own.get(against), set()).add(own.get(name))
        if max(map(len, by_place.values())) > 1 and count_parts([*apart, name]) > count_parts(apart):
            apart.append(name)
    return apart[1:]


def read_speeds(file: str, points: list[Point]) -> dict[str, float]:
    """Returns model -> images per second of inference, from a file that `vit_jax.plan --inference --json` printed.

    Args:
        file: the path of the file.
        points: the points whose models must be in the file.

    Raises:
        UserError: the file cannot be read, lacks one of these models, or has two speeds for a model.
    """
    with user_errors(f"cannot read {file}"):
        lines = Path(file).read_text().splitlines()
    rows = []
    with contextlib.suppress(ValueError):  # the sentence below says what to do
        rows = [json.loads(line) for line in lines]
    known = [(row["model"], row["images_per_second"]) for row in rows if row.get("images_per_second")]
    speeds = dict(known)
    missing = sorted({point.model for point in points} - speeds.keys())
    if missing or len(known) > len(speeds):
        models = ",".join(missing or sorted(speeds))
        raise UserError(
            f"{file} must have one speed for each model; write it with python -m vit_jax.plan --inference --sizes=224 "
            f"--models={models} --topology=v5e:1x1 --json > {file}."
        )
    return speeds


def find_readers(folder: str, request: ScalingPlot) -> dict[str, Callable[[], RunFolder]]:
    """Returns location -> a function that reads the run there, for the runs in a folder or for the records in it.

    Args:
        folder: a folder of runs, local or remote, or a local folder of records such as results/.
        request: what to plot.

    Raises:
        UserError: the folder has neither runs nor records, or `request.stop` is set and a record has no curve.
    """
    try:
        return {location: functools.partial(read_run, location, name) for location, name in find_runs(folder).items()}
    except UserError:
        records = {}
        with contextlib.suppress(UserError):  # the folder has other JSON files
            records = {} if filesystem.is_remote(folder) else read_records(Path(filesystem.absolute_path(folder)))
        if not records:
            raise
        if request.stop and not all(record.curve for record in records.values()):
            raise UserError(f"the records in {folder} contain only the last step; leave out --stop.") from None
        records_by_location = {str(path.with_suffix("")): record for path, record in records.items()}
        return {
            location: functools.partial(record.as_run, location) for location, record in records_by_location.items()
        }


def make_point(line: str, runs: list[tuple[RunFolder, float]], request: ScalingPlot) -> Point:
    """Returns the point of some runs that differ in the seed only; raises what `find_place` raises.

    Args:
        line: the line that the point belongs to.
        runs: each run with the value of its metric.
        request: what to plot.
    """
    first, values = runs[0][0], [value for _, value in runs]
    config, name = first.config, first.location.rpartition("/")[2]
    return Point(
        line=line,
        name=re.sub(r",seed=\d+", "", name) if len(values) > 1 else name,
        model=config.model.name,
        x_value=find_x_value(first, request.against),
        metric=request.metric or config.checkpoint.best_metric,
        mean=statistics.mean(values),
        std=statistics.stdev(values) if len(values) > 1 else None,
        runs=len(values),
    )


def measured(run: RunFolder, request: ScalingPlot) -> float:
    """Returns the metric of a run at its last evaluation or, with `request.stop`, where that metric was largest.

    Raises:
        UserError: the run has not finished, or has no such metric.
    """
    if not run.is_complete:
        raise UserError(f"{run.location} is at step {run.step:,} of {run.config.total_steps:,}.")
    metric = request.metric or run.config.checkpoint.best_metric
    rows = [row | {"step": step} for step, row in run.metrics if math.isfinite(row.get(metric, math.nan))]
    stop = request.stop or "step"
    if not rows or not all(math.isfinite(row.get(stop, math.nan)) for row in rows):
        raise UserError(f"{run.location} has no metric {stop if rows else metric}.")
    return max(rows, key=lambda row: row[stop])[metric]


def find_x_value(run: RunFolder, against: str) -> float:
    """Returns the position of a run on the horizontal axis.

    The compute of a run that started from the weights of another run is that of pre-training: the exaFLOPs of that run
    and of those that it started from in turn, without its own. The compute of any other run is its own exaFLOPs.

    Args:
        run: the run.
        against: a config field, or `COMPUTE`.

    Raises:
        UserError: the field is unknown or is not a number, the weights that the run started from are not those of a
            run, or see `own_exaflops`.
    """
    if against != COMPUTE:
        fields = flatten_config(run.config)
        value = fields[choose("config field", against, fields)]
        if not isinstance(value, int | float):
            raise UserError(f"{run.location} has {against}={value}, which is not a number.")
        return float(value)
    own = 0.0 if run.config.init_from else own_exaflops(run)
    start = run.config.init_from
    while start:
        if not filesystem.exists(filesystem.join_path(start, "config.json")):
            raise UserError(
                f"the compute of {run.location} is unknown, since {start}, from which it started, is not the folder of "
                "a run; choose a field of the configuration with --against=FIELD."
            )
        before = read_run(start, "")
        own, start = own + own_exaflops(before), before.config.init_from
    return own


def own_exaflops(run: RunFolder) -> float:
    """Returns the exaFLOPs of a run, those of its teacher included.

    Raises:
        UserError: it has a teacher of which its processes state no size.
    """
    teacher_macs = [process["teacher_macs"] for process in run.processes if process.get("teacher_macs")]
    if run.config.task.teacher and not teacher_macs:
        raise UserError(
            f"the compute of {run.location} is unknown, since an earlier version of vit_jax trained it, which did not "
            "store the size of its teacher; choose a field of the configuration with --against=FIELD."
        )
    return run_exaflops(run.config, *teacher_macs[-1:])


def family(name: str) -> str:
    """Returns the family of a model as Figure 5 calls it: "Transformer (ViT)", "Hybrid" or "ResNet (BiT)"."""
    return (
        "ResNet (BiT)" if name.startswith(("BiT", "AxialResNet")) else "Hybrid" if "+" in name else "Transformer (ViT)"
    )


def lines_of(points: list[Point]) -> dict[str, list[Point]]:
    """Returns name of a line -> its points.

    If there are other lines than `base`, the points of `base` belong to each of them, and `base` is not a line itself.
    """
    names = list(dict.fromkeys(point.line for point in points))
    if len(names) > 1 and BASE in names:
        names.remove(BASE)
    return {name: [point for point in points if point.line in (name, BASE)] for name in names}


def are_lines(points: list[Point]) -> bool:
    """Returns whether the lines are named after studies, not after families of models."""
    return not {point.line for point in points} & {family(point.model) for point in points}


def format_points(points: list[Point], against: str) -> str:
    """Returns a table of the points as aligned text; `against` is the field on the horizontal axis, or `COMPUTE`."""
    head = "exaFLOPs" if against == COMPUTE else against
    rows = [
        (
            point.line,
            point.name,
            point.model,
            f"{point.x_value:.4g}",
            f"{point.mean:.4f}",
            "-" if point.std is None else f"{point.std:.4f}",
            f"{point.runs:,}",
            "best" if point.best else "",
        )
        for point in points
    ]
    return "\n".join(align([("", "", "", head, "mean", "std", "runs", ""), *rows], right=range(3, 7)))
