"""Plots of metrics during training, of predictions, of attention and of plans. Only this file uses matplotlib."""

import contextlib
import functools
import io
import logging
import os
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int, UInt8

from vit_jax import printable, reason
from vit_jax.analysis.colours import THEMES, Theme
from vit_jax.data.images import read_image
from vit_jax.model import Model
from vit_jax.monitoring import is_percent_metric

try:
    import matplotlib
    from matplotlib import font_manager
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import imsave
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("pictures need matplotlib: pip install -e '.[plot]'", name=error.name) from error


DRAW_SECONDS = 2.0  # between two drawings of a live plot
MAX_MARKERS = 40  # lines with more points have no markers
MAX_BLOCKS = 6  # whose attention is plotted
MAX_LETTERS = 34  # of a class name
MAX_TICKS = 8  # points of a logarithmic axis, each of which is labelled
MAX_NAMES = 40  # beside a confusion matrix
MAX_COUNTED = 12  # classes of a confusion matrix with numbers

# Label of the axis -> suffix of the metrics plotted there, factor.
PANELS = {"loss (nats)": ("/loss", 1), "accuracy (%)": ("/accuracy", 100), "learning rate": ("/lr", 1)}

# Bars that consist of parts, in groups, each group with its limit.
Groups = Mapping[str, Mapping[str, Mapping[str, float]]]  # group -> bar -> part of the bar -> size; all keys are names
BARS_WIDTH, BARS_FRAME = 4.8, 0.6  # inches: of the figure, of its axis and margins
BAR_HEIGHT, LINE_HEIGHT = 0.27, 0.2  # inches: of a bar with its margin, of a line of text
NAME_LETTERS, LEGEND_COLUMNS = 56, 3  # letters in a line of a group's name, entries in a line of the legend


