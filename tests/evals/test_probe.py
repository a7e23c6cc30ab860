from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from vit_jax import UserError
from vit_jax.evals import probe
from vit_jax.evals.labelled_features import Examples, measure_scale, permute_classes
from vit_jax.evals.probe import evaluate_probe, fit_logistic, fit_sgd, learn_head, select_validation


def make_examples(count, seed, classes=4, width=10):
    random = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    centres = 0.7 * np.random.default_rng(99).normal(size=(classes, width))
    return Examples((3 * (centres[labels] + random.normal(size=(count, width))) + 1).astype(np.float32), labels)


def whiten(train, examples):
    mean, scale = measure_scale(train.features)
    return ((examples.features - mean) / scale).astype(np.float32)


def predict(weights, bias, features):
    powers = np.exp(features @ weights + bias)
    return powers / powers.sum(axis=1, keepdims=True)


def test_logistic_regression_is_that_of_scikit_learn():
    train = make_examples(300, 0)
    features, labels, rows = whiten(train, train), train.labels.astype(np.int32), np.arange(40, 300)
    strengths = [1.0, 10_000.0, 0.1, 100.0]
    for l2, weights, bias in zip(strengths, *fit_logistic(features, labels, rows, strengths), strict=True):
        expected = LogisticRegression(C=1 / l2, tol=1e-8, max_iter=10_000)
        expected.fit(features[rows].astype(np.float64), labels[rows])
        np.testing.assert_allclose(predict(weights, bias, features), expected.predict_proba(features), atol=5e-5)
        np.testing.assert_allclose(weights.T, expected.coef_, atol=3e-4 * np.abs(expected.coef_).max())


def test_the_probe_scores_what_it_chose_on_the_validation_part():
    train, test, strengths = make_examples(120, 0, width=40), make_examples(200, 1, width=40), [1e-2, 10.0, 1e4]
    probe = evaluate_probe(train, test, fit_logistic, strengths, validation=0.2)
    held_out = select_validation(train.labels, 0.2, 0)
    fitted = np.setdiff1d(np.arange(120), held_out)
    features, labels = whiten(train, train), train.labels
    scores = []
    for l2 in strengths:
        model = LogisticRegression(C=1 / l2, tol=1e-8, max_iter=10_000).fit(features[fitted], labels[fitted])
        scores.append(model.score(features[held_out], labels[held_out]))
    np.testing.assert_allclose(probe.validation, scores)
    assert probe.setting == strengths[int(np.argmax(scores))] and len(set(scores)) > 1
    final = LogisticRegression(C=1 / probe.setting, tol=1e-8, max_iter=10_000).fit(features, labels)
    assert probe.accuracy == final.score(whiten(train, test), test.labels)
    alone = evaluate_probe(train, test, fit_logistic, [probe.setting], 0.1)
    assert alone.accuracy == probe.accuracy and not len(alone.validation)


def test_labels_need_not_be_consecutive():
    train, test = make_examples(120, 0), make_examples(80, 1)
    far = [Examples(features, 10 * labels + 3) for features, labels in (train, test)]
    spread = evaluate_probe(*far, fit_logistic, [1.0], 0.1)
    assert spread.accuracy == evaluate_probe(train, test, fit_logistic, [1.0], 0.1).accuracy > 0.5
    unknown = Examples(test.features, np.where(test.labels == 0, 9, test.labels))  # a class that was never seen
    assert evaluate_probe(train, unknown, fit_logistic, [1.0], 0.1).accuracy < 0.75


def test_the_head_of_a_probe_reads_features_as_they_are():
    train, test = make_examples(120, 0), make_examples(80, 1)
    train.features[:, 3] = test.features[:, 3] = 7  # constant: left out
    spread = Examples(train.features, 2 * train.labels)  # classes 0, 2, 4, 6 of 8
    kernel, bias = learn_head(spread, fit_logistic, 1.0, 8)
    logits = test.features @ kernel + bias
    expected = evaluate_probe(train, test, fit_logistic, [1.0], 0.1).accuracy
    assert np.mean(logits.argmax(axis=1) == 2 * test.labels) == expected > 0.5 and not kernel[3].any()
    assert (logits[:, 1::2] == probe.NEVER).all()


def test_the_validation_part_is_a_fraction_of_each_class():
    labels = np.repeat([3, 5, 8, 9], [100, 10, 2, 1])
    rows = select_validation(labels, 0.1, 0)
    assert np.bincount(labels[rows], minlength=10)[[3, 5, 8, 9]].tolist() == [10, 1, 1, 0]
    assert len(set(rows)) == len(rows)
    assert (select_validation(labels, 0.1, 0) == rows).all() and (select_validation(labels, 0.1, 1) != rows).any()


