"""Curves of the metrics of runs, drawn by the reader's browser. Only this file uses bokeh.

The page contains bokeh's script, so that it needs no network.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from vit_jax.analysis.colours import CURVE_COLOURS, GREY
from vit_jax.monitoring import RunFolder

try:
    from bokeh.embed import components
    from bokeh.models import GlyphRenderer, HoverTool, Legend, NumeralTickFormatter, PrintfTickFormatter, Range1d
    from bokeh.palettes import viridis
    from bokeh.plotting import figure
    from bokeh.resources import Resources
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("reports need bokeh: pip install -e '.[plot]'", name=error.name) from error

BUCKETS = 1000  # groups of points in a long curve, see `thin_out`
TOP = ("top5", "top5_all")
MAX_DOTTED_POINTS = 40  # points up to which each has a dot
ALTERNATION = 10  # pixels that equal curves have in turn
DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")


@dataclasses.dataclass(frozen=True)
class Panel:
    """The metrics that are drawn in one plot.

    Attributes:
        title: the heading of the plot.
        unit: the label of the vertical axis.
        metrics: a regular expression that the names of the metrics contain.
        factor: the factor by which the values are multiplied.
        scale: the scale of the vertical axis, linear or log.
    """

    title: str
    unit: str
    metrics: str
    factor: float = 1.0
    scale: str = "linear"


# A metric belongs to the first panel whose pattern it matches.
PANELS = (
    Panel("Loss", "loss (nats)", r"/loss$"),
    Panel("Accuracy", "accuracy (%)", r"(accuracy|top5|accuracy_all|top5_all)$|/\d+(shot|nn)(_l2_[\d.]+)?$", 100),
    Panel("Learning rate", "learning rate", r"^train/lr$"),
    Panel("Norms", "L2 norm", r"^norm/", scale="log"),
    Panel("Speed", "images a second", r"^train/images_per_sec$"),
    Panel("Waiting for data", "share of the time (%)", r"^perf/data_wait$", 100),
    Panel("Other measures", "value", r"(?<!/n)(?<!_std)(?<!_per_chip)$"),
)


@dataclasses.dataclass(frozen=True)
class Curve:
    """A metric of a run over its steps; NaN where it is not finite.

    Attributes:
        run: the number of the run on the page, from 0.
        metric: the name of the metric.
        steps: the steps of the values.
        values: the values in the unit of the panel.
    """

    run: int
    metric: str
    steps: Int[np.ndarray, " n"]
    values: Float[np.ndarray, " n"]


@dataclasses.dataclass(frozen=True)
class Plot:
    """A panel with its curves.

    Attributes:
        panel: the panel.
        curves: its curves, with all their points.
        div: the HTML element in which the browser draws it.
        dashes: metric -> how its lines are dashed. Empty if there is only one run: then colours stand for metrics.
        equal: groups of curves that lie on each other; they are drawn as one line of alternating colours.
    """

    panel: Panel
    curves: list[Curve]
    div: str
    dashes: dict[str, str]
    equal: list[list[Curve]]


def colours_of(count: int) -> list[str]:
    """Returns colours of so many runs: if they are many, of their order, from dark to light."""
    return list(CURVE_COLOURS[:count]) if count <= len(CURVE_COLOURS) else list(viridis(count + count // 5))[:count]


def find_equal(curves: Sequence[Curve]) -> list[list[Curve]]:
    """Returns the groups of curves that nobody could tell apart if they were drawn on each other."""
    groups: list[list[Curve]] = []
    for curve in curves:
        for group in groups:
            same_steps = np.array_equal(curve.steps, group[0].steps)
            if same_steps and np.allclose(curve.values, group[0].values, rtol=1e-3, atol=0, equal_nan=True):
                group.append(curve)
                break
        else:
            groups.append([curve])
    return [group for group in groups if len(group) > 1]


def list_curves(runs: Sequence[RunFolder]) -> dict[Panel, list[Curve]]:
    """Returns panel -> its curves, for each panel that has any.

    Curves are sorted by run, then by the first appearance of the metric in it. The top-5 accuracy among five or fewer
    classes is left out.
    """
    curves_by_panel: dict[Panel, list[Curve]] = {panel: [] for panel in PANELS}
    for number, run in enumerate(runs):
        for metric in run.last:
            if metric.endswith(TOP) and 0 < (run.config.data.num_classes or 0) <= 5:
                continue  # always right
            panel = next((panel for panel in PANELS if re.search(panel.metrics, metric)), None)
            if panel:
                steps, values = zip(*((step, row[metric]) for step, row in run.metrics if metric in row), strict=True)
                array = np.array(values, np.float64) * panel.factor
                curves_by_panel[panel].append(Curve(number, metric, np.array(steps, np.int64), array))
    return {panel: curves for panel, curves in curves_by_panel.items() if curves}


def thin_out(values: Float[np.ndarray, " n"], buckets: int = BUCKETS) -> Int[np.ndarray, " kept"]:
    """Returns the indices of the points of a curve to draw, in ascending order.

    They are the first, the lowest and the highest point in each of `buckets` groups of successive points, and the last
    point of the curve. Every point of a short curve is drawn. NaN counts as the lowest, so that a gap stays.
    """
    if len(values) <= 3 * buckets:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), buckets + 1).astype(int)
    filled = np.where(np.isnan(values), -np.inf, values)
    kept = {0, len(values) - 1}
    for start, stop in itertools.pairwise(edges.tolist()):
        kept |= {start, start + int(filled[start:stop].argmin()), start + int(filled[start:stop].argmax())}
    return np.array(sorted(kept))


def draw_plots(runs: Sequence[RunFolder]) -> tuple[list[Plot], str, str]:
    """Returns the plots of runs, the script that draws them, and what the script needs in the head of the page.

    The script and the part of the head are HTML. Without metrics there are no plots, and both are empty.
    """
    panels = list_curves(runs)
    if not panels:
        return [], "", ""
    last = max(int(curve.steps[-1]) for curves in panels.values() for curve in curves)
    room = 0.015 * max(last, 1)  # for the markers at both ends
    ends = -room, max(last, 1) + room
    shared = Range1d(*ends, bounds=ends)  # what is zoomed in one plot is zoomed in all
    figures = [draw_panel(panel, runs, curves, shared) for panel, curves in panels.items()]
    script, divs = components(figures, wrap_script=False)
    plots = []
    for (panel, curves), div in zip(panels.items(), divs, strict=True):
        metrics = dict.fromkeys(curve.metric for curve in curves) if len(runs) > 1 else ()
        dashes = dict(zip(metrics, itertools.cycle(DASHES), strict=False))
        plots.append(Plot(panel, curves, div, dashes, find_equal(curves)))
    return plots, f"<script>{script}</script>", Resources("inline", components=["bokeh"]).render_js()


def draw_panel(panel: Panel, runs: Sequence[RunFolder], curves: Sequence[Curve], steps: Range1d) -> figure:
    """Returns the plot of a panel over a range of steps, with a vertical line wherever a run was resumed.

    Colours stand for runs and dashes for metrics. If there is only one run, colours stand for metrics.
    """
    several, metrics = len(runs) > 1, list(dict.fromkeys(curve.metric for curve in curves))
    plot, lines = empty_plot(panel, steps), []
    legend: dict[str, list[GlyphRenderer]] = {}
    colours = colours_of(len(runs) if several else len(metrics))
    turns = {id(curve): (turn, len(group)) for group in find_equal(curves) for turn, curve in enumerate(group)}
    for curve in curves:
        kind, (turn, equal) = metrics.index(curve.metric), turns.get(id(curve), (0, 1))
        colour = colours[curve.run if several else kind]
        look: dict[str, Any] = {"line_dash": DASHES[kind % len(DASHES) if several else 0]}
        if equal > 1:
            look = {"line_dash": [ALTERNATION, ALTERNATION * (equal - 1)], "line_dash_offset": -ALTERNATION * turn}
        kept = thin_out(curve.values, max(BUCKETS // len(runs), 100))
        points = curve.steps[kept], curve.values[kept].astype(np.float32)
        name = f"{runs[curve.run].name}: {curve.metric}" if several else curve.metric
        drawn = [plot.line(*points, name=name, color=colour, line_width=1.5, **look)]
        if len(kept) <= MAX_DOTTED_POINTS:
            drawn.append(plot.scatter(*(axis[turn::equal] for axis in points), size=5, color=colour))
        lines.append(drawn[0])
        legend.setdefault(curve.metric, []).extend(drawn)
    for run, colour in zip(runs, colours if several else [GREY], strict=True):
        if resumed := [process["first"] for process in run.processes[1:]]:
            mark = plot.vspan(x=resumed, color=colour, line_dash=[5, 4], line_width=1.5)
            legend.setdefault("resumed", []).append(mark)
    tips = [("", "$name"), ("step", "@x{0,0}"), (panel.unit, "@y{%.5g}")]
    plot.add_tools(HoverTool(renderers=lines, tooltips=tips, formatters={"@y": "printf"}))
    style = {"ncols": 3, "border_line_color": None, "background_fill_color": None, "padding": 2, "spacing": 14}
    if not several:  # else a name would stand for curves of several colours; the page has a key
        plot.add_layout(Legend(items=list(legend.items()), click_policy="hide", **style), "below")
    return plot


def empty_plot(panel: Panel, steps: Range1d) -> figure:
    """Returns a plot with nothing but its axes."""
    plot = figure(
        height=300,
        sizing_mode="stretch_width",
        x_range=steps,
        y_axis_type=panel.scale,
        x_axis_label="step",
        y_axis_label=panel.unit,
        tools="box_zoom,pan,reset,save",
        active_drag="box_zoom",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_right=24,  # half of the last number
        lod_threshold=None,
    )
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.xaxis.ticker.desired_num_ticks = 5
    if panel.scale == "linear":
        plot.yaxis.formatter = PrintfTickFormatter(format="%.4g")
    plot.toolbar_location, plot.toolbar.logo = "above", None
    plot.grid.grid_line_color = "#d1d9e0"
    for axis in plot.axis:
        axis.axis_label_text_font_style = "normal"
        axis.major_label_text_color = axis.axis_label_text_color = "#1f2328"
    return plot