class NotebookFigure(Figure):
    """A figure that notebooks display without a plotting backend."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=2 * self.dpi)  # sharp on high-density screens
        width, height = self.get_size_inches() * self.dpi
        return file.getvalue(), {"width": round(width), "height": round(height)}


@contextlib.contextmanager
def theme(name: Theme) -> Iterator[None]:
    """Gives the colours of a theme to figures that are made inside the `with` statement."""
    background, text, grid, data = THEMES[name]
    texts = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    colours = dict.fromkeys(texts, text) | dict.fromkeys(["figure.facecolor", "axes.facecolor"], background)
    cycle = {"axes.prop_cycle": f"cycler('color', {list(data)})", "grid.color": grid}
    with matplotlib.rc_context({**colours, **cycle, "legend.facecolor": background, "svg.hashsalt": "vit_jax"}):
        yield


def encode_figure(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """Returns a file with the figure; equal figures give equal files."""
    file = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type") if kind == "svg" else ("Software",))
    with matplotlib.rc_context({"svg.hashsalt": "vit_jax"}):
        figure.savefig(file, format=kind, dpi=200, metadata=nothing)
    return file.getvalue()


def encode_themed(draw: Callable[[], Figure], name: Theme) -> bytes:
    """Returns an SVG file with a figure in the colours of a theme."""
    with theme(name):
        return encode_figure(draw(), "svg")


def encode_pixels(pixels: UInt8[np.ndarray, "height width 3"], lossless: bool) -> bytes:
    """Returns a picture as a WebP file, which takes half of what PNG and JPEG take."""
    file = io.BytesIO()
    imsave(file, pixels, format="webp", pil_kwargs={"lossless": lossless, "quality": 80})
    return file.getvalue()


def colour_map(values: Float[np.ndarray, "*shape"]) -> np.ndarray:
    """Returns RGB uint8 [*shape, 3] of values from 0 to 1, by viridis, whose brightness rises evenly."""
    return matplotlib.colormaps["viridis"](values, bytes=True)[..., :3]


class Live:
    """Plots losses, accuracies and the learning rate over steps while a run trains; in a notebook, in place.

    Use: `with Live() as live: train(config, workdir, watch=live)`. The plot is drawn every two seconds at most, and at
    the end of the `with` statement, also after an error.

    Attributes:
        figure: the plot; outside a notebook, `figure.savefig(path)` saves it.
    """

    def __init__(self) -> None:
        """Starts without metrics."""
        self.figure = NotebookFigure(figsize=(4, 3), layout="constrained")
        self._values: dict[str, dict[int, float]] = {}
        self._handle: Any = None
        self._drawn_at, self._told = time.monotonic(), False

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, *reason: object) -> None:
        self._draw()

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        """Adds the metrics of a step."""
        for name, value in metrics.items():
            self._values.setdefault(name, {})[step] = value
        if time.monotonic() - self._drawn_at >= DRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        try:
            self._draw_panels()
        except Exception as error:  # a plot is not worth a run
            if not self._told:
                logging.getLogger(__name__).warning("the metrics cannot be drawn: %s", reason(error))
            self._told = True
        self._drawn_at = time.monotonic()

    def _draw_panels(self) -> None:
        panels = {label: [name for name in self._values if name.endswith(end)] for label, (end, _) in PANELS.items()}
        panels = {label: names for label, names in panels.items() if names}
        if not panels:
            return
        groups = list(dict.fromkeys(_group(name) for names in panels.values() for name in names))
        self.figure.clear()
        self.figure.set_size_inches(4 * len(panels), 3)
        grid = self.figure.subplots(1, len(panels), sharex=True, squeeze=False)[0]
        for axes, (label, names) in zip(grid, panels.items(), strict=True):
            self._draw_lines(axes, names, groups, PANELS[label][1])
            axes.set(xlabel="step", ylabel=label)
            if label.startswith("accuracy"):
                axes.set_ylim(top=min(axes.get_ylim()[1], 101))
        self._display()

    def _draw_lines(self, axes: Axes, names: list[str], groups: list[str], factor: int) -> None:
        for name in names:
            steps, values = zip(*self._values[name].items(), strict=True)
            colour = f"C{groups.index(_group(name))}"
            marker = "o" if len(steps) <= MAX_MARKERS else ""
            label = f"{name} {values[-1] * factor:.4g}"
            axes.plot(steps, np.multiply(values, factor), color=colour, marker=marker, markersize=3, label=label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        axes.locator_params(axis="x", nbins=5, integer=True)

    def _display(self) -> None:
        ipython = sys.modules.get("IPython")  # a notebook has imported it
        if ipython is None or ipython.get_ipython() is None:
            return
        if self._handle is None:
            self._handle = ipython.display.display(self.figure, display_id=True)
        else:
            self._handle.update(self.figure)


def predictions(
    images: Sequence[str | os.PathLike | np.ndarray], results: list[dict], truth: Sequence[str] | None = None
) -> NotebookFigure:
    """Returns a figure of images, each beside a bar chart of its most probable classes.

    Args:
        images: files, or RGB uint8 arrays [height, width, 3].
        results: the results of `vit_jax.predict.predict` for them.
        truth: the names of their true classes, if known, whose bars are green.

    Raises:
        UserError: an image cannot be read.
    """
    columns = min(len(images), 2)
    rows = -(-len(images) // columns)
    figure = NotebookFigure(figsize=(4.8 * columns, 1.9 * rows), layout="constrained")
    grid = figure.subplots(rows, 2 * columns, squeeze=False, width_ratios=[1.6, 3.2] * columns).reshape(-1, 2)
    for left, right in grid:
        left.set_axis_off()
        left.set_anchor("N")
        right.set_axis_off()
    known = [None] * len(images) if truth is None else truth
    for (left, right), image, result, name in zip(grid, images, results, known, strict=False):
        left.imshow(image if isinstance(image, np.ndarray) else read_image(image).decode())
        title = Path(image).name if name is None and not isinstance(image, np.ndarray) else name
        if title is not None:
            left.set_title(_shorten(title, 24), fontsize="small")
        _draw_bars(right, result["classes"], name)
    return figure


def attention(
    model: Model, image: Float[np.ndarray, "height width 3"], weights: Float[Any, "depth heads tokens tokens"]
) -> NotebookFigure:
    """Returns a figure of the attention in some blocks of a model, averaged over heads.

    It is the attention of the class token to the patches or, without a class token, the average of that of all patches.

    Args:
        model: the model that computed the weights.
        image: the preprocessed image.
        weights: the attention weights for that image, `out["attention"][:, 0]` of
            `model.apply(..., capture=("attention",))`.
    """
    first, before = model.vit.class_rows, model.vit.prefix_rows
    queries = np.asarray(weights)[:, :, slice(first) if first else slice(before, None)]
    maps = 100 * queries.mean((1, 2))[:, before:].reshape(-1, *model.vit.grid)
    chosen = np.unique(np.linspace(0, len(maps) - 1, MAX_BLOCKS).round().astype(int))
    figure = NotebookFigure(figsize=(1.6 * len(chosen) + 2.6, 2.0), layout="constrained")
    input_axes, *others = figure.subplots(1, len(chosen) + 1)
    input_axes.imshow((image - image.min()) / max(np.ptp(image), 1e-9))
    input_axes.set_title("image", fontsize="small")
    for axes, block in zip(others, chosen, strict=True):
        image_artist = axes.imshow(maps[block], vmin=0, vmax=maps[chosen].max())
        axes.set_title(f"block {block + 1} of {len(maps)}", fontsize="small")
    for axes in (input_axes, *others):
        axes.set_axis_off()
    name = "class token" if first else "patches (mean)"
    bar = figure.colorbar(image_artist, ax=others, pad=0.02)
    bar.set_label(f"attention of the\n{name} (%)", fontsize="small")
    bar.ax.tick_params(labelsize="small")
    return figure


def confusion(matrix: Int[np.ndarray, "label prediction"], names: Sequence[str]) -> NotebookFigure:
    """Returns a figure of a confusion matrix: what the images of each class (row) are taken for, in per cent of them.

    With at most `MAX_COUNTED` classes, the numbers of images stand in the cells.

    Args:
        matrix: numbers of images, as `confusion_matrix` of vit_jax/evals/scores.py counts them.
        names: the names of the classes, which are shown if there are at most `MAX_NAMES`.
    """
    counts = matrix.sum(axis=1, keepdims=True)
    shares = np.divide(100 * matrix, counts, where=counts > 0, out=np.zeros(matrix.shape))
    side = min(2.5 + 0.25 * len(matrix), 10)
    figure = NotebookFigure(figsize=(side + 0.8, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, vmin=0, vmax=100, cmap="Blues", interpolation="nearest")
    axes.set(xlabel="prediction", ylabel="label")
    if len(names) <= MAX_NAMES:
        short = [_shorten(name) for name in names]
        axes.set_xticks(range(len(names)), short, rotation=90, fontsize="small")
        axes.set_yticks(range(len(names)), short, fontsize="small")
    for (row, column), count in np.ndenumerate(matrix) if len(matrix) <= MAX_COUNTED else ():
        colour = "white" if shares[row, column] > 50 else "black"
        axes.text(column, row, f"{count:,}", ha="center", va="center", fontsize="x-small", color=colour)
    figure.colorbar(image, ax=axes, shrink=0.8).set_label("images of the class (%)", fontsize="small")
    return figure


def inference(points: Sequence[Any]) -> NotebookFigure:
    """Plots the speed and the largest batch of predictions over image sizes, as in Figure 12.

    Args:
        points: each with `model`, `resolution`, `images_per_second` or None, and `largest_batch`.
    """
    figure = NotebookFigure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(point.model for point in points):
        known = [point for point in points if point.model == name]
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "linestyle": "--" if "+" in name else "-"}
        sizes = [point.resolution for point in known]
        left.plot(sizes, [point.images_per_second or np.nan for point in known], label=name, **style)
        right.plot(sizes, [point.largest_batch or np.nan for point in known], label=name, **style)
    left.set(ylabel="images/s a chip")
    right.set(ylabel="largest batch a chip")
    for axes in (left, right):
        axes.set(xlabel="image size (pixels)", yscale="log")
        axes.grid(alpha=0.3)
    right.legend(fontsize="small")
    return figure


def scaling(
    lines: Mapping[str, Sequence[Any]], label: str, joined: bool, speeds: Mapping[str, float] | None = None
) -> NotebookFigure:
    """Plots an accuracy against compute or another size, as in Figures 4, 5, 8 and 13.

    Args:
        lines: name -> points, each with `x_value`, `mean`, `std` or None, `metric`, `model` and `best`: whether it has
            a ring.
        label: the label of the horizontal axis.
        joined: whether the points of a line are joined; else the name of its model stands beside each.
        speeds: model -> images a second, against which a second plot has the same accuracies; None: without it.
    """
    points = [point for line in lines.values() for point in line]
    places = {label: [point.x_value for point in points]}
    if speeds is not None:
        places["images/s a chip, inference"] = [speeds[point.model] for point in points]
    figure = NotebookFigure(figsize=(5.6 * len(places), 4), layout="constrained")
    metrics = dict.fromkeys(point.metric for point in points)
    factor, unit = (100, " (%)") if all(map(is_percent_metric, metrics)) else (1, "")
    for axes, (name, own) in zip(figure.subplots(1, len(places), squeeze=False)[0], places.items(), strict=True):
        left = iter(own)
        for number, line in enumerate(lines.items()):
            _draw_line(axes, number, *line, [next(left) for _ in line[1]], joined, factor)
        _mark_best(axes, own, points, factor)
        positive = min(own) > 0
        axes.set(xlabel=name, ylabel=", ".join(metrics) + unit, xscale="log" if positive else "linear")
        if not joined:
            axes.margins(x=0.2)  # for the names of models
        if positive:
            label_places(axes, own)
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _draw_line(
    axes: Axes, number: int, name: str, points: Sequence[Any], places: Sequence[float], joined: bool, factor: int
) -> None:
    ordered = sorted(zip(places, points, strict=True), key=lambda pair: pair[0])
    style: dict[str, Any] = {"marker": "os^vD*"[number % 6], "markersize": max(9 - number, 4), "capsize": 3}
    means = [factor * point.mean for _, point in ordered]
    spread = [factor * (point.std or 0) for _, point in ordered]
    dashes = ("-", "--", "-.", ":")[number % 4]  # equal lines are seen in each other's gaps, and larger markers behind
    across = [place for place, _ in ordered]
    axes.errorbar(across, means, yerr=spread, label=name, linestyle=dashes if joined else "", **style)
    for place, point in () if joined else ordered:
        axes.annotate(point.model, (place, factor * point.mean), (5, 4), textcoords="offset points", fontsize="x-small")


def _mark_best(axes: Axes, places: Sequence[float], points: Sequence[Any], factor: int) -> None:
    for place, point in zip(places, points, strict=True):
        if point.best:
            label = f"best: {factor * point.mean:.4g} at {place:.4g}, {point.line}"
            style: dict[str, Any] = {"marker": "o", "markersize": 14, "markerfacecolor": "none", "linestyle": ""}
            axes.plot(place, factor * point.mean, color=matplotlib.rcParams["text.color"], label=label, **style)


def label_places(axes: Axes, places: list[float]) -> None:
    """Labels the logarithmic horizontal axis of a plot: at its points if there are few, else at round numbers."""
    left, right = axes.get_xlim()
    gap = (right / left) ** 0.12  # that of labels which do not touch
    labelled: list[float] = []
    for place in sorted(set(places)):
        if not labelled or place > labelled[-1] * gap:
            labelled.append(place)
    few = len(set(places)) <= MAX_TICKS
    axes.xaxis.set_major_locator(
        FixedLocator(labelled) if few else LogLocator(subs=(1, 3) if right < 1e4 * left else (1,))
    )
    if few:
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 100 else f"{x:,.3g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_bars(axes: Axes, classes: list[dict], truth: str | None) -> None:
    """Draws a bar for each class with its name on the bar, so that long names need no room beside the bars."""
    values = [entry["probability"] for entry in classes]
    names = [entry["class"] for entry in classes]
    colours = ["#9bd39b" if name == truth else "#b8cfe8" for name in names]
    axes.barh(range(len(names)), values, color=colours)
    for row, (name, value) in enumerate(zip(names, values, strict=True)):
        text = f"{value:.1%}  {_shorten(name)}"
        axes.text(0.01, row, text, va="center", fontsize="small", clip_on=True)
    axes.set(xlim=(0, 1), ylim=(max(len(names), 5) - 0.5, -0.5))


def _group(name: str) -> str:
    """Returns the first part of a metric's name: train, or the name of an evaluation."""
    return name.partition("/")[0]