def descend_by_numpy(features, labels, rate, orders, batch):
    """SGD with momentum 0.9 and a cosine, in float64."""
    weights, bias = np.zeros((features.shape[1], labels.max() + 1)), np.zeros(labels.max() + 1)
    moments = [np.zeros_like(weights), np.zeros_like(bias)]
    steps = len(orders) * (len(labels) // batch)
    for step in range(steps):
        epoch, number = divmod(step, len(labels) // batch)
        rows = orders[epoch][number * batch : (number + 1) * batch]
        error = (predict(weights, bias, features[rows]) - np.eye(len(bias))[labels[rows]]) / batch
        moments = [0.9 * old + new for old, new in zip(moments, (features[rows].T @ error, error.sum(0)), strict=True)]
        now = rate * (1 + np.cos(np.pi * step / steps)) / 2
        weights, bias = weights - now * moments[0], bias - now * moments[1]
    return weights, bias


def test_blocks_of_rows_give_the_same_loss_and_gradient(monkeypatch):
    examples = make_examples(103, 3)
    head = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32), np.arange(4, dtype=np.float32)
    weights = np.random.default_rng(1).uniform(size=103).astype(np.float32)
    arguments = tuple(map(jnp.asarray, (examples.features, examples.labels.astype(np.int32), weights)))
    found = []
    for block in (2**26, 4 * 10, 4 * 103, 1):
        monkeypatch.setattr(probe, "BLOCK", block)
        found.append(jax.jit(jax.value_and_grad(lambda head: probe._sum_losses(head, *arguments)))(head))
    for other in found[1:]:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-4), other, found[0])


@pytest.mark.slow
def test_the_memory_of_a_fit_does_not_grow_with_the_logits(monkeypatch):
    monkeypatch.setattr(probe, "BLOCK", 50 * 256)

    def temporaries(count):
        shapes = [((count, 8), "float32"), ((count,), "int32"), ((count,), "float32"), ((), "float32")]
        arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        head = (jax.ShapeDtypeStruct((8, 50), "float32"), jax.ShapeDtypeStruct((50,), "float32"))
        minimise = jax.jit(probe._minimise.__wrapped__)
        return minimise.lower(*arguments, head).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(65_536) < temporaries(4096) + 1_000_000  # whose logits are 13 MB


def test_a_probe_that_does_not_fit_is_refused_with_its_size():
    device = jax.devices()[0]
    probe.check_memory(50_000, 768, 1000, 4, device)
    with pytest.raises(UserError, match=r"14,197,122 images, 1,024 features and 21,843 classes takes 17\d\.\d GB"):
        probe.check_memory(14_197_122, 1024, 21_843, 4, device)


def test_rows_of_each_class_are_shuffled_as_they_always_were():
    labels = np.random.default_rng(0).integers(0, 30, 500)
    random = np.random.default_rng(5)
    expected = [random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    for rows, other in zip(expected, permute_classes(labels, 5), strict=True):
        np.testing.assert_array_equal(rows, other)


def test_sgd_is_what_it_says():
    train = make_examples(90, 0)
    features, labels = whiten(train, train), train.labels.astype(np.int32)
    rows, rates = np.arange(10, 90), [0.1, 1.0]
    found = fit_sgd(features, labels, rows, rates, epochs=3, batch=32, seed=5)
    orders = [np.asarray(jax.random.permutation(key, 80)) for key in jax.random.split(jax.random.key(5), 3)]
    for rate, weights, bias in zip(rates, *found, strict=True):
        expected = descend_by_numpy(features[rows].astype(np.float64), labels[rows], rate, orders, 32)
        np.testing.assert_allclose(weights, expected[0], atol=1e-5)
        np.testing.assert_allclose(bias, expected[1], atol=1e-5)


def test_sgd_comes_near_logistic_regression():
    train, test = make_examples(400, 0), make_examples(400, 1)
    trained = evaluate_probe(train, test, partial(fit_sgd, epochs=20, batch=64), [300.0, 0.03], 0.1)
    assert trained.setting == 0.03
    assert abs(trained.accuracy - evaluate_probe(train, test, fit_logistic, [1.0], 0.1).accuracy) < 0.03


def test_features_must_be_finite():
    train, test = make_examples(20, 0), make_examples(20, 1)
    test.features[0] = np.nan
    with pytest.raises(UserError, match="1 of 20 test images are not finite"):
        evaluate_probe(train, test, fit_logistic, [1.0], 0.1)


def test_what_no_probe_can_learn_from_is_refused():
    features = np.eye(3, dtype=np.float32)
    single, unknown = Examples(features, np.arange(3)), Examples(features, np.array([0, -1, 1]))
    with pytest.raises(UserError, match=r"none can be held out to choose among 0\.1, 10; give l2 "):
        evaluate_probe(single, single, fit_logistic, [0.1, 10.0], 0.1)
    with pytest.raises(UserError, match=r"1 of 3 test images have no label \(-1\)"):
        evaluate_probe(single, unknown, fit_logistic, [0.1], 0.1)
