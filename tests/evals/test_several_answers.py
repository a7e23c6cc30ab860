"""Scores of several answers an image, which equal those of scikit-learn: average precision, F1, MAE and R²."""

import dataclasses

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image
from sklearn import metrics

from tests.evals.helpers import make_source
from vit_jax import UserError, create, evals
from vit_jax.config import get_config
from vit_jax.evals.multi_label import average_precision, check_multi_label, score_multi_label
from vit_jax.evals.regression import score_regression
from vit_jax.inference import make_inference
from vit_jax.model import parameter_shapes
from vit_jax.sharding import make_mesh

FIELDS, RANDOM = ConfigDict(), np.random.default_rng(0)
MODEL = create("ViT-mu/4", num_classes=7, loss="sigmoid", multi_label=True)


def padded(truth):
    rows: np.ndarray = np.full((len(truth), 7), -1, np.int32)
    for row, own in zip(rows, truth, strict=True):
        row[: own.sum()] = np.flatnonzero(own)
    return rows


@pytest.mark.parametrize("digits", [9, 1, 0])  # rounded, many images have the same score
def test_classes_are_scored_as_by_scikit_learn(digits):
    truth = RANDOM.random((400, 7)) < np.linspace(0.02, 0.6, 7)
    logits = (2 * truth - 1.5 + 2 * RANDOM.standard_normal(truth.shape)).round(digits).astype(np.float32)
    found = score_multi_label(FIELDS, make_source(), MODEL, logits, padded(truth))
    assert found["map"] == pytest.approx(metrics.average_precision_score(truth, logits), abs=1e-9)
    for kind in ("micro", "macro"):
        expected = metrics.f1_score(truth, logits > 0, average=kind)
        assert found[f"f1_{kind}"] == pytest.approx(expected, abs=1e-9)
    losses = [metrics.log_loss(truth[:, k], 1 / (1 + np.exp(-logits[:, k].astype(float)))) for k in range(7)]
    assert found["loss"] == pytest.approx(sum(losses), rel=1e-6) and found["n"] == 400


def test_classes_that_do_not_occur_and_images_without_one():
    logits, labels = np.array([[1.0, -1.0], [-1.0, 2.0], [2.0, -3.0]]), np.array([[0], [-1], [-1]])
    found = score_multi_label(FIELDS, make_source(), MODEL, logits, labels)
    assert (found["map"], found["f1_macro"], found["f1_micro"], found["n"]) == (0.5, 2 / 3, 0.5, 3)
    single = score_multi_label(FIELDS, make_source(), MODEL, logits, labels[:, 0])  # -1: the label is not known
    assert (single["map"], single["n"]) == (1, 1)
    with pytest.raises(UserError, match="no image has one of the classes"):
        score_multi_label(FIELDS, make_source(), MODEL, logits, np.full((3, 1), -1))
    with pytest.raises(UserError, match="sigmoid loss, not softmax"):
        check_multi_label(FIELDS, make_source(), create("ViT-mu/4", num_classes=7))
    assert average_precision(np.array([np.nan, 1.0]), np.array([False, True])) in (0.5, 1.0)  # and no error


def test_numbers_are_scored_in_their_units_as_by_scikit_learn():
    truth = (RANDOM.standard_normal((300, 3)) * [1, 50, 1e4] + [0, 1e3, 1e5]).astype(np.float32)
    scale = [(0.5, 2.0), (990.0, 40.0), (1.1e5, 9e3)]
    outputs = ((truth + RANDOM.standard_normal(truth.shape) * [0.5, 20, 5e3] - 3) / 7).astype(np.float32)
    model = create("ViT-mu/4", num_classes=3, loss="l1", target_scale=scale)
    numbers = outputs.astype(float) * np.array(scale)[:, 1] + np.array(scale)[:, 0]
    source = make_source(class_names=("age", "a/b", "size"))
    unknown: np.ndarray = np.full((2, 3), np.nan, np.float32)
    found = score_regression(
        FIELDS, source, model, np.append(outputs, unknown, axis=0), np.append(truth, unknown, axis=0)
    )
    of_each = metrics.mean_absolute_error(truth, numbers, multioutput="raw_values")
    assert [found[f"mae_{name}"] for name in ("age", "a_b", "size")] == pytest.approx(of_each, rel=1e-9)
    of_each = metrics.r2_score(truth, numbers, multioutput="raw_values")
    assert [found[f"r2_{name}"] for name in ("age", "a_b", "size")] == pytest.approx(of_each, rel=1e-6)
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(truth, numbers), rel=1e-9)
    assert found["r2"] == pytest.approx(metrics.r2_score(truth, numbers), rel=1e-6) and found["n"] == 300
    constant = score_regression(FIELDS, source, model, outputs, np.ones_like(truth))
    assert np.isnan(constant["r2"]) and constant["mae"] > 0
    with pytest.raises(UserError, match="no image has numbers"):
        score_regression(FIELDS, source, model, outputs, truth * np.nan)
    alone = create("ViT-mu/4", num_classes=1, loss="l1")
    one = score_regression(FIELDS, make_source(class_names=("age",)), alone, truth[:, :1], truth[:, :1])
    assert one == {"mae": 0, "r2": 1, "n": 300}


@pytest.mark.parametrize(
    ("loss", "options"),
    [pytest.param("sigmoid", "flags.csv", marks=pytest.mark.slow), ("l2", "numbers.csv,targets=age+weight")],
)
def test_all_images_count_once_on_one_device_and_on_eight(loss, options, tmp_path):
    """19 images in batches of 5 and of 8 leave rows to pad."""
    (tmp_path / "photos").mkdir()
    lines = {"flags.csv": ["image,red,green"], "numbers.csv": ["image,age,weight"]}
    for number in range(19):
        Image.fromarray(RANDOM.integers(0, 256, (8, 8, 3), np.uint8)).save(tmp_path / "photos" / f"{number}.png")
        lines["flags.csv"].append(f"{number},{number % 2},{number % 3 // 2}")
        lines["numbers.csv"].append(f"{number},{30 + number},{number**2}")
    for name, text in lines.items():
        (tmp_path / name).write_text("\n".join(text))
    model = create("ViT-mu/4", resolution=8, num_classes=2, loss=loss, preprocess="resize(8)|value_range(-1,1)")
    if loss == "l2":
        model = dataclasses.replace(model, target_scale=((39.0, 5.0), (100.0, 90.0)), class_names=("age", "weight"))
    shapes = parameter_shapes(model)
    params = jax.tree.map(lambda leaf: RANDOM.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)
    config, kind = get_config(), "regression" if loss == "l2" else "multi_label"
    config.resolution, config.data.source = 8, f"folder:{tmp_path}/photos,table={tmp_path}/{options}"
    config.evals.test.update({"kind": kind, "split": "train", "preprocess": model.preprocess})
    found = []
    for batch, devices in ((5, 1), (8, 8)):
        config.batch_eval, config.mesh.data = batch, devices
        program = make_inference(model, make_mesh(config, jax.devices()[:devices]), params)
        found.append(evals.run_evaluators(evals.make_evaluators(config, program), params))
    assert found[0] == pytest.approx(found[1], rel=1e-4) and found[0]["test/n"] == 19
