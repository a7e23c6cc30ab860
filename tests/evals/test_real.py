import json

import fsspec
import numpy as np
import pytest

from tests.conftest import ROOT
from vit_jax import UserError
from vit_jax.evals import logit_metrics, scores

PUBLISHED = ROOT.parent / "shared" / "data" / "imagenet_real.json"


def test_any_label_counts_and_images_without_are_left_out(tmp_path):
    (tmp_path / "real.json").write_text("[[], [970, 795], [230], [809], []]")
    labels = logit_metrics.read_real_labels(tmp_path / "real.json")
    assert labels.tolist() == [[-1, -1], [970, 795], [230, -1], [809, -1], [-1, -1]]
    logits = np.zeros((5, 1000), np.float32)
    logits[np.arange(5), [3, 795, 230, 5, 809]] = 1
    assert scores.top_k_accuracy(logits, labels) == 2 / 3


def test_labels_may_lie_in_a_bucket():
    fsspec.filesystem("memory").pipe_file("/labels/real.json", b"[[3], [], [1, 2]]")
    np.testing.assert_array_equal(
        logit_metrics.read_real_labels("memory://labels/real.json"), [[3, -1], [-1, -1], [1, 2]]
    )


def test_images_are_found_by_file_name():
    labels = np.arange(20, dtype=np.int32).reshape(10, 2)
    files = ["val/n01440764/ILSVRC2012_val_00000010.JPEG", "ILSVRC2012_val_00000001.JPEG"]
    assert logit_metrics.select_labels(labels, files).tolist() == [[18, 19], [0, 1]]
    for name in ("ILSVRC2012_val_00000011.JPEG", "ILSVRC2012_val_00000000.JPEG", "n01440764_10026.JPEG"):
        with pytest.raises(UserError, match=r"is not one of the 10 images with ReaL labels"):
            logit_metrics.select_labels(labels, [name])


@pytest.mark.parametrize("text", ["", "{}", "[]", "[[]]", "[[1], 2]", '[["1"]]', "[[1000]]", "[[true]]"])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "real.json").write_text(text)
    with pytest.raises(UserError, match=r"cannot read|holds no ReaL labels"):
        logit_metrics.read_real_labels(tmp_path / "real.json")


@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs the published ReaL labels")
def test_the_published_labels_score_as_a_direct_computation():
    labels, lists = logit_metrics.read_real_labels(PUBLISHED), json.loads(PUBLISHED.read_text())
    assert len(labels) == 50_000 and np.count_nonzero(labels >= 0) == 57_553
    assert np.count_nonzero((labels >= 0).any(axis=1)) == 46_837
    # Made-up predictions: some label where there are any, for every other image.
    random = np.random.default_rng(0)
    predicted = random.integers(0, 1000, len(lists))
    for row in range(0, len(lists), 2):
        predicted[row] = lists[row][-1] if lists[row] else 0
    rows = random.permutation(len(lists))[:2000]
    logits = np.eye(1000, dtype=np.float32)[predicted[rows]]
    files = [f"ILSVRC2012_val_{row + 1:08d}.JPEG" for row in rows]
    hits = [predicted[row] in lists[row] for row in rows if lists[row]]
    assert scores.top_k_accuracy(logits, logit_metrics.select_labels(labels, files)) == sum(hits) / len(hits)
