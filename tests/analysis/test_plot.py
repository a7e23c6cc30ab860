"""Numbers that pictures show."""

import numpy as np
import pytest

from vit_jax.analysis import plot
from vit_jax.analysis.captioned_figures import position_table
from vit_jax.analysis.figures import position_similarity
from vit_jax.model import create


def test_a_confusion_matrix_is_in_per_cent_of_each_class():
    figure = plot.confusion(np.array([[3, 1, 0], [0, 0, 0], [1, 0, 1]]), ["a", "b", "caf\udce9"])
    figure.draw_without_rendering()  # a name that is not UTF-8 is escaped
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), [[75, 25, 0], [0, 0, 0], [50, 0, 50]])


def test_few_classes_have_numbers_in_their_cells():
    figure = plot.confusion(np.array([[3000, 1], [0, 7]]), ["a", "b"])
    assert [text.get_text() for text in figure.axes[0].texts] == ["3,000", "1", "0", "7"]
    assert not plot.confusion(np.eye(13, dtype=int), [*map(str, range(13))]).axes[0].texts


@pytest.mark.filterwarnings("error")
def test_symbols_that_no_font_has_are_spelt():
    """matplotlib would draw a box, and warn."""
    for name, drawn in (
        ("\N{CAT} cat", "[cat] cat"),
        ("a\N{SNOWMAN}é", "a\N{SNOWMAN}é"),
        ("\N{WAVING HAND SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4}", "[waving hand sign][emoji modifier fitzpatrick"),
        ("\N{RED APPLE}\N{VARIATION SELECTOR-16}", "[red apple]"),
        ("\u732b", "U+732B"),
    ):
        assert plot.drawable(name).startswith(drawn)
        plot.confusion(np.array([[3, 1], [0, 7]]), [name, "b"]).draw_without_rendering()


def test_patches_are_counted_from_one():
    axes = position_similarity(np.zeros((3, 4, 3, 4))).axes[0]
    assert axes.get_xticklabels()[0].get_text() == axes.get_yticklabels()[0].get_text() == "1"
    assert (axes.get_xticklabels()[-1].get_text(), axes.get_yticklabels()[-1].get_text()) == ("4", "3")


def test_a_position_on_each_axis_is_joined_in_raster_order():
    spec = create("ViT-mu/16", resolution=(32, 48), position="learned2d").spec
    tables = {"position_x": np.array([[1], [2], [3]]), "position_y": np.array([[7], [8]])}
    assert position_table(spec, tables).tolist() == [[1, 7], [2, 7], [3, 7], [1, 8], [2, 8], [3, 8]]


def test_predictions_have_the_name_of_the_true_class_if_it_is_known_and_stay_in_their_columns():
    image, name = np.zeros((4, 4, 3), np.uint8), " ".join(["WWWWWWWW"] * 4)  # the widest letter
    results = [{"classes": [{"class": name, "probability": 1.0}]}] * 2
    assert [axes.get_title() for axes in plot.predictions([image] * 2, results).axes] == [""] * 4
    figure = plot.predictions([image] * 2, results, ["cat", "dog"])
    assert [axes.get_title() for axes in figure.axes] == ["cat", "", "dog", ""]
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert all(text.get_tightbbox().x1 <= axes.bbox.x1 for text in axes.texts)
