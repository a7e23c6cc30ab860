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
from vit_jax.analysis.curves import Curve, Plot, colours_of, draw_plots
from vit_jax.analysis.run_checkpoints import checkpoints_part
from vit_jax.analysis.run_mistakes import mistakes_part
from vit_jax.config import is_error, is_lowest_best
from vit_jax.monitoring import RunFolder, format_value

# The browser fetches nothing, whatever the scripts in the page would like to.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

# The plots are drawn for light screens; a dark one gets them inverted, with the hues that they had.
STYLE = """
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1.5rem 2rem }
.plots figure { min-width: 0 } .wide { overflow-x: auto } .wide .number { min-width: 0 }
th { overflow-wrap: normal } h4, h5 { font-size: .95rem; margin: 1.2rem 0 .4rem }
.key > span { display: inline-block; margin-right: 1.2rem }
h3.run { font-size: 1.15rem; margin-top: 2rem; border-top: 1px solid var(--line); padding-top: .6rem }
code { overflow-wrap: anywhere }
.matrix td { text-align: right; padding: .15rem .5rem; min-width: 1.8rem; font-variant-numeric: tabular-nums;
  background: color-mix(in srgb, var(--bar) calc(var(--share, 0%) * var(--darkest)), transparent) }
.matrix thead th { vertical-align: bottom; padding: .15rem .3rem } .matrix tbody th { padding-right: .6rem }
.matrix thead span { writing-mode: vertical-rl; rotate: 180deg }
.row.large { grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)) }
@media (prefers-color-scheme: dark) { .plot { filter: invert(.93) hue-rotate(180deg) } }
"""

