import json

import numpy as np
import pytest

from configs import base
from tests.evals.helpers import make_source
from vit_jax import UserError, interop
from vit_jax.evals import logit_metrics, prediction_files
from vit_jax.model import create

WNIDS = interop.class_wnids(1000)


def score(evaluation, source, logits, labels):
    """The scores of a model with as many classes as there are logits."""
    model = create("ViT-mu/4", num_classes=logits.shape[1])
    return logit_metrics.score_predictions(evaluation, source, model, logits, labels)


def one_hot(classes, count=1000):
    return 5 * np.eye(count, dtype=np.float32)[classes]


def test_scores_of_the_labels_that_the_data_have():
    logits, labels = one_hot([0, 1, 1, 2], 3), np.array([0, 1, 2, 2], np.int32)
    found = score(base.evaluation("predictions"), make_source(["a", "b", "c", "d"]), logits, labels)
    confidence = np.exp(5) / (np.exp(5) + 2)
    assert found == {
        "accuracy": 0.75,
        "top5": 1.0,
        "calibration_error": pytest.approx(confidence - 0.75),
        "class_accuracy": pytest.approx((1 + 1 + 0.5) / 3),
        "n": 4,
    }


def test_real_counts_any_label_and_leaves_out_images_without(tmp_path):
    (tmp_path / "real.json").write_text("[[], [970, 795], [230], [809]]")
    names = [f"val/ILSVRC2012_val_{number:08}.JPEG" for number in (4, 2, 1, 3)]
    evaluation = base.evaluation("predictions", labels=str(tmp_path / "real.json"))
    found = score(evaluation, make_source(names), one_hot([809, 795, 7, 1]), np.zeros(4, np.int32))
    assert (found["accuracy"], found["n"]) == (pytest.approx(2 / 3), 3) and "class_accuracy" not in found


def test_a_class_map_compares_shared_classes_only(tmp_path):
    """The best of the shared classes counts, also where another class is more probable."""
    (tmp_path / "map.json").write_text(json.dumps({"fish": [WNIDS[0], WNIDS[1]], "bird": [WNIDS[10]]}))
    logits = one_hot([1, 999, 10])
    logits[1, 10] = 1
    evaluation = base.evaluation("predictions", class_map=str(tmp_path / "map.json"))
    source, labels = make_source(["a", "b", "c"], class_names=("bird", "stone", "fish")), np.array([2, 0, 1], np.int32)
    found = score(evaluation, source, logits, labels)
    assert (found["accuracy"], found["class_accuracy"], found["n"]) == (1.0, 1.0, 2)
    assert (found["accuracy_all"], found["top5_all"]) == (0.5, 1.0)  # of the second image, class 999 comes first
    of_imagenet = create("ViT-mu/4", num_classes=1000)
    counted = logit_metrics.map_predictions(evaluation, source, of_imagenet, logits, labels)
    assert prediction_files.count_confusion(counted)[1].splitlines()[1:] == ["fish,1,0,1", "bird,0,1,1"]
    with pytest.raises(UserError, match=r"covers 3 classes that the model lacks, such as n0\d+; the model's classes"):
        score(evaluation, source, logits[:, :10], labels)


def test_labels_that_do_not_suit_the_model_are_refused(tmp_path):
    (tmp_path / "real.json").write_text("[[1]]")
    labels, source = np.zeros(1, np.int32), make_source(["ILSVRC2012_val_00000001.JPEG"])
    real = {"labels": str(tmp_path / "real.json")}
    with pytest.raises(UserError, match="for models with the 1,000 classes of ImageNet"):
        score(base.evaluation("predictions", **real), source, one_hot([1], 10), labels)
    with pytest.raises(UserError, match="class_map cannot be combined"):
        score(base.evaluation("predictions", **real, class_map="names"), source, one_hot([1]), labels)
    with pytest.raises(UserError, match="no image has a label that is one of the scored classes"):
        score(base.evaluation("predictions"), source, one_hot([1]), labels - 1)


def test_of_many_classes_only_the_cells_that_are_not_0_are_written():
    names = [f"class {number}" for number in range(21_843)]
    logits: np.ndarray = np.zeros((3, 21_843), np.float32)
    logits[[0, 1, 2], [7, 7, 21_842]] = 1
    counted = logit_metrics.Predictions(logits, np.array([7, 7, 0], np.int32), names)
    matrix, text = prediction_files.count_confusion(counted)
    assert matrix is None
    assert text.splitlines() == ["label,prediction,images", "class 0,class 21842,1", "class 7,class 7,2"]


def test_a_confusion_matrix_needs_one_label_an_image():
    with pytest.raises(UserError, match="--save=confusion needs data with one label per image"):
        prediction_files.count_confusion(logit_metrics.Predictions(one_hot([1]), np.array([[1, -1]], np.int32), ["a"]))
