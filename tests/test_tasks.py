"""Losses, smoothing and MixUp, against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import base
from vit_jax import UserError
from vit_jax.data import ClassFacts
from vit_jax.evals import scores
from vit_jax.tasks import Classify, Distill, Regress
from vit_jax.tasks.class_weights import balanced_weights, effective_weights, make_class_weights, make_log_priors

LOGITS = jnp.array([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]])
LABELS = jnp.array([2, 1])


def test_softmax_and_sigmoid_losses():
    task = Classify(3, "softmax")
    expected = [np.log(np.exp(row).sum()) - row[label] for row, label in zip(np.array(LOGITS), LABELS, strict=True)]
    np.testing.assert_allclose(task.losses(LOGITS, task.targets(LABELS)), expected, rtol=1e-6)

    task = Classify(3, "sigmoid")
    on = np.eye(3)[np.array(LABELS)]
    p = 1 / (1 + np.exp(-np.array(LOGITS)))
    expected = -(on * np.log(p) + (1 - on) * np.log(1 - p)).sum(axis=1)
    np.testing.assert_allclose(task.losses(LOGITS, task.targets(LABELS)), expected, rtol=1e-5)


def test_smoothing():
    np.testing.assert_allclose(Classify(4, "softmax", 0.1).targets(LABELS)[0], [0.025, 0.025, 0.925, 0.025], rtol=1e-6)
    np.testing.assert_allclose(Classify(4, "sigmoid", 1e-4).targets(LABELS)[0], [1e-4, 1e-4, 1 - 1e-4, 1e-4], rtol=1e-6)


def mixed_by(task, seeds, images, targets):
    """The images and targets that the task makes of one batch in so many steps, steps first."""
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    mixed = jax.jit(jax.vmap(lambda key: task.mix(key, images, targets)))(keys)
    return jax.tree.map(np.array, mixed)


def test_mixup_mixes_each_row_with_the_one_before_by_one_share():
    task = Classify(8, mixup=0.4)
    targets = jnp.eye(8)
    images = jnp.broadcast_to(jnp.arange(8.0)[:, None, None, None], (8, 2, 2, 3))
    shares = []
    for mixed, mixed_targets in zip(*mixed_by(task, 50, images, targets), strict=True):
        share = float(mixed_targets[3, 3])
        assert 0.5 <= share <= 1
        np.testing.assert_allclose(mixed_targets, share * np.eye(8) + (1 - share) * np.roll(np.eye(8), 1, 0), atol=1e-6)
        np.testing.assert_allclose(
            mixed[:, 0, 0, 0], share * np.arange(8) + (1 - share) * np.roll(np.arange(8), 1), atol=1e-5
        )
        shares.append(share)
    assert len(set(shares)) == 50


def test_mixup_happens_in_its_share_of_the_steps():
    task = Classify(2, mixup=0.8, mixup_probability=0.25)
    _, targets = mixed_by(task, 400, jnp.zeros((2, 1, 1, 3)), jnp.eye(2))
    assert 0.18 < np.mean(targets[:, 0, 0] < 1) < 0.32


def test_both_classes_of_a_mixed_image_may_count_as_one():
    task = Classify(4, "sigmoid", cutmix=1.0, mixup=0.8, mixed_labels="one")
    batch = {"image": jnp.zeros((4, 2, 2, 3)), "label": jnp.arange(4)}
    _, targets = task.train_examples(jax.random.key(0), batch)
    np.testing.assert_array_equal(targets, np.eye(4) + np.roll(np.eye(4), 1, 0))


def test_several_labels_an_image():
    labels = jnp.array([[2, 0, -1], [-1, -1, -1], [1, -1, -1]])
    np.testing.assert_allclose(Classify(3, "sigmoid").targets(labels), [[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    smooth = Classify(3, "sigmoid", 0.1).targets(labels)
    np.testing.assert_allclose(smooth, [[0.9, 0.1, 0.9], [0.1, 0.1, 0.1], [0.1, 0.9, 0.1]], rtol=1e-6)


def cut(seeds, **options):
    """Rows of one colour each, mixed: the first row's pixels from the last, and its share of its own target."""
    images = jnp.broadcast_to(jnp.arange(1.0, 5.0)[:, None, None, None], (4, 16, 24, 3))
    return zip(*mixed_by(Classify(4, **options), seeds, images, jnp.eye(4)), strict=True)


def test_cutmix_pastes_one_box_of_the_row_before():
    areas, own = [], []
    for mixed, targets in cut(100, cutmix=1.0):
        pasted = mixed[1] == 1.0
        assert ((mixed[1] == 2.0) | pasted).all() and (pasted == pasted[..., :1]).all()
        np.testing.assert_array_equal(mixed[0] == 4.0, pasted)  # the same box in every row
        rows, columns = pasted[..., 0].any(1), pasted[..., 0].any(0)
        np.testing.assert_array_equal(pasted[..., 0], rows[:, None] & columns)
        for line in (rows, columns):
            assert np.abs(np.diff(line.astype(int))).sum() + line[0] + line[-1] in (0, 2)  # one piece
        share = 1 - pasted.mean()
        np.testing.assert_allclose(targets, share * np.eye(4) + (1 - share) * np.roll(np.eye(4), 1, 0), atol=1e-6)
        areas.append(pasted.mean())
        own.append(share)
    # A box of area U(0, 1), cut off at the border: by its centre, so less than half on average.
    assert 0.2 < np.mean(areas) < 0.45 and max(areas) > 0.6 and min(areas) < 0.1


