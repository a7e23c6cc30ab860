"""Confident learning gives cleanlab's numbers; tests/fixtures/confident_learning/make.py says how these were made."""

import numpy as np
import pytest

from tests.conftest import ROOT
from vit_jax.evals import confident_learning


@pytest.fixture(scope="module")
def cleanlab():
    with np.load(ROOT / "tests/fixtures/confident_learning/cleanlab.npz") as arrays:
        return dict(arrays)


def test_it_finds_and_ranks_what_cleanlab_does(cleanlab):
    given = cleanlab["labels"], cleanlab["probabilities"]
    np.testing.assert_allclose(confident_learning.class_thresholds(*given), cleanlab["thresholds"], rtol=1e-6)
    np.testing.assert_array_equal(confident_learning.confident_joint(*given), cleanlab["joint"])
    np.testing.assert_array_equal(confident_learning.is_doubted(*given), cleanlab["doubted"])
    np.testing.assert_array_equal(confident_learning.rank_doubted(*given), cleanlab["ranked"])
    np.testing.assert_array_equal(confident_learning.label_probabilities(*given), cleanlab["scores"])


def test_the_fixture_has_the_cases_that_differ_from_predictions(cleanlab):
    confident = cleanlab["probabilities"] >= cleanlab["thresholds"]
    most, count = cleanlab["probabilities"].argmax(axis=1), confident.sum(axis=1)
    assert (count == 0).any() and ((count == 1) & (confident.argmax(axis=1) != most)).any()
    assert ((count > 1) & ~confident[np.arange(len(most)), most]).any()
    assert 0 < cleanlab["doubted"].sum() < (most != cleanlab["labels"]).sum()


def test_a_class_without_images_is_never_suggested():
    labels, probabilities = np.array([0, 0, 1, 1]), np.array([[0.6, 0.1, 0.3], [0.1, 0.2, 0.7]] * 2)
    assert confident_learning.class_thresholds(labels, probabilities).tolist() == [0.35, pytest.approx(0.15), np.inf]
    assert confident_learning.confident_joint(labels, probabilities)[:, 2].tolist() == [0, 0, 0]
