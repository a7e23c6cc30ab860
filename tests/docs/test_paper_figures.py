"""Figures 2, 3 and 5: the numbers of the tables as they are drawn, and ours where all that a point needs was run."""

import dataclasses

import pytest

from configs import finetune, vtab
from docs import paper_figures
from tests.conftest import ROOT
from vit_jax.experiments import RunRecord

FIVE = ("imagenet2012", "cifar10", "cifar100", "oxford_iiit_pet", "oxford_flowers102")


def lines(axes):
    return {line.get_label(): [*map(tuple, line.get_xydata())] for line in axes.lines}


def tuned(dataset, model, weights, accuracy):
    config = finetune.get_config(f"model={model},dataset={dataset}")
    config.init_from = weights
    return RunRecord(dataset, config.to_dict(), config.total_steps, {"test/accuracy": accuracy}, [])


def test_the_means_of_vtab_are_those_of_its_groups():
    figure = paper_figures.vtab_groups([])
    heights = [[round(bar.get_height(), 2) for bar in axes.patches] for axes in figure.axes]
    assert heights == [[77.63, 76.29, 72.71], [86.69, 85.56, 83.27], [87.0, 86.72, 84.65], [65.03, 62.96, 57.5]]
    natural = [task for task, spec in paper_figures.VTAB_TASKS.items() if spec.group == "natural"]
    records = []
    for task in natural:
        config = vtab.get_config(f"task={task},model=ViT-L/16")
        config.init_from = "ViT-L/16-imagenet21k"
        records.append(RunRecord(task, config.to_dict(), 2500, {"test/accuracy": 0.8}, []))
    whole, *groups = (lines(axes) for axes in paper_figures.vtab_groups(records).axes)
    [place] = groups[0].values()
    assert place == [(2, pytest.approx(80))] and not whole and not groups[1]
    assert not any(lines(axes) for axes in paper_figures.vtab_groups(records[1:]).axes)


def test_the_points_of_figure_3_are_the_rows_of_table_5():
    run = tuned("imagenet2012", "ViT-B/16", "ViT-B/16-imagenet21k", 0.84)
    drawn = lines(paper_figures.data_sizes([run]).axes[0])
    assert drawn["ViT-B/16"] == [(1_281_167, 77.91), (14_197_122, 83.97), (303_000_000, 84.15)]
    assert len(drawn["ViT-H/14"]) == 2 and drawn["ViT-B/16, ours"] == [(14_197_122, 84)]


def test_figure_5_has_the_runs_of_table_6():
    runs = [tuned(dataset, "ViT-B/32", "runs/ViT/vit_b32_jft_7", 0.9) for dataset in FIVE]
    five, imagenet = (lines(axes) for axes in paper_figures.compute(runs).axes)
    assert [len(five[name]) for name, _ in paper_figures.FAMILIES.values()] == [6, 7, 5]
    assert five["Transformer (ViT)"][0] == (55, pytest.approx(92.5)) and imagenet["Hybrid"][-1] == (1668, 87.12)
    assert five["Transformer (ViT), ours"] == imagenet["Transformer (ViT), ours"] == [(55, 90)]
    five, imagenet = (lines(axes) for axes in paper_figures.compute(runs[:-1]).axes)
    assert "Transformer (ViT), ours" not in five and "Transformer (ViT), ours" in imagenet
    other = dataclasses.replace(runs[0], config=runs[0].config | {"init_from": "runs/vit_b32_jft"})
    assert "Transformer (ViT), ours" not in lines(paper_figures.compute([other]).axes[1])


@pytest.mark.parametrize("name", paper_figures.FIGURES)
def test_the_pictures_show_the_numbers(name):
    """`python -m docs.results_page --pictures=docs/results` draws them anew."""
    drawn = (ROOT / "docs" / "results" / f"{name}.svg").read_text()
    for axes in paper_figures.FIGURES[name]([]).axes:
        assert f"<!-- {axes.get_ylabel() or axes.get_title()} -->" in drawn
        for text in axes.texts:
            assert f"<!-- {text.get_text()} -->" in drawn
