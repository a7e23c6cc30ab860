"""What readers of the pages see: names that differ, numbers on their colours, nothing flat, cut or too dark."""

import re

import numpy as np
import pytest
from ml_collections import ConfigDict

from vit_jax.analysis import curves, run_page
from vit_jax.analysis.figures import attended
from vit_jax.analysis.html import STYLE
from vit_jax.analysis.look_page import distinct_names
from vit_jax.analysis.run_mistakes import evaluation_part
from vit_jax.monitoring import RunFolder


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (
            ["/data/a/photo 1.jpg", "/data/b/photo 1.jpg", "/data/b/other.jpg"],
            ["a/photo 1.jpg", "b/photo 1.jpg", "other.jpg"],
        ),
        (["x/a/1.jpg", "y/a/1.jpg", "y/b/1.jpg"], ["x/a/1.jpg", "y/a/1.jpg", "b/1.jpg"]),
        (["1.jpg", "a/1.jpg"], ["1.jpg", "a/1.jpg"]),
        (["a/1.jpg", "a/1.jpg"], ["a/1.jpg", "a/1.jpg"]),
    ],
)
def test_titles_tell_photographs_apart(paths, names):
    assert distinct_names(paths) == names


def test_a_photograph_gives_light_in_proportion_to_the_attention():
    pixels = np.full((60, 60, 3), 200, np.uint8)
    seen = attended(pixels, np.linspace(0, 1, 36, dtype=np.float32).reshape(6, 6))
    assert seen.max() == 200 and seen.min() == 0
    light = (seen / 200.0) ** 2.2
    assert 0.4 < light.mean() < 0.6 and seen.mean() > 0.6 * 200  # the mean of the attention is a half


def luminance(colour):
    parts = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("theme", [0, 1])
def test_numbers_are_readable_on_the_darkest_cells(theme):
    """The contrast of WCAG's level AA, in both themes."""
    text, page, bar, most = (
        re.findall(rf"--{name}: ([#.\w]+)", STYLE)[theme] for name in ("text", "page", "bar", "darkest")
    )
    assert "calc(var(--share, 0%) * var(--darkest))" in run_page.STYLE
    mixed = [
        round(float(most) * int(bar[i : i + 2], 16) + (1 - float(most)) * int(page[i : i + 2], 16)) for i in (1, 3, 5)
    ]
    pair = sorted([luminance(text), luminance("#" + "".join(f"{part:02x}" for part in mixed))])
    assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5


def a_run(classes):
    rows = [(step, {"test/accuracy": 0.5 + step / 100, "test/top5": 1.0}) for step in (10, 20, 30)]
    config = ConfigDict({"data": {"num_classes": classes}})
    return RunFolder("r", "", config, rows, processes=[{"first": 0}], plan=None, mistakes={})


def test_the_top_five_of_few_classes_are_not_drawn():
    def drawn(classes):
        return {curve.metric for found in curves.list_curves([a_run(classes)]).values() for curve in found}

    assert drawn(3) == {"test/accuracy"} and drawn(10) == {"test/accuracy", "test/top5"}


def test_markers_at_the_ends_are_inside_the_frame(monkeypatch):
    ranges = []
    monkeypatch.setattr(
        curves, "draw_panel", lambda panel, runs, found, steps: ranges.append(steps) or curves.empty_plot(panel, steps)
    )
    curves.draw_plots([a_run(10)])
    assert ranges[0].start < 0 and ranges[0].end > 30 and tuple(ranges[0].bounds) == (ranges[0].start, ranges[0].end)


def test_a_split_is_shown_as_it_is_written():
    found = {
        "pairs": np.array([[0, 0, 3], [0, 1, 1]]),
        "names": np.array(["a", "b"]),
        "images": np.array([]),
        "step": np.array(5),
    }
    found |= {"pixels": np.zeros((0, 2, 2, 3), np.uint8), "labels": np.array([]), "predictions": np.array([])}
    found |= {"confidences": np.array([]), "split": np.array("train[54:60]")}
    assert "of the split train[54:60] are wrong" in evaluation_part("test.train_54_60.mistakes.npz", found)
    del found["split"]
    assert "of the split train_54_60 are wrong" in evaluation_part("test.train_54_60.mistakes.npz", found)