COLUMNS = 6  # for which a page of 1,280 pixels has room, beside the names of the lines

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

    If the part of a run raises UserError, its message stands in the place of the part. What is the same for all runs is
    said once.
    """
    texts = []
    for run in runs:
        try:
            texts.append(part(run))
        except UserError as error:
            texts.append(f"<p>{escape(printable(error))}</p>")
    if len(runs) == 1:
        return f"<section>{texts[0]}</section>"
    alike = {text.replace(escape(printable(run.location)), "RUN") for run, text in zip(runs, texts, strict=True)}
    if len(alike) == 1:  # such as that something is missing
        [text] = alike
        words = f"All {len(runs)} runs, with the folder of each in place of RUN:"
        return f"<section><p>{words if 'RUN' in text else words.partition(',')[0] + ':'}</p>{text}</section>"
    # The headings are one level below the name of the run.
    texts = [re.sub(r"(</?h)([345])\b", lambda tag: f"{tag[1]}{int(tag[2]) + 1}", text) for text in texts]
    sections = zip(labels_of(runs), texts, strict=True)
    return "".join(f'<section><h3 class="run">{label}</h3>{text}</section>' for label, text in sections)


def curves_part(plots: Sequence[Plot], runs: Sequence[RunFolder]) -> str:
    """Returns the plots, each with its numbers as a table."""
    if not plots:
        return "<p>No metrics have been logged yet.</p>"
    words = (
        "What is selected in one plot is shown in all; the arrow in a circle shows the whole again. Vertical lines: a "
        "run was resumed there from a checkpoint. A gap is a value that is not finite. Of long curves the lowest and "
        "the highest value of each small stretch are drawn. Equal curves share a line: their colours take turns."
    )
    figures = "".join(plot_figure(plot, runs) for plot in plots)
    return f'<p>{words}</p>{colour_key(runs)}<div class="plots">{figures}</div>'


def colour_key(runs: Sequence[RunFolder]) -> str:
    """Returns the key of the colours that stand for runs; empty if there is only one run."""
    keys = " ".join(f"<span>{label}</span>" for label in labels_of(runs))
    return f'<p class="key">{keys}</p>' if len(runs) > 1 else ""


def labels_of(runs: Sequence[RunFolder]) -> list[html.Html]:
    """Returns the name of each run beside the colour of its curves; of a single run, the name alone.

    Names are those in the folder that all runs are in.
    """
    if len(runs) == 1:
        return [html.Html(escape(printable(runs[0].name)))]
    squares = [f'<span class="plot" style="color: {colour}">&#9632;</span>&nbsp;' for colour in colours_of(len(runs))]
    names = [escape(printable(name)).replace(",", ",<wbr>") for name in short_names(runs)]  # a line may end there
    return [html.Html(square + name) for square, name in zip(squares, names, strict=True)]


def short_names(runs: Sequence[RunFolder]) -> list[str]:
    """Returns the names of several runs without the folders that begin all of them."""
    parts = [run.name.split("/") for run in runs]
    levels = zip(*(one[:-1] for one in parts), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda names: len(set(names)) == 1, levels))
    return ["/".join(one[shared:]) for one in parts]


def plot_figure(plot: Plot, runs: Sequence[RunFolder]) -> str:
    """Returns a plot, with the numbers for readers who do not see it."""
    panel = plot.panel
    lines = [curve_line(curve, runs) for curve in plot.curves]
    table = html.table(lines, ("", "last", "lowest", "highest", "points"), numbers=range(1, 5))
    many = len(plot.dashes) > 1
    dashes = ", ".join(f"{metric} {dash}" if many else metric for metric, dash in plot.dashes.items())
    dashes = f'<div class="faint">{escape(printable(dashes))}</div>' if dashes else ""
    equal = "".join(f'<div class="faint">{line}</div>' for line in describe_equal(plot.equal, runs))
    text = escape(f"{panel.title}: {panel.unit} over steps, {len(plot.curves)} curves")
    return (
        f'<figure><h3>{panel.title}</h3>{dashes}<div class="plot" role="img" aria-label="{text}">{plot.div}</div>'
        f'{equal}<details><summary>{panel.title} in numbers</summary><div class="wide">{table}</div></details></figure>'
    )


def describe_equal(groups: Sequence[Sequence[Curve]], runs: Sequence[RunFolder]) -> list[str]:
    """Returns which curves are drawn as one line of alternating colours, as HTML: a line for each set of runs."""
    metrics_by_names: dict[str, list[str]] = {}
    for group in groups:
        metrics = list(dict.fromkeys(curve.metric for curve in group))
        numbers = [curve.run for curve in group]
        if len(metrics) > 1:
            names = ", ".join(curve_label(curve, runs) for curve in group)
        elif numbers == list(range(len(runs))):
            names = f"all {len(runs)} runs"
        else:
            names = ", ".join(labels_of(runs)[number] for number in numbers)
        metrics_by_names.setdefault(names, []).extend(metrics if len(metrics) == 1 else [])
    ends = [escape(printable(f" ({', '.join(metrics)})")) if metrics else "" for metrics in metrics_by_names.values()]
    return [f"Equal, in turns: {names}{end}" for names, end in zip(metrics_by_names, ends, strict=True)]


def curve_label(curve: Curve, runs: Sequence[RunFolder]) -> html.Html:
    """Returns the name of a curve: its metric and, among several runs, that of its run beside its colour."""
    metric = escape(printable(curve.metric))
    return html.Html(f"{labels_of(runs)[curve.run]}: {metric}" if len(runs) > 1 else metric)


def curve_line(curve: Curve, runs: Sequence[RunFolder]) -> list[str]:
    """Returns the cells of a curve in the table of its plot: name, last, lowest, highest value, number of points."""
    finite = curve.values[np.isfinite(curve.values)]
    numbers = [finite[-1], finite.min(), finite.max()] if len(finite) else []
    return [
        curve_label(curve, runs),
        *(f"{number:.5g}" for number in numbers),
        *[""] * (3 - len(numbers)),
        f"{len(curve.values):,}",
    ]


def table_of(runs: Sequence[RunFolder], rows: Iterable[FactLine]) -> str:
    """Returns the facts of runs as tables that a page of 1,280 pixels has room for.

    What all runs share is said once. What differs has a line for each run if there are more runs than facts, and
    otherwise a column for each.
    """
    if len(runs) == 1:
        return html.columns([], rows)
    facts, labels = list(rows), labels_of(runs)
    shared = [(name, values[:1]) for name, values in facts if len(set(values)) == 1]
    own = [(name, values) for name, values in facts if len(set(values)) > 1]
    tables = [html.columns([f"all {len(runs)} runs"], shared)] if shared else []
    if own and len(own) <= COLUMNS and len(own) < len(runs):
        lines = [(label, *(values[place] for _, values in own)) for place, label in enumerate(labels)]
        tables.append(f'<div class="wide">{html.table(lines, ("", *(name for name, _ in own)))}</div>')
    elif own:
        for first in range(0, len(runs), COLUMNS):
            part = slice(first, first + COLUMNS)
            tables.append(html.columns(labels[part], [(name, values[part]) for name, values in own]))
    return "".join(tables)


def summary(runs: Sequence[RunFolder]) -> str:
    """Returns how far the runs are and what they have reached."""
    return table_of(
        runs,
        [
            ("folder", folders_of(runs)),
            ("state", [describe_state(run) for run in runs]),
            ("model", [run.config.model.name for run in runs]),
            ("data", [f"{run.config.data.source} {run.config.data.split}" for run in runs]),
            *[(name, [format_best(run, name) for run in runs]) for name in best_metrics(runs)],
            ("not finite", [count_nonfinite(run) for run in runs]),
            ("time trained (h:min:s)", [format_time(sum(one["seconds"] for one in run.processes)) for run in runs]),
            ("resumed", [describe_restarts(run) for run in runs]),
        ],
    )


def folders_of(runs: Sequence[RunFolder]) -> list[str]:
    """Returns the folder of each run; of several, the one that they are in, if they are named after their folders."""
    ends = [f"/{name}" for name in short_names(runs)]
    named = len(runs) > 1 and all(run.location.endswith(end) for run, end in zip(runs, ends, strict=True))
    return [run.location.removesuffix(end) if named else run.location for run, end in zip(runs, ends, strict=True)]


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
            label,
            f"{process['first']:,} to {process['last']:,}",
            format_time(process["seconds"]),
            process["hardware"],
            *(process.get(name) or "" for name in ("vit_jax", "commit", "jax", "python")),
        )
        for label, run in zip(labels_of(runs), runs, strict=True)
        for process in run.processes
    ]
    if not lines:
        return "<p>No process has saved a checkpoint yet.</p>"
    words = "Each process that trained, up to its last save; steps after that were made again by the next."
    columns = dict(zip(head, zip(*lines, strict=True), strict=True))
    shared = [(name, list(map(str, cells[:1]))) for name, cells in columns.items() if len(lines) > 1 == len(set(cells))]
    own = [name for name in head if name not in dict(shared)]
    said_once = html.columns(["all processes"], shared) if shared else ""
    table = html.table(list(zip(*(columns[name] for name in own), strict=True)), own)
    return f'<p>{words}</p>{said_once}<div class="wide">{table}</div>'
