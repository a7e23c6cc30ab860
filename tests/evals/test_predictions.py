import json

import numpy as np
import pytest

from configs import base
from vit_jax import UserError, interop
from vit_jax.evals import predictions

WNIDS = interop.class_wnids(1000)


class Source:
    """Images with names, of classes with names."""

    def __init__(self, names, class_names=None, class_ids=None):
        self.names, self.class_names, self.class_ids = names, class_names, class_ids

    def __len__(self):
        return len(self.names)

    def example_name(self, index):
        return self.names[index]


def one_hot(classes, count=1000):
    return 5 * np.eye(count, dtype=np.float32)[classes]


def test_scores_of_the_labels_that_the_data_have():
    logits, labels = one_hot([0, 1, 1, 2], 3), np.array([0, 1, 2, 2], np.int32)
    found = predictions.score_predictions(
        base.evaluation("predictions"), Source(["a", "b", "c", "d"]), logits, labels, "softmax"
    )
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
    found = predictions.score_predictions(
        evaluation, Source(names), one_hot([809, 795, 7, 1]), np.zeros(4, np.int32), "softmax"
    )
    assert (found["accuracy"], found["n"]) == (pytest.approx(2 / 3), 3) and "class_accuracy" not in found


def test_a_class_map_compares_shared_classes_only(tmp_path):
    """The best of the shared classes counts, also where another class is more probable."""
    (tmp_path / "map.json").write_text(json.dumps({"fish": [WNIDS[0], WNIDS[1]], "bird": [WNIDS[10]]}))
    logits = one_hot([1, 999, 10])
    logits[1, 10] = 1
    evaluation = base.evaluation("predictions", class_map=str(tmp_path / "map.json"))
    source = Source(["a", "b", "c"], class_names=("bird", "stone", "fish"))
    found = predictions.score_predictions(evaluation, source, logits, np.array([2, 0, 1], np.int32), "softmax")
    assert (found["accuracy"], found["class_accuracy"], found["n"]) == (1.0, 1.0, 2)
    text = predictions.format_predictions(evaluation, source, logits, np.array([2, 0, 1], np.int32))
    assert text.splitlines()[1:] == ["fish,1,0,1", "bird,0,1,1"]
    with pytest.raises(UserError, match="1,000 classes of ImageNet, not 10"):
        predictions.score_predictions(evaluation, source, logits[:, :10], np.array([2, 0, 1], np.int32), "softmax")


def test_a_confusion_matrix_needs_one_label_an_image():
    with pytest.raises(UserError, match="one label an image"):
        predictions.format_predictions(
            base.evaluation("classify"), Source(["a"]), one_hot([1]), np.array([[1, -1]], np.int32)
        )