def test_mixup_and_cutmix_together_each_mix_half_of_the_steps():
    mixed = list(cut(300, cutmix=1.0, mixup=1.0, mixup_probability=0.8))
    blended = np.mean([len(np.unique(images[1])) == 1 and images[1].flat[0] != 2 for images, _ in mixed])
    boxes = np.mean([len(np.unique(images[1])) == 2 for images, _ in mixed])
    assert 0.3 < blended < 0.5 and 0.25 < boxes < 0.5


def test_images_without_a_label_are_left_out_and_logits_that_are_no_numbers_are_wrong():
    logits = jnp.array([[9.0, 1, 0], [9, 1, 0], [jnp.nan] * 3, [0, 1, 9]])
    sums = Classify(3).metric_sums(logits, jnp.array([0, -1, 0, 2]), jnp.array([1.0, 1, 1, 0]))
    assert (sums["n"], sums["accuracy"], sums["top5"]) == (2, 1, 1)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_images_of_several_labels_that_have_none_are_left_out(loss):
    logits = np.array([[9.0, 1, 0], [9, 1, 0], [0, 9, 1], [9, 1, 0]], np.float32)
    labels = np.array([[0, 1], [-1, -1], [0, -1], [-1, -1]])
    sums = Classify(3, loss).metric_sums(jnp.array(logits), jnp.array(labels), jnp.ones(4))
    some = Classify(3, loss).metric_sums(jnp.array(logits[::2]), jnp.array(labels[::2]), jnp.ones(2))
    assert sums["n"] == 2 and sums["accuracy"] / sums["n"] == scores.top_k_accuracy(logits, labels) == 0.5
    assert sums == some


# Classes that are not equal in number.

COUNTS = np.array([600.0, 30.0, 3.0])


def test_weights_follow_their_formulas_and_have_a_mean_of_one_over_the_images():
    np.testing.assert_allclose(balanced_weights(COUNTS), COUNTS.sum() / (3 * COUNTS))
    found, numbers = effective_weights(COUNTS, 0.99), (1 - 0.99**COUNTS) / (1 - 0.99)
    np.testing.assert_allclose(found * numbers, (found * numbers)[0])  # 99.76, 26.03 and 2.97 effective images
    for weights in (balanced_weights(COUNTS), found):
        assert (weights * COUNTS).sum() == pytest.approx(COUNTS.sum())
    np.testing.assert_allclose(effective_weights(COUNTS, 0.0), 1.0)
    np.testing.assert_allclose(effective_weights(COUNTS, 1 - 1e-7), balanced_weights(COUNTS), rtol=1e-3)
    np.testing.assert_allclose(balanced_weights(np.array([4.0, 0.0, 4.0])), [1.0, 0.0, 1.0])  # none of a class


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_loss_of_an_image_is_multiplied_by_the_weight_of_its_class(loss):
    plain, task = Classify(3, loss, 0.1), Classify(3, loss, 0.1, class_weights=(1.0, 2.0, 5.0))
    _, targets = task.train_examples(jax.random.key(0), {"image": jnp.zeros((2, 1, 1, 3)), "label": LABELS})
    expected = np.array([5.0, 2.0]) * plain.losses(LOGITS, plain.targets(LABELS))
    np.testing.assert_allclose(task.losses(LOGITS, targets), expected, rtol=1e-6)
    several = jnp.array([[0, 2, -1], [-1, -1, -1], [1, -1, -1]])  # the mean of two; nothing; one
    np.testing.assert_allclose(task.image_weights(several), [3.0, 1.0, 2.0])
    metrics = task.metric_sums(LOGITS, LABELS, jnp.ones(2))
    np.testing.assert_allclose(metrics["loss"], plain.metric_sums(LOGITS, LABELS, jnp.ones(2))["loss"])


def test_weights_are_mixed_as_targets_are():
    task = Classify(2, mixup=0.4, class_weights=(1.0, 3.0))
    labels = jnp.array([0, 1])
    _, (targets, weights) = task.train_examples(jax.random.key(1), {"image": jnp.zeros((2, 1, 1, 3)), "label": labels})
    np.testing.assert_allclose(weights, targets @ jnp.array([1.0, 3.0]), rtol=1e-6)


