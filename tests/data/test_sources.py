import hashlib
import io
import json
import os
import pickle
import re
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from PIL import ExifTags, Image
from sklearn.datasets import load_digits

from configs.base import get_config
from tests.conftest import ROOT, write_tfds
from vit_jax import MissingData, UserError, data
from vit_jax.data.images import decode
from vit_jax.data.sources import kinds, splits, tfds

DIGITS_TEST = "6349bd62e363bdff"  # of the test images: every published number depends on this split
TFDS = ROOT.parent / "shared" / "data" / "tfds"


def configured(source: str, **fields):
    config = get_config()
    config.data.source = source
    config.data.update(fields)
    return config


def open_source(source: str, split: str, **fields):
    return kinds.open_source(configured(source, **fields), split)


def write_image(path: Path, value: int = 0, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((6, 8, 3), value, np.uint8)).save(path, **options)


@pytest.fixture
def folder(tmp_path):
    """Three classes of 20, 10 and 10 images, `train` only."""
    for name, count in (("cat", 20), ("dog", 10), ("owl", 10)):
        for number in range(count):
            write_image(tmp_path / name / f"{number}.png", number)
    return tmp_path


@pytest.mark.parametrize("count", [1, 7, 100, 1797, 50000, 1281167])
def test_slices_are_those_of_tfds(count):
    import tensorflow_datasets as tfds

    infos = {
        name: tfds.core.SplitInfo(name=name, shard_lengths=[count], num_bytes=0, filename_template=None)
        for name in ("train", "test")
    }
    texts = ["train", "train[:98%]", "train[98%:]", "train[33.3%:66.6%]", "train[-1%:]", "train[:-50%]", "train[0:]"]
    texts += ["train[100:200]", "train[:-1000]", "train[-5:-2]", "train[1_000:]", "train+test[:50%]", "test[:1]+train"]
    for text in texts:
        try:
            parts = tfds.core.splits.AbstractSplit.from_spec(text).to_absolute(infos)
            theirs = [(part.splitname, range(count)[part.from_ : part.to]) for part in parts]
        except ValueError:
            theirs = None
        try:
            ours = splits.select_examples(text, {"train": count, "test": count})
        except UserError as error:
            assert theirs is None or not all(len(rows) for _, rows in theirs), (text, error)
        else:
            assert ours == theirs, text


@pytest.mark.parametrize(
    ("split", "sentence"),
    [
        ("trian", "unknown split 'trian'; did you mean 'train'"),
        ("train[5:2]", r"the slice train\[5:2\] is empty: the split has 10 examples"),
        ("train[:11]", r"the slice train\[:11\] reaches beyond the 10 examples"),
        ("train[:1.5]", "its ends must be whole numbers"),
        ("train[10%:5]", "or both percentages"),
        ("train[3]", r"cannot read the split 'train\[3\]'"),
        ("train[:101%]", "percentages must be from -100% to 100%"),
        ("train[-100.1%:]", "percentages must be from -100% to 100%"),
        ("train[:1_]", "its ends must be whole numbers"),
        (f"train[:{'9' * 5000}]", "its ends must be whole numbers"),
        ("train[1__0:]", "its ends must be whole numbers"),
        ("train[:1_%]", "its ends must be whole numbers"),
        ("train[:2shard]", "cannot read the split"),
        ("train+", "cannot read the split"),
        ("", "cannot read the split"),
    ],
)
def test_bad_splits(split, sentence):
    with pytest.raises(UserError, match=sentence):
        splits.select_examples(split, {"train": 10, "test": 10})


def test_digits_are_divided_once_by_class():
    train, test = open_source("digits", "train"), open_source("digits", "test")
    values, labels = load_digits(return_X_y=True)
    assert (len(train), len(test), train.num_classes, train.class_names) == (1438, 359, 10, tuple("0123456789"))
    everything, held_out = Counter(labels), Counter(example["label"] for example in test)
    assert all(held_out[label] == round(everything[label] / 5) for label in range(10))
    together = Counter((example["label"], example["image"].tobytes()) for example in [*train, *test])
    pixels = np.rint(values.reshape(-1, 8, 8, 1) * 255 / 16).astype(np.uint8).repeat(3, axis=3)
    assert together == Counter((int(label), image.tobytes()) for label, image in zip(labels, pixels, strict=True))
    assert hashlib.sha256(b"".join(example["image"].tobytes() for example in test)).hexdigest()[:16] == DIGITS_TEST
    assert pickle.loads(pickle.dumps(test))[5]["label"] == test[5]["label"]


