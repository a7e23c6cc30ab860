"""The parts of a report that are tables of runs side by side: how far they are, settings, environment."""

import datetime
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from vit_jax.analysis import html
from vit_jax.monitoring import RunFolder, format_value

FactLine = tuple[str, list[str]]  # a name and the value of each run; an empty one is unknown


def table_of(runs: Sequence[RunFolder], rows: Iterable[FactLine]) -> str:
    """Returns a table with a column for each run."""
    return html.columns([run.name for run in runs] if len(runs) > 1 else [], rows)


def summary(runs: Sequence[RunFolder]) -> str:
    """Returns how far the runs are and what they have reached."""
    return table_of(
        runs,
        [
            ("folder", [run.location for run in runs]),
            ("state", [describe_state(run) for run in runs]),
            ("model", [run.config.model.name for run in runs]),
            ("data", [f"{run.config.data.source} {run.config.data.split}" for run in runs]),
            *[(name, [format_best(run, name) for run in runs]) for name in best_metrics(runs)],
            ("not finite", [count_nonfinite(run) for run in runs]),
            ("time trained (h:min:s)", [format_time(sum(one["seconds"] for one in run.processes)) for run in runs]),
            ("resumed", [describe_restarts(run) for run in runs]),
        ],
    )


def describe_state(run: RunFolder) -> str:
    """Returns how many steps a run has made."""
    total, epochs = run.config.total_steps, run.step * run.config.batch / max(run.config.data.num_examples or 0, 1)
    passes = f", {epochs:.3g} epochs" if run.config.data.num_examples else ""
    return f"{'complete: ' if run.is_complete else ''}{run.step:,} of {total:,} steps{passes}"


def describe_restarts(run: RunFolder) -> str:
    """Returns after which steps a run was resumed."""
    steps = ", ".join(f"{process['first']:,}" for process in run.processes[1:])
    return f"after step {steps}" if steps else "never"


def best_metrics(runs: Sequence[RunFolder]) -> list[str]:
    """Returns the metrics by which the best checkpoints are kept, and the loss."""
    return list(dict.fromkeys([*(run.config.checkpoint.best_metric for run in runs), "train/loss"]))


def format_best(run: RunFolder, metric: str) -> str:
    """Returns the last and the best value of a metric as text: of a loss the lowest, of other metrics the highest.

    Values that are not finite are left out. The text is empty if none is left.
    """
    points = [(row[metric], step) for step, row in run.metrics if math.isfinite(row.get(metric, math.nan))]
    if not points:
        return ""
    value, best = points[-1][0], (min if metric.endswith("loss") else max)(points, key=lambda pair: pair[0])
    best_words = f", {'lowest' if metric.endswith('loss') else 'best'} {format_value(metric, best[0])} at {best[1]:,}"
    return f"{format_value(metric, value)} at step {points[-1][1]:,}{best_words}"


def count_nonfinite(run: RunFolder) -> str:
    """Returns which metrics were not finite, and in how many of their lines."""
    counts = Counter(name for _, row in run.metrics for name, value in row.items() if not math.isfinite(value))
    return ", ".join(f"{name} in {count:,} lines" for name, count in counts.items()) or "nothing"


def format_time(seconds: float) -> str:
    """Returns seconds as hours, minutes and seconds."""
    return f"{datetime.timedelta(seconds=round(seconds))}"


def configuration(runs: Sequence[RunFolder], defaults: dict[str, str]) -> str:
    """Returns the fields in which the runs differ, or in which a single run differs from the defaults, and all fields.

    Args:
        runs: the runs.
        defaults: dotted name of a field -> its default value as text.
    """
    names = dict.fromkeys(name for run in runs for name in run.fields)
    rows = [(name, [run.fields.get(name, "absent") for run in runs]) for name in names]
    if len(runs) > 1:
        title, chosen = "What differs", [(name, values) for name, values in rows if len(set(values)) > 1]
    else:
        title = "What differs from the defaults"
        chosen = [(name, values) for name, values in rows if values[0] != defaults.get(name, "unset")]
    differs = table_of(runs, chosen) if chosen else "<p>Nothing.</p>"
    everything = table_of(runs, rows)
    return f"<h3>{title}</h3>{differs}<details><summary>All {len(rows)} fields</summary>{everything}</details>"


def environment(runs: Sequence[RunFolder]) -> str:
    """Returns the processes that trained the runs: when, on what, with which code."""
    head = ("run", "steps", "time (h:min:s)", "hardware", "vit_jax", "commit", "jax", "Python")
    lines = [
        (
            run.name,
            f"{process['first']:,} to {process['last']:,}",
            format_time(process["seconds"]),
            process["hardware"],
            *(process.get(name) or "" for name in ("vit_jax", "commit", "jax", "python")),
        )
        for run in runs
        for process in run.processes
    ]
    if not lines:
        return "<p>No process has saved a checkpoint yet.</p>"
    words = "Each process that trained, up to its last save; steps after that were made again by the next."
    return f'<p>{words}</p><div class="wide">{html.table(lines, head)}</div>'