def test_the_teacher_is_not_weighted():
    task = Distill(3, class_weights=(1.0, 2.0, 5.0), teacher_weight=0.5)
    _, targets = task.train_examples(jax.random.key(0), {"image": jnp.zeros((2, 1, 1, 3)), "label": LABELS})
    taught = LOGITS[::-1]
    expected = 0.5 * np.array([5.0, 2.0]) * Classify(3).losses(LOGITS, jax.nn.one_hot(LABELS, 3))
    expected += 0.5 * task.teacher_losses(LOGITS, taught)
    np.testing.assert_allclose(task.losses(LOGITS, (targets, taught)), expected, rtol=1e-6)


def test_focal_loss_is_that_of_its_equation():
    labels = np.array(LABELS)
    chosen = np.array(jax.nn.softmax(LOGITS))[[0, 1], labels]
    for gamma in (0.0, 0.5, 2.0):
        found = Classify(3, focal_gamma=gamma).losses(LOGITS, jax.nn.one_hot(LABELS, 3))
        np.testing.assert_allclose(found, -((1 - chosen) ** gamma) * np.log(chosen), rtol=1e-5)
        task = Classify(3, "sigmoid", focal_gamma=gamma)
        expected = optax.losses.sigmoid_focal_loss(LOGITS, jax.nn.one_hot(LABELS, 3), gamma=gamma).sum(axis=-1)
        np.testing.assert_allclose(task.losses(LOGITS, task.targets(LABELS)), expected, rtol=1e-5)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_focal_loss_of_certain_predictions_has_a_gradient(loss):
    task = Classify(3, loss, focal_gamma=0.5)
    sure = jnp.array([[200.0, -200.0, -200.0]])
    for label in (0, 1):
        grads = jax.grad(lambda logits, label=label: task.losses(logits, jax.nn.one_hot(jnp.array([label]), 3)).sum())
        assert np.isfinite(grads(sure)).all()


def test_logits_are_shifted_by_the_shares_of_the_classes():
    config = base.get_config()
    config.task.logit_adjustment = 2.0
    task = Classify(3, log_priors=make_log_priors(config, ClassFacts(None, (600, 30, 0))))  # no image counts as one
    shifted = LOGITS + 2 * np.log(np.array([600, 30, 1]) / 631)
    targets = jax.nn.one_hot(LABELS, 3)
    np.testing.assert_allclose(task.losses(LOGITS, targets), Classify(3).losses(shifted, targets), rtol=1e-5)
    assert (
        make_log_priors(config, None) is None and make_log_priors(base.get_config(), ClassFacts(None, (1, 2))) is None
    )


def test_weights_of_a_file(tmp_path):
    config, path = base.get_config(), tmp_path / "weights.json"
    config.task.class_weights = str(path)
    for text, expected in (('{"dog": 2.5}', (1.0, 2.5)), ("[0.5, 4]", (0.5, 4.0))):
        path.write_text(text)
        assert make_class_weights(config, 2, ClassFacts(("cat", "dog"), None)) == expected
    path.write_text('{"1": 3}')
    assert make_class_weights(config, 2, ClassFacts(None, None)) == (1.0, 3.0)
    for text, sentence in (
        ('{"cow": 2}', "has a weight of 'cow', which is not a class of the data"),
        ("[1, 2, 3]", "has 3 weights, but the data have 2 classes"),
        ("[1, -2]", "must give classes weights of at least 0"),
        ("3", "must give classes weights of at least 0"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=sentence):
            make_class_weights(config, 2, ClassFacts(("cat", "dog"), None))
    for weights in ("balanced", "a file that is gone"):  # of a plan or an evaluation, which open no training data
        config.task.class_weights = weights
        assert make_class_weights(config, 2, None) == (1.0, 1.0)


def test_losses_of_numbers_are_those_of_standardised_errors():
    batch = {"image": jnp.zeros((2, 4, 4, 3)), "label": jnp.array([[30.0, 1000.0], [50.0, 400.0]])}
    outputs, scale = jnp.array([[0.5, 2.0], [1.0, -4.0]]), ((40.0, 10.0), (700.0, 100.0))
    inputs, targets = Regress(2, scale=scale).train_examples(jax.random.key(0), batch)
    np.testing.assert_allclose(targets, [[-1, 3], [1, -3]], rtol=1e-6)
    assert inputs["images"] is batch["image"]
    losses = {"l1": [1.25, 0.5], "l2": [1.625, 0.5], "huber": [(1.0 + 0.5) / 2, 0.25]}  # errors (1.5, -1) and (0, -1)
    for loss, expected in losses.items():
        np.testing.assert_allclose(Regress(2, loss, scale=scale).losses(outputs, targets), expected, rtol=1e-6)
    np.testing.assert_allclose(Regress(2, "huber", 0.5, scale).losses(outputs, targets), [0.5, 0.1875], rtol=1e-6)
    task, unknown = Regress(2, "l1"), jnp.array([[1.0, 1.0], [np.nan, 0.0]])
    sums = task.metric_sums(outputs, unknown, jnp.ones(2))
    assert (float(sums["n"]), float(sums["loss"])) == (1, 0.75)
