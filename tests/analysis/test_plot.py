"""Numbers that pictures show."""

import numpy as np

from vit_jax.analysis import plot
from vit_jax.analysis.figures import position_similarity


def test_a_confusion_matrix_is_in_per_cent_of_each_class():
    figure = plot.confusion(np.array([[3, 1, 0], [0, 0, 0], [1, 0, 1]]), ["a", "b", "c"])
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), [[75, 25, 0], [0, 0, 0], [50, 0, 50]])


def test_patches_are_counted_from_one():
    axes = position_similarity(np.zeros((3, 4, 3, 4))).axes[0]
    assert axes.get_xticklabels()[0].get_text() == axes.get_yticklabels()[0].get_text() == "1"
    assert (axes.get_xticklabels()[-1].get_text(), axes.get_yticklabels()[-1].get_text()) == ("4", "3")
