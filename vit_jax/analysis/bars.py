"""Bars that consist of parts, in groups, each group with its limit."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.analysis.plot import NotebookFigure

Groups = Mapping[str, Mapping[str, Mapping[str, float]]]  # group -> bar -> part of the bar -> size; all keys are names

WIDTH, FRAME = 4.8, 0.6  # inches: of the figure, of its axis and margins
ROW, LINE = 0.27, 0.2  # inches: of a bar with its margin, of a line of text
LETTERS, COLUMNS = 56, 3  # letters in a line of a group's name, entries in a line of the legend


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
    figure = NotebookFigure(figsize=(WIDTH, 1.0), layout="constrained")
    axes = figure.subplots()
    line = axes.spines["bottom"].get_edgecolor()
    place = 0.0  # inches from the top
    ticks: dict[float, str] = {}
    artists: dict[str, Any] = {}
    for number, (name, group) in enumerate(groups.items()):
        lines = textwrap.wrap(name, LETTERS)
        text = axes.annotate("\n".join(lines), (0.01, place), xycoords=("figure fraction", "data"), va="top")
        text.set(fontsize="small", fontweight="bold", in_layout=False, backgroundcolor=figure.get_facecolor())
        top = place = place + LINE * len(lines)
        for bar, parts in group.items():
            end = 0.0
            for part, size in parts.items():
                artists[part] = axes.barh(place + ROW / 2, size, 0.75 * ROW, end, color=colours[part])
                end += size
            across = limits and end < limits[number] < end + 0.1 * longest  # the number would lie on the limit
            at = limits[number] if across else end
            axes.text(at + 0.01 * longest, place + ROW / 2, total.format(end), va="center", fontsize="small")
            ticks[place + ROW / 2] = bar
            place += ROW
        if limits:
            artists[limit_name] = axes.vlines(limits[number], top, place, line, linewidth=2)
        place += LINE
    axes.set(xlabel=label, xlim=(0, 1.2 * longest), ylim=(place, 0), yticks=[*ticks], yticklabels=[*ticks.values()])
    axes.tick_params(labelsize="small")
    axes.tick_params(axis="y", length=0)
    axes.grid(alpha=0.4, axis="x")
    axes.set_axisbelow(True)
    axes.spines[["top", "left", "right"]].set_visible(False)
    legend = len(colours) > 1
    if legend:
        style: dict[str, Any] = {"ncols": COLUMNS, "fontsize": "small", "frameon": False}
        figure.legend(list(artists.values()), list(artists), loc="outside upper center", **style)
    figure.set_size_inches(WIDTH, place + FRAME + legend * LINE * -(-len(artists) // COLUMNS))
    return figure