def test_every_kind_has_a_row_in_the_docs():
    table = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "data.md").read_text(), re.MULTILINE)
    assert set(kinds.KINDS) <= {kind for cell in table for kind in re.findall(r"`(\w+)[:`]", cell)}


def test_the_fingerprint_tells_splits_and_sizes_apart():
    texts = ["train", "test", "train[:50%]", "train[50%:]", "train+test", "test+train"]
    prints = [open_source("digits", text).fingerprint for text in texts]
    prints.append(open_source("synthetic", "train", num_classes=10, num_examples=5).fingerprint)
    prints.append(open_source("synthetic", "train", num_classes=10, num_examples=6).fingerprint)
    prints.append(open_source("synthetic", "train", num_classes=11, num_examples=6).fingerprint)
    assert len(set(prints)) == len(prints)
    assert open_source("digits", "train[:100%]").fingerprint == prints[0]


def test_folder_slices_are_not_slices_of_the_classes(folder):
    first, rest = (open_source(f"folder:{folder}", split) for split in ("train[:50%]", "train[50%:]"))
    assert first.class_names == ("cat", "dog", "owl") and first.num_classes == 3
    seen = [(example["label"], int(np.asarray(example["image"])[0, 0, 0])) for example in [*first, *rest]]
    expected = [(label, number) for label, count in enumerate((20, 10, 10)) for number in range(count)]
    assert sorted(seen) == expected and seen != expected
    assert all(3 <= Counter(label for label, _ in seen[:20])[label] <= 14 for label in range(3))
    again = pickle.loads(pickle.dumps(open_source(f"folder:{folder}", "train")))
    assert [(example["label"], int(np.asarray(example["image"])[0, 0, 0])) for example in again] == seen
    before = again.fingerprint
    (folder / "cat" / "0.png").rename(folder / "cat" / "zero.png")
    assert open_source(f"folder:{folder}", "train").fingerprint != before


def test_folder_with_splits(tmp_path):
    for path in ("train/a/1.JPG", "train/b/1.jpeg", "val/b/1.PNG", "test/b/1.webp", "test/b/.2.webp", "test/b/x.txt"):
        write_image(tmp_path / path, format="PNG")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "README").write_text("hello")
    for split in ("val", "validation", "test"):
        source = open_source(f"folder:{tmp_path}", split)
        assert [example["label"] for example in source] == [1] and source.class_names == ("a", "b")
    assert len(open_source(f"folder:{tmp_path}", "train+val")) == 3