def _shorten(name: str, letters: int = MAX_LETTERS) -> str:
    """Returns a name as one short line, without characters that cannot be drawn."""
    return printable(textwrap.shorten(drawable(name), letters, placeholder="…"))


def drawable(text: str) -> str:
    """Returns a text in the characters of matplotlib's fonts.

    In place of a symbol that they lack stands its name, `[cat face]`, in place of another character its number, and in
    place of a mark, such as one that gives an emoji its colour, nothing.
    """
    known = _drawn_characters(tuple(matplotlib.rcParams["font.family"]))
    return "".join(letter if ord(letter) in known else _spell(letter) for letter in text)


@functools.cache
def _drawn_characters(families: tuple[str, ...]) -> frozenset[int]:
    found = [font_manager.findfont(font_manager.FontProperties(family=[family])) for family in families]
    fonts = map(font_manager.get_font, found)
    return frozenset(number for font in fonts for number in font.get_charmap())


def _spell(letter: str) -> str:
    kind = unicodedata.category(letter)
    if kind in ("Mn", "Me", "Cf"):
        return ""
    name = unicodedata.name(letter, "").lower() if kind.startswith("S") else ""
    return f"[{name}]" if name else letter if kind in ("Cs", "Cc") else f"U+{ord(letter):04X}"


