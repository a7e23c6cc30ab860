import csv
import io

import numpy as np
import pytest

from vit_jax.analysis import plot
from vit_jax.evals import scores


def test_top_k_counts_any_label_and_breaks_ties_by_order():
    logits = np.array([[3, 3, 1, 0], [0, 2, 2, 2], [1, 0, np.nan, 0], [5, 4, 3, 2]], np.float32)
    labels = np.array([1, 3, 0, 3])
    assert [scores.top_k_hits(logits, labels, k).tolist() for k in (1, 2, 3, 4)] == [
        [False, False, False, False],
        [True, False, False, False],
        [True, True, False, False],
        [True, True, False, True],
    ]
    several = np.array([[1, 0, -1], [-1, -1, -1], [0, 1, 2], [3, 2, 1]])
    assert scores.top_k_hits(logits, several, 1).tolist() == [True, False, False, False]
    assert scores.top_k_accuracy(logits, several, 1) == 1 / 3  # the second image has no label
    assert scores.top_k_accuracy(logits, several, 2) == 2 / 3
    assert np.isnan(scores.top_k_accuracy(logits, np.full(4, -1)))


def test_top_1_is_the_argmax_of_random_logits():
    random = np.random.default_rng(0)
    logits, labels = random.integers(0, 4, (500, 7)).astype(np.float32), random.integers(0, 7, 500)
    np.testing.assert_array_equal(scores.top_k_hits(logits, labels, 1), logits.argmax(1) == labels)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(scores.top_k_hits(logits, labels, 3), (order == labels[:, None]).any(1))


def test_the_cells_are_those_of_the_matrix():
    random = np.random.default_rng(0)
    predicted, labels = random.integers(0, 7, 200), random.integers(-1, 7, 200)
    matrix: np.ndarray = np.zeros((7, 7), int)
    rows, columns, counts = scores.confusion_cells(predicted, labels)
    matrix[rows, columns] = counts
    np.testing.assert_array_equal(matrix, scores.confusion_matrix(predicted, labels, 7))
    assert counts.min() > 0


def test_the_confusion_matrix_counts_every_labelled_image():
    labels, predicted = np.array([0, 0, 2, 2, 2, -1]), np.array([0, 1, 2, 2, 0, 1])
    matrix = scores.confusion_matrix(predicted, labels, 3)
    assert matrix.tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 2]]
    np.testing.assert_array_equal(scores.class_accuracies(matrix), [1 / 2, np.nan, 2 / 3])
    rows = list(csv.reader(io.StringIO(scores.format_confusion(matrix, ['tench, "Tinca"', "ray", "hen"]))))
    assert rows[0] == ["label \\ prediction", 'tench, "Tinca"', "ray", "hen", "accuracy"]
    assert [row[0] for row in rows[1:]] == rows[0][1:-1]
    assert [[int(count) for count in row[1:-1]] for row in rows[1:]] == matrix.tolist()
    assert [row[-1] for row in rows[1:]] == ["0.5", "nan", "0.666667"]


def test_the_picture_of_a_confusion_matrix_is_in_per_cent_of_each_class():
    figure = plot.confusion(np.array([[3, 1, 0], [0, 0, 0], [0, 2, 2]]), ["tench", "ray", "hen"])
    axes, _ = figure.axes
    assert axes.images[0].get_array().tolist() == [[75, 25, 0], [0, 0, 0], [0, 50, 50]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["tench", "ray", "hen"]


def test_the_mean_over_classes_is_that_of_the_confusion_matrix():
    random = np.random.default_rng(0)
    labels, predicted = random.choice([0, 1, 3], 50), random.integers(0, 4, 50)
    accuracies = scores.class_accuracies(scores.confusion_matrix(predicted, labels, 4))
    assert scores.mean_class_accuracy(predicted == labels, labels) == pytest.approx(np.nanmean(accuracies))


def test_the_calibration_error_is_the_mean_distance_of_the_bins():
    confidences, hits = np.array([0.55, 0.6, 0.95, 0.9, 1.0]), np.array([True, False, True, True, False])
    # With 5 bins: 0.55 and 0.6 are in (0.4, 0.6], half of them right; 0.95, 0.9 and 1.0 in (0.8, 1], two right.
    expected = (2 * abs(0.5 - 0.575) + 3 * abs(2 / 3 - 2.85 / 3)) / 5
    assert scores.calibration_error(confidences, hits, bins=5) == pytest.approx(expected, abs=1e-12)
    assert np.isnan(scores.calibration_error(np.empty(0), np.empty(0, bool)))


def test_a_calibrated_model_has_no_calibration_error():
    random = np.random.default_rng(0)
    confidences = random.uniform(0.5, 1, 200_000)
    hits = random.uniform(size=200_000) < confidences
    assert scores.calibration_error(confidences, hits) < 0.005
    assert scores.calibration_error(confidences**0.5, hits) > 0.08


def test_confidences_are_finite_for_any_logits_and_do_not_depend_on_the_blocks(monkeypatch):
    monkeypatch.setattr(scores, "ROWS", 2)
    logits = np.array([[0, 1000, -1000], [1, 2, 3], [-1000, -900, -1000]], np.float32)
    sigmoid = 1 / (1 + np.exp(-3.0))
    np.testing.assert_allclose(scores.top_confidences(logits, "sigmoid"), [1, sigmoid, 0], atol=1e-12)
    softmax = 1 / (1 + np.exp(-1.0) + np.exp(-2.0))
    np.testing.assert_allclose(scores.top_confidences(logits, "softmax"), [1, softmax, 1])
