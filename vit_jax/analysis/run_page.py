"""The page of a run, or of several beside each other: HTML that needs no other file and no network."""

import datetime
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape

import numpy as np

from vit_jax import UserError, printable
from vit_jax.analysis import html, run_cost
from vit_jax.analysis.curves import COLOURS, Curve, Plot, draw_plots
from vit_jax.analysis.run_checkpoints import checkpoints_part
from vit_jax.analysis.run_mistakes import mistakes_part
from vit_jax.config import is_error, is_lowest_best
from vit_jax.monitoring import RunFolder, format_value

# The browser fetches nothing, whatever the scripts in the page would like to.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

# The plots are drawn for light screens; a dark one gets them inverted, with the hues that they had.
STYLE = """
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1.5rem 2rem }
.plots figure { min-width: 0 } .wide { overflow-x: auto }
th { overflow-wrap: normal } h4, h5 { font-size: .95rem; margin: 1.2rem 0 .4rem } .key > span { margin-right: 1.2rem }
h3.run { font-size: 1.15rem; margin-top: 2rem; border-top: 1px solid var(--line); padding-top: .6rem }
code { overflow-wrap: anywhere }
.matrix td { text-align: right; padding: .15rem .5rem; min-width: 1.8rem; font-variant-numeric: tabular-nums;
  background: color-mix(in srgb, var(--bar) calc(var(--share, 0%) * var(--darkest)), transparent) }
.matrix thead th { vertical-align: bottom; padding: .15rem .3rem } .matrix tbody th { padding-right: .6rem }
.matrix thead span { writing-mode: vertical-rl; rotate: 180deg }
.row.large { grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)) }
@media (prefers-color-scheme: dark) { .plot { filter: invert(.93) hue-rotate(180deg) } }
"""

FactLine = tuple[str, list[str]]  # a name and the value of each run; an empty one is unknown


def run_page(runs: Sequence[RunFolder], defaults: dict[str, str]) -> str:
    """Returns the HTML page of runs.

    Args:
        runs: one or more runs.
        defaults: dotted name of a field -> its default value as text. If there is only one run, the fields that differ
            from the defaults are shown.
    """
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    plots, script, head = draw_plots(runs)
    parts = [
        f"<h1>{escape(printable(title))}</h1>",
        summary(runs),
        "<h2>Curves</h2>",
        curves_part(plots, runs),
        f"<h2>Predictions</h2>{render_each_run(runs, mistakes_part)}",
        f"<h2>Filters and positions over time</h2>{render_each_run(runs, checkpoints_part)}",
        f"<h2>Time</h2><p>{run_cost.TIME_WORDS}</p>{render_each_run(runs, run_cost.time_part)}",
        f"<h2>Cost</h2><p>{run_cost.COST_WORDS}</p>{render_each_run(runs, run_cost.cost_part)}",
        f"<h2>Configuration</h2>{configuration(runs, defaults)}",
        f"<h2>Environment</h2>{environment(runs)}",
        script,
    ]
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    return html.document(title, "\n".join(parts), f"{policy}<style>{STYLE}</style>{head}")


def render_each_run(runs: Sequence[RunFolder], part: Callable[[RunFolder], str]) -> str:
    """Returns a part of the page for each run.

    If the part of a run raises UserError, its message stands in the place of the part.
    """
    sections = []
    for run in runs:
        try:
            text = part(run)
        except UserError as error:
            text = f"<p>{escape(printable(error))}</p>"
        if len(runs) > 1:  # its headings are one level below the name of the run
            text = re.sub(r"(</?h)([345])\b", lambda tag: f"{tag[1]}{int(tag[2]) + 1}", text)
            text = f'<h3 class="run">{escape(printable(run.name))}</h3>{text}'
        sections.append(f"<section>{text}</section>")
    return "".join(sections)


def curves_part(plots: Sequence[Plot], runs: Sequence[RunFolder]) -> str:
    """Returns the plots, each with its numbers as a table."""
    if not plots:
        return "<p>No metrics have been logged yet.</p>"
    words = (
        "What is selected in one plot is shown in all; the arrow in a circle shows the whole again. Vertical lines: a "
        "run was resumed there from a checkpoint. A gap is a value that is not finite. Of long curves the lowest and "
        "the highest value of each small stretch are drawn."
    )
    figures = "".join(plot_figure(plot, runs) for plot in plots)
    return f'<p>{words}</p>{colour_key(runs)}<div class="plots">{figures}</div>'


def colour_key(runs: Sequence[RunFolder]) -> str:
    """Returns the key of the colours that stand for runs; empty if there is only one run."""
    keys = [
        f'<span><span class="plot" style="color: {colour}">&#9632;</span> {escape(printable(run.name))}</span>'
        for run, colour in zip(runs, itertools.cycle(COLOURS), strict=False)
    ]
    return f'<p class="key">{" ".join(keys)}</p>' if len(runs) > 1 else ""


def plot_figure(plot: Plot, runs: Sequence[RunFolder]) -> str:
    """Returns a plot, with the numbers for readers who do not see it."""
    panel = plot.panel
    lines = [curve_line(curve, runs) for curve in plot.curves]
    table = html.table(lines, ("", "last", "lowest", "highest", "points"), numbers=range(1, 5))
    many = len(plot.dashes) > 1
    dashes = ", ".join(f"{metric} {dash}" if many else metric for metric, dash in plot.dashes.items())
    dashes = f'<div class="faint">{escape(printable(dashes))}</div>' if dashes else ""
    text = escape(f"{panel.title}: {panel.unit} over steps, {len(plot.curves)} curves")
    return (
        f'<figure><h3>{panel.title}</h3>{dashes}<div class="plot" role="img" aria-label="{text}">{plot.div}</div>'
        f'<details><summary>{panel.title} in numbers</summary><div class="wide">{table}</div></details></figure>'
    )


def curve_line(curve: Curve, runs: Sequence[RunFolder]) -> list[str]:
    """Returns the cells of a curve in the table of its plot: name, last, lowest, highest value, number of points."""
    finite = curve.values[np.isfinite(curve.values)]
    numbers = [finite[-1], finite.min(), finite.max()] if len(finite) else []
    name = f"{runs[curve.run].name}: {curve.metric}" if len(runs) > 1 else curve.metric
    return [name, *(f"{number:.5g}" for number in numbers), *[""] * (3 - len(numbers)), f"{len(curve.values):,}"]


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
    """Returns the last and the best value of a metric as text: of losses and errors the lowest, of others the highest.

    Values that are not finite are left out. The text is empty if none is left.
    """
    points = [(row[metric], step) for step, row in run.metrics if math.isfinite(row.get(metric, math.nan))]
    if not points:
        return ""
    lowest = is_lowest_best(run.config) if metric == run.config.checkpoint.best_metric else is_error(metric)
    value, best = points[-1][0], (min if lowest else max)(points, key=lambda pair: pair[0])
    best_words = f", {'lowest' if lowest else 'best'} {format_value(metric, best[0])} at {best[1]:,}"
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
