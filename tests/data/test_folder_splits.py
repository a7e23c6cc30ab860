"""Splits by the names that folders and files have elsewhere."""

import numpy as np
import pytest

from tests.data.test_sources import open_source, write_image
from tests.data.test_webdataset import sample, write_tar
from vit_jax import UserError, data, pack
from vit_jax.config.resume import check_data
from vit_jax.data.sources import SourceConfig, list_splits
from vit_jax.data.sources.splits import name_splits


def write_splits(root, *places):
    """Two classes in each of the folders, of images that are their labels."""
    for place in places:
        for label, name in enumerate(("cat", "dog")):
            for number in range(2):
                write_image(root / place / name / f"{number}.png", label)
    return f"folder:{root}"


@pytest.mark.parametrize(
    ("train", "other", "split"),
    [
        ("Training", "Testing", "test"),
        ("training_set/training_set", "test_set/test_set", "test"),
        ("seg_train/seg_train", "seg_test/seg_test", "test"),
        ("asl_alphabet_train/asl_alphabet_train", "asl_alphabet_test", "test"),
        ("Train", "Val", "val"),
        ("train", "valid", "valid"),  # Roboflow's
        ("train/train", "validation", "val"),
        ("TRAIN", "dev", "validation"),
        ("train-images", "TestSet", "test"),
        ("train2017", "val2017", "val"),
    ],
)
def test_folders_that_stand_for_splits_are_splits(tmp_path, train, other, split):
    root = write_splits(tmp_path, train, other)
    write_splits(tmp_path, "__MACOSX/train")  # as in an archive made on macOS
    for name, folder in (("train", train), (split, other)):
        source = open_source(root, name)
        assert source.class_names == ("cat", "dog") and len(source) == 4
        assert all(row["label"] == int(np.asarray(row["image"])[0, 0, 0]) for row in source)
        assert source.example_name(0).startswith(folder)
    assert set(list_splits(SourceConfig(root))) == {"train", "test" if split == "test" else "validation"}


@pytest.mark.parametrize(
    ("places", "sentence"),
    [
        (
            ("seg_train", "seg_test", "seg_pred"),
            r"two ways: as the splits seg_test, seg_train, beside seg_pred, or as 3 ",
        ),
        (("Training", "Masks"), r"as the splits Training, beside Masks, or as 2 classes; to read splits, move Masks "),
        (
            ("Train", "training_set"),
            r"both Train and training_set, which stand for the same split; keep one of them or",
        ),
        (
            ("archive/train", "archive/test"),
            r"the only folder of \S* contains the splits test, train; use \S*/archive$",
        ),
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(tmp_path, places, sentence):
    with pytest.raises(UserError, match=sentence):
        open_source(write_splits(tmp_path, *places), "train")


def test_classes_may_be_called_like_splits(tmp_path):
    for name in ("Bus", "Test", "Train"):  # only two of which would be splits
        write_image(tmp_path / "two" / "train" / name / "1.png")
    for name in ("Bus", "Train"):
        write_image(tmp_path / "one" / name / "1.png")
    assert open_source(f"folder:{tmp_path}/two", "train").class_names == ("Bus", "Test", "Train")
    assert open_source(f"folder:{tmp_path}/one", "train").class_names == ("Bus", "Train")
    assert not name_splits(["bullet train", "steam train", "latest", "contest"])


def test_a_flat_split_beside_its_label_file(tmp_path):
    write_splits(tmp_path, "Training")
    write_image(tmp_path / "Testing" / "1.png", 1)
    (tmp_path / "testing.csv").write_text("1,dog\n")
    assert [row["label"] for row in open_source(f"folder:{tmp_path}", "test")] == [1]


def test_the_first_lines_name_the_classes_of_each_split(tmp_path, tiny, capsys):
    root = write_splits(tmp_path / "photos", "Training", "Testing")
    tiny.data.update(source=root, split="train", num_classes=None, num_examples=None)
    tiny.batch = 4
    info = data.complete_config(tiny)[1]
    lines = ["Split train: 4 images of 2 classes: cat, dog", "Split test: 4 images of 2 classes: cat, dog"]
    assert data.describe_splits(info.opened) == lines
    pack.main(["pack", root, f"{tmp_path}/packed"])
    assert set(lines) <= set(capsys.readouterr().err.splitlines())
    # A run that was started when these folders were classes.
    before = info.fingerprint | {"data set": "folder", "contents": "0", "examples": 8}
    with pytest.raises(UserError, match="data set: folder -> folder with Testing as test, Training as train; "):
        check_data(before, info.fingerprint, False, "workdirs/old")
    with pytest.raises(UserError, match=r"was packed with other settings .*name: .* -> folder with"):
        text = (tmp_path / "packed" / "info.json").read_text()
        (tmp_path / "packed" / "info.json").write_text(text.replace("folder with Testing as test, ", ""))
        pack.main(["pack", root, f"{tmp_path}/packed"])


def test_tar_files_for_testing_are_no_training_files(tmp_path):
    for name in ("training", "testing"):
        write_tar(tmp_path / f"{name}-0.tar", sample(0, cls=b"0"))
    source = f"webdataset:{tmp_path}"
    assert [len(open_source(source, split, num_classes=1)) for split in ("train", "test")] == [1, 1]
