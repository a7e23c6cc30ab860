"""Figures 2, 3 and 5 of the paper, drawn from the numbers of its tables, with the accuracies of our recorded runs."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from docs.paper_tables import mean_of_five, numbers_of_run, our_mean, our_mean_of_five, weights_of
from vit_jax.analysis import NotebookFigure, label_places
from vit_jax.data.sources import VTAB_GROUPS, VTAB_TASKS
from vit_jax.experiments import RunRecord
from vit_jax.paper import PaperRun, read_paper_numbers, read_paper_runs

PRETRAINING_IMAGES = {"imagenet2012": 1_281_167, "imagenet21k": 14_197_122, "jft": 303_000_000}
# Start of a model's name -> (its family, places of the labels of its points). The labels take the places in turn. A
# place is (offset from the marker in typographic points, the end of the label that stands there).
FAMILIES = {
    "ViT": ("Transformer (ViT)", (((-6, -8), "right"),)),
    "BiT": ("ResNet (BiT)", (((6, -7), "left"),)),
    "R50": ("Hybrid", (((-5, 5), "right"), ((7, -1), "left"))),
}
OURS: Mapping[str, Any] = {"marker": "*", "markersize": 11, "markeredgecolor": "black", "linestyle": ""}


def vtab_groups(records: Sequence[RunRecord]) -> NotebookFigure:
    """Returns Figure 2, drawn from Table 9: mean accuracies over VTAB's 19 tasks and over each group of tasks."""
    numbers = [number for number in read_paper_numbers() if number.table == "9"]
    weights = list(dict.fromkeys(weights_of(number) for number in numbers))
    figure = NotebookFigure(figsize=(9, 3.4), layout="constrained")
    for axes, group in zip(figure.subplots(1, 4), ("", *VTAB_GROUPS), strict=True):
        members = [one for one in numbers if group in ("", VTAB_TASKS[one.dataset.removeprefix("vtab:")].group)]
        means = {}
        for place, name in enumerate(weights):
            own = [number for number in members if weights_of(number) == name]
            mean = statistics.mean(number.accuracy for number in own)
            means[name] = mean
            axes.bar(place, mean, 0.75, color=f"C{place}", label=name)
            axes.text(place, mean, f"{mean:.1f}", ha="center", va="bottom", fontsize="small")
            ours = [our_mean(number, records) for number in own]
            known = [value for value in ours if value is not None]
            if len(known) == len(own):
                axes.plot([place], [statistics.mean(known)], color=f"C{place}", label=f"{name}, ours", **OURS)
        axes.set(ylim=(min(means.values()) - 5, max(means.values()) + 3), xticks=[])
        axes.set_title(f"{group.capitalize() or 'VTAB'} ({len(members) // len(weights)} tasks)", fontsize="medium")
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    figure.axes[0].set_ylabel("accuracy (%)")
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


def data_sizes(records: Sequence[RunRecord]) -> NotebookFigure:
    """Returns Figure 3, drawn from Table 5: accuracy on ImageNet over the number of pre-training images."""
    numbers = [one for one in read_paper_numbers() if (one.table, one.dataset) == ("5", "imagenet2012")]
    figure = NotebookFigure(figsize=(5.6, 4), layout="constrained")
    axes = figure.subplots()
    for index, model in enumerate(dict.fromkeys(number.model for number in numbers)):
        own = sorted(
            (number for number in numbers if number.model == model), key=lambda one: PRETRAINING_IMAGES[one.pretraining]
        )
        places = [PRETRAINING_IMAGES[number.pretraining] for number in own]
        axes.plot(places, [number.accuracy for number in own], marker="os^vD"[index], color=f"C{index}", label=model)
        ours = [(place, our_mean(number, records)) for place, number in zip(places, own, strict=True)]
        draw_ours(axes, ours, f"C{index}", model)
    axes.set(xlabel="images of pre-training", ylabel="ImageNet, fine-tuned (%)", xscale="log")
    axes.set_xticks(
        [*PRETRAINING_IMAGES.values()], ["ImageNet\n1.3 million", "ImageNet-21k\n14 million", "JFT\n303 million"]
    )
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def compute(records: Sequence[RunRecord]) -> NotebookFigure:
    """Returns Figure 5, drawn from Table 6: accuracy after fine-tuning over the compute of pre-training on JFT."""
    figure = NotebookFigure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_runs(left, mean_of_five, lambda run: our_mean_of_five(run, records))
    draw_runs(
        right,
        lambda run: numbers_of_run(run)["imagenet2012"].accuracy,
        lambda run: our_mean(numbers_of_run(run)["imagenet2012"], records),
    )
    left.set(ylabel="mean of five data sets, fine-tuned (%)")
    right.set(ylabel="ImageNet, fine-tuned (%)")
    return figure


def draw_runs(axes: Any, paper: Callable[[PaperRun], float], ours: Callable[[PaperRun], float | None]) -> None:
    """Draws an accuracy of the runs of Table 6 over their exaFLOPs, with one colour for each family of models.

    Args:
        axes: the matplotlib axes to draw on.
        paper: returns the paper's accuracy of a run, in percent.
        ours: returns our accuracy of a run, in percent; None: nothing was run.
    """
    places = {run: float(run.exaflops) for run in read_paper_runs() if run.exaflops}
    for index, (start, (family, sides)) in enumerate(FAMILIES.items()):
        own = [run for run in places if run.model.startswith(start)]
        style: dict[str, Any] = {"color": f"C{index}", "label": family, "marker": "os^"[index], "linestyle": ""}
        axes.plot([places[run] for run in own], [paper(run) for run in own], **style)
        draw_ours(axes, [(places[run], ours(run)) for run in own], f"C{index}", family)
        for run, (offset, end) in zip(own, itertools.cycle(sides), strict=False):
            name = run.model.removeprefix("BiT-").replace("ViT-", "")
            text = name if run.epochs == 7 else f"{name}, {run.epochs} ep"
            where = (places[run], paper(run))
            axes.annotate(text, where, offset, textcoords="offset points", fontsize="xx-small", ha=end)
    axes.set(xlabel="exaFLOPs of pre-training", xscale="log", xlim=(30, 9000))
    label_places(axes, [*places.values()])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")


def draw_ours(axes: Any, points: Sequence[tuple[float, float | None]], colour: str, name: str) -> None:
    """Draws our points (place, value) of a model or family, without those whose value is None."""
    known = [(place, value) for place, value in points if value is not None]
    if known:
        axes.plot(*zip(*known, strict=True), color=colour, label=f"{name}, ours", **OURS)


FIGURES: Mapping[str, Callable[[Sequence[RunRecord]], NotebookFigure]] = {
    "figure2": vtab_groups,
    "figure3": data_sizes,
    "figure5": compute,
}