def stacked_bars(
    groups: Groups, label: str, total: str, limits: Sequence[float] = (), limit_name: str = "limit"
) -> NotebookFigure:
    """Returns a figure of horizontal bars. The parts of a bar lie one after the other, and their sum stands at its end.

    Args:
        groups: the groups of bars.
        label: the label of the axis, with the unit.
        total: the format of the sum of a bar, as in "{:.1f}".
        limits: a limit for each group, drawn as a vertical line; empty: no limits are drawn.
        limit_name: the name of the limits in the legend, which is drawn only if there is more than one kind of part.
    """
    bars = [bar for group in groups.values() for bar in group.values()]
    colours = {part: f"C{number}" for number, part in enumerate(dict.fromkeys(part for bar in bars for part in bar))}
    longest = max([sum(bar.values()) for bar in bars] + [*limits])
    figure = NotebookFigure(figsize=(BARS_WIDTH, 1.0), layout="constrained")
    axes = figure.subplots()
    line = axes.spines["bottom"].get_edgecolor()
    place = 0.0  # inches from the top
    ticks: dict[float, str] = {}
    artists: dict[str, Any] = {}
    for number, (name, group) in enumerate(groups.items()):
        lines = textwrap.wrap(name, NAME_LETTERS)
        text = axes.annotate("\n".join(lines), (0.01, place), xycoords=("figure fraction", "data"), va="top")
        text.set(fontsize="small", fontweight="bold", in_layout=False, backgroundcolor=figure.get_facecolor())
        top = place = place + LINE_HEIGHT * len(lines)
        for bar, parts in group.items():
            end = 0.0
            for part, size in parts.items():
                artists[part] = axes.barh(place + BAR_HEIGHT / 2, size, 0.75 * BAR_HEIGHT, end, color=colours[part])
                end += size
            across = limits and end < limits[number] < end + 0.1 * longest  # the number would lie on the limit
            at = limits[number] if across else end
            axes.text(at + 0.01 * longest, place + BAR_HEIGHT / 2, total.format(end), va="center", fontsize="small")
            ticks[place + BAR_HEIGHT / 2] = bar
            place += BAR_HEIGHT
        if limits:
            artists[limit_name] = axes.vlines(limits[number], top, place, line, linewidth=2)
        place += LINE_HEIGHT
    axes.set(xlabel=label, xlim=(0, 1.2 * longest), ylim=(place, 0), yticks=[*ticks], yticklabels=[*ticks.values()])
    axes.tick_params(labelsize="small")
    axes.tick_params(axis="y", length=0)
    axes.grid(alpha=0.4, axis="x")
    axes.set_axisbelow(True)
    axes.spines[["top", "left", "right"]].set_visible(False)
    legend = len(colours) > 1
    if legend:
        style: dict[str, Any] = {"ncols": LEGEND_COLUMNS, "fontsize": "small", "frameon": False}
        figure.legend(list(artists.values()), list(artists), loc="outside upper center", **style)
    figure.set_size_inches(BARS_WIDTH, place + BARS_FRAME + legend * LINE_HEIGHT * -(-len(artists) // LEGEND_COLUMNS))
    return figure