def test_folder_turns_photographs_upright(tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    write_image(tmp_path / "a" / "1.jpg", exif=exif)
    assert open_source(f"folder:{tmp_path}", "train")[0]["image"].decode().shape == (8, 6, 3)


@pytest.mark.parametrize(
    ("files", "split", "sentence"),
    [
        ([], "train", "contains no class folders; it must contain either"),
        (["1.png"], "train", r"contains images directly \(1.png\)"),
        (["train/1.png"], "train", r"train contains images directly \(1.png\)"),
        (["train/a/1.png", "cat/1.png"], "train", r"contains both split folders \(train\) and other folders \(cat\)"),
        (["train/a/1.png", "val/a/1.png", "validation/a/1.png"], "train", "both val and validation"),
        (["a/1.txt", "b/1.png"], "train", r"these classes of .* contain no images \(.*\): a"),
        (["train/a/1.png", "val/b/1.png"], "val", r"val has no labels \(its folder b is not a class of train\)"),
        (["train/a/1.png", "val/b/1.png", "val/c/1.png"], "val", "classes that train does not have: b, c"),
        (["train/a/1.png", "val/a/1.txt"], "val", "no images .*: a"),
        (["a/1.png"], "test", "unknown split of the folder .* 'test'; choose from train"),
    ],
)
def test_wrong_folders(tmp_path, files, split, sentence):
    for file in files:
        write_image(tmp_path / file, format="PNG")
    with pytest.raises(UserError, match=sentence):
        open_source(f"folder:{tmp_path}", split)


def test_tfds_without_tensorflow(tfds_folder):
    source = open_source("tfds:tiny", "test[1:]+train[:25%]", data_dir=str(tfds_folder))
    assert source.class_names == ("a", "b", "c") and source.num_classes == 3
    source = pickle.loads(pickle.dumps(source))
    assert [int(np.asarray(example["image"])[0, 0, 0]) for example in source] == [1, 2, 3, 4, 0, 1, 2]
    assert [example["label"] for example in source] == [1, 2, 0, 1, 0, 1, 2]
    assert "1.2.3" in source.name and "tensorflow" not in sys.modules
    with pytest.raises(UserError, match="unknown split 'validation'; choose from test, train"):
        open_source("tfds:tiny", "validation", data_dir=str(tfds_folder))


def test_tfds_names_its_images_where_it_can(tfds_folder):
    write_tfds(tfds_folder, "named", "1.0.0", ["a", "b"], {"train": 3}, "ILSVRC2012_val_{:08}.JPEG")
    source = open_source("tfds:named", "train[1:]", data_dir=str(tfds_folder))
    assert [source.example_name(row) for row in (0, 1)] == [f"ILSVRC2012_val_0000000{row}.JPEG" for row in (2, 3)]
    assert open_source("tfds:tiny", "test", data_dir=str(tfds_folder)).example_name(0) == "test/0"


def test_files_of_tfds_that_change_are_noticed(tfds_folder):
    source = open_source("tfds:tiny", "test", data_dir=str(tfds_folder))
    before, same = source.file_stamp("test", []), source.file_stamp("test", [])
    os.utime(tfds_folder / "tiny" / "1.2.3" / "tiny-test.array_record-00000-of-00001", (1, 1))
    assert before == same != source.file_stamp("test", [])
    again = open_source("tfds:tiny", "test", data_dir=str(tfds_folder))
    assert again.fingerprint == source.fingerprint  # a copy is the same data


@pytest.mark.parametrize(
    ("key", "known"), [("type", "features_dict.FeaturesDict"), ("pythonClassName", "class_label_feature.ClassLabel")]
)
def test_a_prepared_data_set_runs_no_code(tfds_folder, key, known, tmp_path, monkeypatch):
    """TFDS imports the module of any class that `features.json` names, such as one in the current folder."""
    (tfds_folder / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    monkeypatch.syspath_prepend(str(tfds_folder))
    path = tfds_folder / "tiny" / "1.2.3" / "features.json"
    text, named = path.read_text(), f'"{key}": "tensorflow_datasets.core.features.{known}"'
    assert named in text
    path.write_text(text.replace(named, f'"{key}": "planted.Label"'))
    with pytest.raises(UserError, match=r"features.json names the class planted.Label, which is no feature of TFDS"):
        open_source("tfds:tiny", "train", data_dir=str(tfds_folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("way", ["text", "old text", "link", "hidden", "other case"])
def test_no_description_of_features_escapes_the_check(tfds_folder, way, tmp_path):
    """TFDS reads JSON within the strings of `features.json`, follows links, and finds `Tiny` in the folder `tiny`."""
    version = tfds_folder / "tiny" / "1.2.3"
    planted = {"pythonClassName": "planted.Label"}
    old = {"type": "tensorflow_datasets.core.features.features_dict.FeaturesDict"}
    old |= {"content": json.dumps({"features": {"label": planted}}), "proto_cls": "tensorflow_datasets.FeaturesDict"}
    in_text = json.dumps({"label": {"type": "planted.Label", "content": {}}})
    known = {"pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict"}
    described = {"text": known | {"jsonFeature": {"json": in_text}}, "old text": old}.get(way, planted)
    (version / "features.json").write_text(json.dumps(described))
    if way == "link":
        version.rename(tmp_path / "elsewhere")
        version.symlink_to(tmp_path / "elsewhere")
    if way == "hidden":
        (version.parent / ".hidden").mkdir()
        version.rename(version.parent / ".hidden" / "1.2.3")
    name = {"hidden": "tiny/.hidden:1.2.3", "other case": "Tiny"}.get(way, "tiny")
    with pytest.raises(UserError, match=r"names the class planted.Label|cannot read the TFDS dataset"):
        open_source(f"tfds:{name}", "train", data_dir=str(tfds_folder))


@pytest.mark.parametrize("text", ["{", "[" * 10_000, '{"a": 1, "a": 2}'])
def test_a_damaged_description_of_tfds_is_a_sentence(tfds_folder, text):
    (tfds_folder / "tiny" / "1.2.3" / "features.json").write_text(text)
    with pytest.raises(UserError, match=r"cannot read .*features.json: \w+Error: "):
        open_source("tfds:tiny", "train", data_dir=str(tfds_folder))


def test_a_description_too_deep_to_be_checked_is_not_passed(tmp_path):
    (tmp_path / "features.json").write_text(json.dumps({"json": '{"a":' + "[" * 10_000}))
    with pytest.raises(RecursionError):  # a sentence in `find_prepared`
        tfds.check_feature_classes(str(tmp_path))


def test_tfds_that_is_absent(tmp_path):
    with pytest.raises(
        UserError, match=f"no TFDS dataset 'jft300m' in {tmp_path}, and TFDS has no dataset of this name"
    ):
        open_source("tfds:jft300m", "train", data_dir=str(tmp_path))


def test_a_public_dataset_that_is_missing_is_prepared(tmp_path, capsys, monkeypatch):
    import tensorflow_datasets as tfds

    class TinyPublic(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.2.3")
        fault = None

        def _info(self):
            features = {"image": tfds.features.Image(shape=(8, 9, 3)), "label": tfds.features.ClassLabel(names=["a"])}
            return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

        def _split_generators(self, manager):
            if self.fault:
                raise self.fault
            return {"train": self._generate_examples(5)}

        def _generate_examples(self, count):
            for number in range(count):
                file = io.BytesIO()
                Image.new("RGB", (9, 8), (number,) * 3).save(file, "PNG")
                file.seek(0)
                yield number, {"image": file, "label": 0}

    needs, fails = ModuleNotFoundError("No module named 'tensorflow'"), ConnectionError("no network\nat all")
    for fault, first in ((needs, "its code needs TensorFlow"), (fails, "ConnectionError: no network")):
        TinyPublic.fault = fault
        build = f"`pip install tensorflow-datasets tensorflow; tfds build tiny_public .*--data_dir={tmp_path}`"
        with pytest.raises(
            UserError, match=rf"in {tmp_path}, and TFDS cannot prepare this dataset here \(.*{first}\); .*{build}"
        ):
            open_source("tfds:tiny_public", "train", data_dir=str(tmp_path))
        with pytest.raises(
            UserError, match=r"in \S*/no/where, which does not exist, and TFDS cannot prepare this dataset here"
        ):
            open_source("tfds:tiny_public", "train", data_dir=str(tmp_path / "no" / "where"))
        assert not (tmp_path / "no").exists()
    TinyPublic.fault = None
    source = open_source("tfds:tiny_public", "train", data_dir=str(tmp_path))
    assert sorted(int(source[index]["image"].decode().mean()) for index in range(len(source))) == [0, 1, 2, 3, 4]
    assert "TFDS prepares it there now" in capsys.readouterr().err
    again = open_source("tfds:tiny_public", "train", data_dir=str(tmp_path))
    assert again.fingerprint == source.fingerprint and "prepares" not in capsys.readouterr().err

    # The hosts of a pod would all do it at once.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(MissingData, match="prepare it in a separate environment"):
        open_source("tfds:tiny_public", "train", data_dir=str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("server", ["refuses", "is silent"])
def test_a_download_is_announced_and_given_up_without_a_network(tmp_path, capsys, monkeypatch, server):
    import tensorflow_datasets as tfds

    monkeypatch.setattr("vit_jax.data.sources.tfds.CONNECT_TIMEOUT", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if server == "is silent":
            listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/cifar.tar.gz"
        infos = {url: SimpleNamespace(size=170_052_171)}
        monkeypatch.setattr(tfds.core.DatasetBuilder, "url_infos", infos)
        for name in ("cifar10", "food101"):
            start = time.monotonic()
            with pytest.raises(
                UserError, match=rf"nowhere, which does not exist, and the network, or {url}, cannot be"
            ):
                open_source(f"tfds:{name}", "train", data_dir=str(tmp_path / "nowhere"))
            assert time.monotonic() - start < 3 and not (tmp_path / "nowhere").exists()
            told = f"no TFDS dataset '{name}' in {tmp_path}/nowhere, which does not exist: TFDS prepares it there now, "
            assert told + "170 MB to download." in capsys.readouterr().err


def test_a_tfds_dataset_without_classes_is_refused_before_its_download(tmp_path, capsys):
    with pytest.raises(
        UserError, match=r"'div2k' must have the features `image` and `label` \(one class\), but has hr \(Image\), lr"
    ):
        open_source("tfds:div2k", "train", data_dir=str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists() and "prepares" not in capsys.readouterr().err


@pytest.mark.skipif(not TFDS.exists(), reason="needs the shared CIFAR-10")
def test_cifar10():
    source = open_source("tfds:cifar10", "train[98%:]", data_dir=str(TFDS))
    assert len(source) == 1000 and source[999]["image"].decode().shape == (32, 32, 3) and source.class_names[3] == "cat"


def write_npz(path, **arrays):
    """Four images for training and two for validation, each of a colour of its own, of three classes."""
    images = np.arange(6, dtype=np.uint8)[:, None, None, None] + np.zeros((1, 5, 7, 3), np.uint8)
    plain = {"train_images": images[:4], "train_labels": np.array([0, 2, 1, 0])}
    plain |= {"validation_images": images[4:], "validation_labels": np.array([2, 0], np.uint8)}
    np.savez(path, **{name: array for name, array in (plain | arrays).items() if array is not None})
    return f"npz:{path}"


def test_images_in_an_npz_file(tmp_path):
    name = write_npz(tmp_path / "few.npz")
    source = pickle.loads(pickle.dumps(open_source(name, "val+train[1:]")))
    assert (len(source), source.num_classes, source.class_names) == (5, 3, None)
    assert [(int(row["image"][0, 0, 0]), row["label"]) for row in source] == [(4, 2), (5, 0), (1, 2), (2, 1), (3, 0)]
    assert source[0]["image"].shape == (5, 7, 3) and source.example_name(0) == "val/0"
    assert source.overlaps(open_source(name, "train[:2]")) and not source.overlaps(open_source(name, "train[:1]"))
    assert kinds.list_splits(kinds.SourceConfig(name)) == ["train", "validation"]
    named = write_npz(tmp_path / "named.npz", class_names=np.array(list("abcd")))
    assert (open_source(named, "val").class_names, open_source(named, "val").num_classes) == (tuple("abcd"), 4)


def test_a_run_keeps_the_whole_path_of_an_npz_file(tmp_path, monkeypatch):
    write_npz(tmp_path / "few.npz")
    monkeypatch.chdir(tmp_path)
    config = configured("npz:few.npz", preprocess="resize({resolution})|value_range(-1,1)")
    config.resolution = config.batch = 4
    config.evals.test.update(split="val", preprocess=config.data.preprocess)
    completed, info = data.complete_config(config)
    assert completed.data.source == f"npz:{tmp_path}/few.npz" and completed.data.num_classes == 3
    assert info.sample == ""  # its fingerprint covers the contents


def test_the_fingerprint_of_an_npz_file_is_of_its_contents(tmp_path):
    (tmp_path / "copy").mkdir()
    first, copy, other = (tmp_path / name for name in ("a.npz", "copy/a.npz", "copy/b.npz"))
    prints = [open_source(write_npz(path), "train").fingerprint for path in (first, copy)]
    assert prints[0] == prints[1] != open_source(write_npz(other), "train").fingerprint
    changed = np.ones((4, 5, 7, 3), np.uint8)
    assert open_source(write_npz(first, train_images=changed), "train").fingerprint != prints[0]


@pytest.mark.parametrize(
    ("arrays", "split", "sentence"),
    [
        ({}, "test", "unknown split of .*few.npz 'test'; choose from train, validation"),
        ({"train_labels": None}, "val", "few.npz has train_images, but no train_labels"),
        ({"train_images": None, "validation_images": None}, "train", "has no images: a split is two arrays, such as"),
        ({"train_labels": np.zeros(3, int)}, "train", "has 4 train_images, but 3 train_labels"),
        ({"train_labels": np.zeros(4)}, "train", r"whole numbers \[n\] of -1 \(no label\) or more, not float64 \[4\]"),
        ({"train_labels": np.full(4, -2)}, "train", "or more, not int64"),
        ({"train_images": np.zeros((4, 5, 7), np.uint8)}, "train", r"height, width, 3\], not uint8 \[4, 5, 7\]"),
        ({"train_images": np.zeros((4, 5, 7, 3))}, "train", "must be uint8 .*, not float64"),
        ({"train_images": np.array(["a", None])}, "train", "cannot read .*few.npz: Object arrays cannot be loaded"),
        ({"class_names": np.array(["a", "b"])}, "train", "has the label 2, but only 2 names in class_names"),
        ({"class_names": np.array("cat")}, "train", r"class_names of .* must be names \[classes\], not <U3 \[\]"),
    ],
)
def test_wrong_npz_files(tmp_path, arrays, split, sentence):
    with pytest.raises(UserError, match=sentence):
        open_source(write_npz(tmp_path / "few.npz", **arrays), split)


def test_files_that_are_no_npz(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "b.npz").write_text("hello")
    for name, sentence in (
        ("a.npy", "one array, not an .npz file"),
        ("b.npz", "cannot read .*b.npz"),
        ("c", "No such"),
    ):
        with pytest.raises(UserError, match=sentence):
            open_source(f"npz:{tmp_path / name}", "train")


def test_slices_of_synthetic_images():
    fields = {"num_classes": 10, "num_examples": 3000}
    whole, part = (open_source("synthetic", split, **fields) for split in ("test", "test[:16]"))
    assert len(part) == 16 and len(open_source("synthetic", "test[10%:20%]+val[-5:]", **fields)) == 105
    assert [example["image"].tobytes() for example in part] == [whole[i]["image"].tobytes() for i in range(16)]
    assert len(open_source("synthetic", "test[:2000]", **fields)) == 2000
    with pytest.raises(UserError, match="is empty"):
        open_source("synthetic", "test[5:5]", **fields)


def test_synthetic_images_stay_what_they_are():
    """Their digest is that of version 0.1."""
    source = open_source("synthetic", "train", num_classes=7, num_examples=20)
    arrays = [source[index]["image"] for index in range(20)]
    assert hashlib.sha256(b"".join(map(np.ndarray.tobytes, arrays))).hexdigest()[:16] == "aa5e66c191fedcd5"


def test_synthetic_images_are_a_function_of_their_number():
    fields = {"num_classes": 7, "num_examples": 303_000_000}
    source = open_source("synthetic", "train", **fields)
    assert len(source) == 303_000_000 and len(open_source("synthetic", "test", **fields)) == 1000
    image, label = source[302_999_999].values()
    assert image.shape == (224, 224, 3) and image.dtype == np.uint8 and 0 <= label < 7
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(source))[302_999_999]["image"], image)
    assert np.abs(source[0]["image"].astype(int) - source[1]["image"]).max() > 0
    assert len({source[number]["label"] for number in range(100)}) == 7
    assert open_source("synthetic", "test", **fields)[0]["image"].tobytes() != source[0]["image"].tobytes()
    with pytest.raises(UserError, match=r"needs --config.data.num_classes and --config.data.num_examples"):
        open_source("synthetic", "train")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("tfdss:cifar10", "unknown data source 'tfdss'; did you mean 'tfds'"),
        ("digits:3", "write --config.data.source=digits$"),
        ("folder", "say where the images lie: --config.data.source=folder:PATH"),
        ("array_record:", "say where the shards lie: --config.data.source=array_record:FOLDER"),
        ("npz", "say where the file lies: --config.data.source=npz:PATH"),
        ("tfds", "say which dataset: --config.data.source=tfds:NAME"),
        ("/nowhere/photos", "unknown data source '/nowhere/photos'; did you mean 'folder:/nowhere/photos'"),
        ("gs://bucket/photos", "did you mean 'folder:gs://bucket/photos'"),
        ("folder:/nowhere", "there is no folder /nowhere; a folder of images contains either {train,val,test}/<class>"),
    ],
)
def test_unknown_sources(source, sentence):
    with pytest.raises(UserError, match=sentence):
        open_source(source, "train")


def test_a_folder_whose_name_is_nearly_that_of_another(tmp_path, monkeypatch):
    write_image(tmp_path / "photos" / "a" / "1.png")
    (tmp_path / "photos.zip").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="unknown data source 'photos'; did you mean 'folder:photos'"):
        open_source("photos", "train")
    with pytest.raises(
        UserError, match=rf"no folder {tmp_path}/phtos \(did you mean '{tmp_path}/photos'\?\); a folder"
    ):
        open_source("folder:phtos", "train")
    (tmp_path / "photos" / "train-00000-of-00001.array_record").touch()
    with pytest.raises(UserError, match="did you mean 'array_record:photos'"):
        open_source("photos", "train")


def digits_config():
    config = configured("digits", preprocess="resize({resolution})|value_range(-1,1)")
    config.resolution = 8
    config.evals.test.preprocess = "resize({resolution})|value_range(-1,1)"
    return config


def test_a_batch_larger_than_the_data_is_told(caplog):
    config = digits_config()
    config.batch = 1438
    data.complete_config(config)
    assert not caplog.records
    config.batch = 1440
    data.complete_config(config)
    warning = "a batch has 1440 images, but digits train has only 1438, so a step sees some of them more than once"
    assert [record.message for record in caplog.records] == [f"{warning}; lower --config.batch"]


def test_complete_fills_in_what_the_data_tells():
    config = digits_config()
    with pytest.raises(UserError, match=r"a plan does not open the data; add --config.data.num_classes=N and "):
        data.spec(config)
    completed, info = data.complete_config(config)
    assert data.spec(completed) == data.DataSpec((8, 8, 3), 10, 1438) and config.data.num_classes is None
    assert info.class_names == tuple("0123456789")
    again, same = data.complete_config(completed)
    assert again.to_json() == completed.to_json() and same == info
    config.data.preprocess = "resize({resolution})|flip_lr|value_range(-1,1)"
    assert data.complete_config(config)[1].fingerprint != info.fingerprint


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data.num_classes": 11}, "data.num_classes is 11, but digits has 10"),
        ({"data.num_examples": 5}, "data.num_examples is 5, but digits train has 1438"),
        ({"data.split": "validation"}, "unknown split 'validation'"),
        ({"data.preprocess": "resise(8)|value_range(-1,1)"}, "did you mean 'resize'"),
        ({"evals.test.split": "tset"}, "in evals.test: unknown split 'tset'; did you mean 'test'"),
        ({"evals.test.preprocess": "resize(8)"}, "in evals.test: .*must contain value_range exactly once"),
        (
            {"evals.test.preprocess": "resize(9)|value_range(-1,1)"},
            r"gives images of \(9, 9, 3\), but the model needs \(8, 8, 3\)",
        ),
        (
            {"data.preprocess": "resize(8)|value_range(0,1)"},
            r"evals.test.preprocess ends with value_range\(-1,1\), but the model needs value_range\(0,1\); make",
        ),
    ],
)
def test_complete_notices(changes, sentence):
    config = digits_config()
    config.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match=sentence):
        data.complete_config(config)


def test_images_of_sources_decode_as_published(tmp_path):
    stored = np.load(ROOT / "tests" / "fixtures" / "pixels.npz")
    encoded = stored["3/jpeg"].tobytes()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(encoded)
    source = open_source(f"folder:{tmp_path}", "train")
    np.testing.assert_array_equal(source[0]["image"].decode(), decode.decode_image(encoded, "x"))
