import numpy as np
import pytest

from vit_jax import UserError
from vit_jax.evals import knn
from vit_jax.evals.labelled_features import Examples


def make_examples(count, seed, classes=5, width=8):
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, count)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    return Examples((centres[labels] + random.normal(size=(count, width))).astype(np.float32), labels)


def vote_by_brute_force(train, test, count, temperature):
    """The label of each test example, in float64, one example at a time."""
    predicted = []
    for query in test.features.astype(np.float64):
        cosines = [query @ key / np.linalg.norm(query) / np.linalg.norm(key) for key in train.features.astype(float)]
        nearest = sorted(range(len(cosines)), key=lambda row: (-cosines[row], row))[:count]
        votes = np.zeros(train.labels.max() + 1)
        for row in nearest:
            votes[train.labels[row]] += np.exp(cosines[row] / temperature)
        predicted.append(votes.argmax())
    return np.array(predicted)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(knn, "TEST_BLOCK", 16)
    monkeypatch.setattr(knn, "TRAIN_BLOCK", 24)


def test_accuracies_are_those_of_brute_force():
    train, test, counts = make_examples(100, 0), make_examples(45, 1), [1, 3, 20, 100, 500]
    expected = [(vote_by_brute_force(train, test, count, 0.07) == test.labels).mean() for count in counts]
    np.testing.assert_array_equal(knn.evaluate_knn(train, test, counts, 0.07), expected)
    assert expected[0] != expected[2]


def test_neighbours_do_not_depend_on_the_blocks(monkeypatch):
    train, test = make_examples(100, 0).features, make_examples(45, 1).features
    in_blocks = knn.find_neighbours(train, test, 10)
    monkeypatch.setattr(knn, "TEST_BLOCK", 64)
    monkeypatch.setattr(knn, "TRAIN_BLOCK", 128)
    whole = knn.find_neighbours(train, test, 10)
    np.testing.assert_array_equal(in_blocks[1], whole[1])
    np.testing.assert_allclose(in_blocks[0], whole[0], atol=1e-6)


def test_of_equal_neighbours_the_first_comes_first():
    train = np.array([[1, 0], [0, 2]] * 30, np.float32)
    similarities, rows = knn.find_neighbours(train, np.array([[3, 0], [0, 0], [1e-30, 0]], np.float32), 31)
    assert rows[0].tolist() == [*range(0, 60, 2), 1]
    assert similarities[0].tolist() == [1.0] * 30 + [0.0]
    assert rows[1].tolist() == list(range(31)) and not similarities[1].any()
    assert rows[2].tolist() == rows[0].tolist() and similarities[2, 0] == 1  # neither length nor scale counts


def test_of_equal_votes_the_smallest_label_wins():
    train = Examples(np.array([[1, 0], [1, 0], [0, 1]], np.float32), np.array([7, 4, 2]))
    test = Examples(np.array([[2, 0]], np.float32), np.array([4]))
    assert knn.evaluate_knn(train, test, [1, 2, 3], temperature=0.07).tolist() == [0, 1, 1]
    assert knn.evaluate_knn(train, test, [2], temperature=1e-4).tolist() == [1]  # where every other weight underflows


def test_features_must_be_finite():
    train, test = make_examples(10, 0), make_examples(5, 1)
    test.features[0] = np.inf
    with pytest.raises(UserError, match="1 of 5 test images are not finite"):
        knn.evaluate_knn(train, test, [1], temperature=0.07)
