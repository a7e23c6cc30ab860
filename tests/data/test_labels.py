"""Labels in all sources: -1 says that an image has none, and any other label is a class."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.conftest import write_tfds
from tests.data.test_array_record import write_set
from tests.data.test_parquet import write_table
from tests.data.test_sources import open_source, write_npz
from tests.data.test_webdataset import sample, write_tar
from vit_jax import UserError, data, pack
from vit_jax.data.shards import tf_example

KINDS = ("tfds", "npz", "parquet", "webdataset", "array_record")
PIPE = "resize(4)|value_range(-1,1)"


def two_splits(folder, kind, label):
    """A source whose split train has six images of three classes in turn, and whose split test has two of a label."""
    fields = {"num_classes": 3}
    if kind == "tfds":
        write_tfds(folder, "some", "1.0.0", ["a", "b", "c"], {"train": 6, "test": 2}, labels={"test": label})
        return "tfds:some", {"data_dir": str(folder)}
    if kind == "npz":
        images, names = np.zeros((8, 5, 7, 3), np.uint8), np.array(["a", "b", "c"])
        arrays = {"train_images": images[:6], "train_labels": np.arange(6) % 3, "class_names": names}
        arrays |= {"test_images": images[6:], "test_labels": np.full(2, label)}
        return write_npz(folder / "a.npz", validation_images=None, validation_labels=None, **arrays), {}
    if kind == "parquet":
        write_table(folder / "set" / "train.parquet", count=6)
        write_table(folder / "set" / "test.parquet", count=2, label=[label] * 2)
    if kind == "webdataset":
        write_tar(folder / "set" / "train.tar", *(sample(row, cls=str(row % 3).encode()) for row in range(6)))
        write_tar(folder / "set" / "test.tar", *(sample(row, cls=str(label).encode()) for row in range(2)))
    if kind == "array_record":
        write_set(folder / "set", [[row % 3] for row in range(6)], total=1, info=False)
        write_set(folder / "set", [[label]] * 2, total=1, split="test", info=False)
    return f"{kind}:{folder}/set", fields


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_without_a_label_is_read_and_not_trained_on(tmp_path, tiny, kind, capsys):
    name, fields = two_splits(tmp_path, kind, -1)
    source = open_source(name, "train+test", **fields)
    assert [source[row]["label"] for row in range(8)] == [0, 1, 2, 0, 1, 2, -1, -1]
    assert [source.label(row) for row in (5, 7)] == [2, -1]
    mixed = open_source(f"mix:1*{name}+1*{name}", "test", **fields)
    assert [mixed[row]["label"] for row in range(4)] == [-1] * 4
    sentence = r" of the split test has no label \(-1\); choose only splits whose images have labels"
    needed = dataclasses.replace(source, needs_labels=True)
    assert (needed[5]["label"], needed.label(5)) == (2, 2)
    for read in (needed.__getitem__, needed.label):
        with pytest.raises(UserError, match=sentence):
            read(6)
    tiny.data.update(source=name, split="train+test", preprocess=PIPE, num_examples=None)
    tiny.data.update({"num_classes": None, **fields})
    tiny.batch = 8
    batches = data.train_batches(tiny, NamedSharding(Mesh(jax.devices(), "data"), PartitionSpec("data")))
    with pytest.raises(UserError, match=sentence):
        next(batches)
    command = ["pack", name, f"{tmp_path}/packed", "--num-classes=3", f"--data-dir={tmp_path}"]
    with pytest.raises(UserError, match=sentence):
        pack.main(command)
    pack.main([*command, "--splits=train"])
    assert "6 images (train 6)" in capsys.readouterr().out


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("kind", ["tfds", "npz", "array_record"])  # the other kinds have tests of their own
def test_images_to_predict_need_no_labels(tmp_path, kind, stated):
    """Records and arrays without labels, and with labels that training refuses."""
    name, fields = two_splits(tmp_path, kind, 7)
    if kind == "tfds":
        number = {"label": tfds.features.Tensor(shape=(), dtype=np.int64)} if stated else {}
        features = tfds.features.FeaturesDict({"image": tfds.features.Image(encoding_format="png")} | number)
        (tmp_path / "some" / "1.0.0" / "features.json").write_text(json.dumps(features.to_json()))
    if kind == "npz":
        arrays = dict(np.load(tmp_path / "a.npz"))
        arrays["test_labels"] = np.ones((2, 3))
        np.savez(tmp_path / "a.npz", **{key: value for key, value in arrays.items() if stated or "labels" not in key})
    if kind == "array_record" and not stated:
        record = tf_example.Example()
        record.features.feature.add(key="image").value.bytes_list.value.append(b"\xff\xd8")
        (shard,) = (tmp_path / "set").glob("test*")
        writer = ArrayRecordWriter(str(shard), "group_size:1")
        writer.write(record.SerializeToString())
        writer.write(record.SerializeToString())
        writer.close()
    images = data.list_source_images(name, "test", fields.get("data_dir"))
    assert len(images) == 2 and [image.source.label(image.index) for image in images] == [-1, -1]
    assert all(image.read() is not None for image in images)
    with pytest.raises(UserError, match=r"label"):
        open_source(name, "test", **fields)[0]


@pytest.mark.parametrize("label", [3, -2])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "npz"])  # which is checked when it is opened
def test_a_label_that_is_no_class_is_refused(tmp_path, kind, label):
    name, fields = two_splits(tmp_path, kind, label)
    source = open_source(name, "test", **fields)
    with pytest.raises(UserError, match=rf"has the label {label}, but there are 3 classes"):
        source[0]
    with pytest.raises(UserError, match=rf"has the label {label}, but there are 3 classes"):
        open_source(f"mix:1*{name}+1*{name}", "test", **fields)[0]
