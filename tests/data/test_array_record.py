"""Records: what is written is read, and what is damaged, missing or mislabelled is named."""

import functools
import json
import os
import pickle
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import grain
import numpy as np
import pytest
from absl import flags

from tests.data.test_sources import configured, open_source
from vit_jax import UserError, data
from vit_jax.data.images import decode, encode
from vit_jax.data.shards import array_record_file, readers, tf_example
from vit_jax.storage import filesystem


def picture(number: int) -> bytes:
    return encode.encode_image(np.full((4, 5, 3), number, np.uint8))


def write_set(folder, labels, total=3, split="train", info=True, **fields):
    """Images whose pixels count them, with the given lists of labels, in shards of equal length."""
    folder.mkdir(exist_ok=True)
    listed = []
    for number in range(total):
        rows = range(len(labels) * number // total, len(labels) * (number + 1) // total)
        name = array_record_file.file_name(split, number, total)
        examples = ((picture(row), labels[row]) for row in rows)
        records, size = array_record_file.write_shard(str(folder / name), examples)
        listed.append({"name": name, "records": records, "bytes": size})
    if info:
        known = {"version": 1, "name": "numbers", "num_classes": 4, "class_names": None, "max_labels": None}
        (folder / "info.json").write_text(json.dumps({**known, "splits": {split: listed}, **fields}))
    return f"array_record:{folder}"


SINGLE = [[row % 4] for row in range(11)]
SEVERAL = [[], [3], [0, 2, 0], [1, 1], [3, 0, 1]]


def numbers(source):
    return [int(np.asarray(tf_example["image"])[0, 0, 0]) for tf_example in source]


@pytest.mark.parametrize("total", [1, 3, 20])
def test_records_are_read_in_order(tmp_path, total):
    where = write_set(tmp_path / "set", SINGLE, total)
    source = pickle.loads(pickle.dumps(open_source(where, "train")))
    assert numbers(source) == list(range(11)) and [e["label"] for e in source] == [row % 4 for row in range(11)]
    assert (source.num_classes, source.max_labels, source.name) == (4, None, "array_record:numbers")
    assert numbers(open_source(where, "train[3:5]+train[-2:]")) == [3, 4, 9, 10]
    image, _ = source.read_example("train", 3)
    assert isinstance(image, decode.EncodedImage) and image.data == picture(3) and not image.exif
    alone = open_source(f"{where}/train-*.array_record", "train")  # a pattern instead of the folder
    assert numbers(alone) == list(range(11)) and alone.fingerprint == source.fingerprint


def test_a_folder_whose_name_is_not_utf8(tmp_path):
    where = write_set(tmp_path / "set", SINGLE, 2)
    named = tmp_path / os.fsdecode(b"s\xe9t")
    shutil.copytree(tmp_path / "set", named)
    assert numbers(open_source(f"array_record:{named}", "train")) == numbers(open_source(where, "train"))
    array_record_file.open_writer(str(named / "other")).close()
    assert array_record_file.ArrayRecordFile("other", str(named / "other")).num_records() == 0


def test_the_fingerprint_tells_contents_not_places(tmp_path):
    where = write_set(tmp_path / "set", SINGLE)
    first = open_source(where, "train").fingerprint
    shutil.copytree(tmp_path / "set", tmp_path / "copy")
    assert open_source(f"array_record:{tmp_path / 'copy'}", "train").fingerprint == first
    assert open_source(write_set(tmp_path / "other", SINGLE, total=4), "train").fingerprint == first
    different = [
        open_source(write_set(tmp_path / "fewer", SINGLE[:-1]), "train").fingerprint,
        open_source(write_set(tmp_path / "small", SINGLE, made_from={"quality": 1}), "train").fingerprint,
        open_source(write_set(tmp_path / "named", SINGLE, class_names=list("abcd")), "train").fingerprint,
        open_source(write_set(tmp_path / "bare", SINGLE, info=False), "train", num_classes=4).fingerprint,
    ]
    assert len({first, *different}) == 5


def test_labels_of_multi_label_data(tmp_path):
    where = write_set(tmp_path / "set", SEVERAL, max_labels=3)
    source = open_source(where, "train")
    labels = np.stack([e["label"] for e in source])
    assert labels.dtype == np.int32 and source.max_labels == 3
    np.testing.assert_array_equal(labels, [[-1, -1, -1], [3, -1, -1], [0, 2, -1], [1, -1, -1], [3, 0, 1]])

    config = configured(where, preprocess="resize(4)|value_range(-1,1)")
    config.evals.test.update(split="train", preprocess="resize(4)|value_range(-1,1)")
    completed, _ = data.complete_config(config)
    assert data.spec(completed) == data.DataSpec((4, 4, 3), 4, 5, 3) and config.data.max_labels is None
    config.data.max_labels = 4
    with pytest.raises(UserError, match=r"data.max_labels is 4, but array_record:.* has 3"):
        data.complete_config(config)
    config.data.source = write_set(tmp_path / "single", SINGLE)
    with pytest.raises(UserError, match=r"data.max_labels is 4, but array_record:.* has none"):
        data.complete_config(config)
    config.data.max_labels = None
    assert data.spec(data.complete_config(config)[0]).max_labels is None


def test_shards_made_by_others(tmp_path):
    where = write_set(tmp_path / "set", SINGLE, info=False)
    with pytest.raises(UserError, match=r"there is no info.json beside .* set --config.data.num_classes"):
        open_source(where, "train")
    assert numbers(open_source(where, "train", num_classes=4)) == list(range(11))
    with pytest.raises(UserError, match=r"record 0 of .*00001.* has the label 3, but there are 3 classes"):
        list(open_source(where, "train", num_classes=3))
    where = write_set(tmp_path / "multi", SEVERAL, info=False)
    with pytest.raises(
        UserError, match=r"record 0 of .* has 0 labels, but one is expected; .*--config.data.max_labels"
    ):
        list(open_source(where, "train", num_classes=4))
    with pytest.raises(UserError, match=r"record 1 of .*00002.* has 3 labels, but max_labels is 2"):
        list(open_source(where, "train", num_classes=4, max_labels=2))
    os.remove(tmp_path / "multi" / array_record_file.file_name("train", 1, 3))
    with pytest.raises(
        UserError, match=r"split train must have 3 shards; 1 missing: train-00001-of-00003.array_record; copy"
    ):
        open_source(where, "train", num_classes=4)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 8] ^= 1  # within a record of `large`
    path.write_bytes(content)


def change(**fields):
    def write(path):
        info = json.loads((path.parent / "info.json").read_text())
        for key, value in fields.items():
            info["splits"]["train"][1][key] = value
        (path.parent / "info.json").write_text(json.dumps(info))

    return write


@pytest.mark.parametrize("info", [True, False])
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            cut,
            r"00001-of-00003.array_record( has \d+ bytes, but its data set states \d+|: it is truncated or not an)",
        ),
        (lambda path: path.write_bytes(os.urandom(path.stat().st_size)), "00001-of-00003.*not an ArrayRecord file"),
        (lambda path: path.write_bytes(b""), r"00001-of-00003.array_record( has 0 bytes|: it is truncated)"),
        (lambda path: path.unlink(), "1 missing: train-00001-of-00003"),
        (
            lambda path: path.rename(path.with_name("train-00003-of-00003.array_record")),
            "missing: train-00001|unexpected",
        ),
        (
            lambda path: path.rename(path.with_name("train.array_record")),
            "train.array_record: the name of a shard must",
        ),
    ],
)
def test_damaged_sets(tmp_path, info, damage, sentence):
    where = write_set(tmp_path / "set", SINGLE, info=info)
    damage(tmp_path / "set" / array_record_file.file_name("train", 1, 3))
    with pytest.raises(UserError, match=sentence):
        list(open_source(where, "train", num_classes=4))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (change(records=5), "00001-of-00003.array_record has 4 records, but its data set states 5; copy or"),
        (change(bytes=5), r"00001-of-00003.array_record has \d+ bytes, but its data set states 5"),
        (change(name="train-00007-of-00003.array_record"), "1 missing: train-00007-of-00003"),
        (change(records="five"), r"info.json: splits.train\[1\].records must be a whole number, not \"five\""),
        (lambda path: (path.parent / "info.json").write_text("{"), "cannot read .*info.json: JSONDecodeError"),
        (lambda path: (path.parent / "info.json").write_text("[]"), "cannot read .*info.json: it must be an object"),
        (
            lambda path: (path.parent / "info.json").write_text('{"a": 1, "a": 1}'),
            "the key 'a' occurs twice in an object",
        ),
    ],
)
def test_a_wrong_info(tmp_path, damage, sentence):
    where = write_set(tmp_path / "set", SINGLE)
    damage(tmp_path / "set" / array_record_file.file_name("train", 1, 3))
    with pytest.raises(UserError, match=sentence):
        list(open_source(where, "train"))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"made_from": None}, "made_from must be an object, not null"),
        ({"max_labels": "3"}, 'max_labels must be null or a whole number above 0, not "3"'),
        ({"num_classes": 10.0}, r"num_classes must be a whole number above 0, not 10\.0"),
        ({"num_classes": True}, "num_classes must be a whole number above 0, not true"),
        ({"class_names": ["a", "b"]}, "class_names has 2 names, but num_classes is 4"),
        ({"class_names": "abcd"}, 'class_names must be null or a list of strings, not "abcd"'),
        ({"name": None}, "name must be a string, not null"),
        ({"splits": []}, r"splits must be an object of lists of shards, not \[\]"),
        ({"splits": {"train": [{"name": "x", "records": 1}]}}, r"splits.train\[0\].bytes is missing; it must be"),
        ({"splits": {"train": [{"name": "x", "records": -1, "bytes": 2}]}}, r"splits.train\[0\].records must be"),
        (
            {"splits": {"train": [{"name": "x", "records": 1, "bytes": 2, "left_out": 3}]}},
            r"splits.train\[0\].left_out must be a list of objects, not 3",
        ),
        (
            {"splits": {"train": [{"name": "x", "records": 1, "bytes": 2, "left_out": [{"index": 0}]}]}},
            r"splits.train\[0\].left_out\[0\].error is missing",
        ),
    ],
)
def test_every_field_of_an_info_is_checked(tmp_path, fields, sentence):
    with pytest.raises(UserError, match=rf"^cannot read .*info.json: {sentence}"):
        open_source(write_set(tmp_path / "set", SINGLE, **fields), "train")


def test_other_wrong_sources(tmp_path):
    where = write_set(tmp_path / "set", SINGLE, version=2)
    with pytest.raises(UserError, match=r"info.json has version 2, but this vit_jax reads version 1"):
        open_source(where, "train")
    with pytest.raises(UserError, match=r"unknown split .* 'test'; choose from train"):
        open_source(write_set(tmp_path / "again", SINGLE), "test")
    absent = f"{tmp_path}/nowhere"
    with pytest.raises(
        UserError, match=f"^{absent} does not exist; make it with python -m vit_jax.pack, or name another"
    ):
        open_source(f"array_record:{absent}", "train")
    (tmp_path / "empty").mkdir()
    for absent in (tmp_path / "empty" / "*.array_record", tmp_path / "again" / "val-*"):
        with pytest.raises(UserError, match=re.escape(f"there are no files {absent}")):
            open_source(f"array_record:{absent}", "train")


def test_a_damaged_record_is_an_unreadable_image(tmp_path):
    name = str(tmp_path / array_record_file.file_name("train", 0, 1))
    large = [(os.urandom(30_000), [0]) for _ in range(20)]
    array_record_file.write_shard(name, large)
    flip(tmp_path / array_record_file.file_name("train", 0, 1))
    source = open_source(f"array_record:{tmp_path}", "train", num_classes=1)
    found = []
    for index, (image, _) in enumerate(large):
        try:
            assert source.read_example("train", index)[0].data == image
        except decode.DecodeError as error:
            found.append(str(error))
    assert len(found) == 1 and re.match(
        r"cannot read record \d+ of .*train-00000-of-00001.array_record: .*hash", found[0]
    )


def test_examples_are_those_of_tensorflow():
    from tensorflow_datasets.proto import tf_example_pb2

    for labels in ([], [0], [2**40, -1, 7]):
        record = tf_example.serialise_example(b"\xff\xd8image", labels)
        assert tf_example.parse_example(record) == (b"\xff\xd8image", labels)
        theirs = tf_example_pb2.Example.FromString(record)
        assert theirs.features.feature["image"].bytes_list.value[:] == [b"\xff\xd8image"]
        assert theirs.features.feature["label"].int64_list.value[:] == labels
        theirs.features.feature["weight"].float_list.value.append(0.5)
        assert tf_example.parse_example(theirs.SerializeToString()) == (b"\xff\xd8image", labels)
    theirs.features.feature["label"].bytes_list.value.append(b"cat")
    with pytest.raises(ValueError, match="its feature label must be a list of int64"):
        tf_example.parse_example(theirs.SerializeToString())
    del theirs.features.feature["label"]
    with pytest.raises(ValueError, match="needs the features image and label, but has image, weight"):
        tf_example.parse_example(theirs.SerializeToString())
    with pytest.raises(ValueError, match=r"it is not a tf.train.Example"):
        tf_example.parse_example(b"abc")


@pytest.mark.slow
def test_threads_and_processes_share_a_source(tmp_path, monkeypatch):
    where = write_set(tmp_path / "set", [[0]] * 200, total=7)
    source = open_source(where, "train")
    monkeypatch.setattr(readers, "cached_reader", functools.lru_cache(2)(readers.cached_reader.__wrapped__))
    order = np.random.default_rng(0).integers(0, 200, 2000).tolist()
    with ThreadPoolExecutor(8) as pool:  # with more shards than may be open
        assert numbers(pool.map(source.__getitem__, order)) == order
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    dataset = grain.MapDataset.source(source).to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(2))
    assert numbers(dataset) == list(range(200))


def test_remote_shards_are_fetched_when_they_are_read(tmp_path, monkeypatch):
    write_set(tmp_path / "set", SINGLE)
    fetched, near = [], filesystem.expand_pattern

    def local(path, version):
        assert version is None
        fetched.append(path)
        return path.removeprefix("far:/")

    def listed(pattern):
        return {f"far:/{path}": None for path in near(pattern.removeprefix("far:/"))}

    monkeypatch.setattr(filesystem, "expand_pattern", listed)
    monkeypatch.setattr(filesystem, "read_bytes", lambda path: Path(path.removeprefix("far:/")).read_bytes())
    monkeypatch.setattr(filesystem, "local_copy", local)
    for pattern in (f"far:/{tmp_path / 'set'}", f"far:/{tmp_path / 'set'}/train-*"):
        source = open_source(f"array_record:{pattern}", "train")
        assert len(source) == 11 and not fetched
        assert numbers(source) == list(range(11)) and len(fetched) == 3
        fetched.clear()
    cut(tmp_path / "set" / array_record_file.file_name("train", 1, 3))
    source = open_source(f"array_record:far:/{tmp_path / 'set'}", "train")
    with pytest.raises(UserError, match=r"00001-of-00003.array_record has \d+ bytes, but its data set states \d+"):
        list(source)


def test_a_store_is_asked_once_for_each_shard_however_often_it_is_opened(tmp_path, monkeypatch):
    write_set(tmp_path / "set", SINGLE)
    asked = []
    monkeypatch.setattr(readers.filesystem, "local_copy", lambda path, version: asked.append(path) or path)
    source = open_source(f"array_record:{tmp_path}/set", "train")
    for _ in range(3):
        assert numbers(source) == list(range(11))
        readers.cached_reader.cache_clear()  # as if there were more of them than may be open
    assert len(asked) == len(set(asked)) == 3


def test_a_remote_set_larger_than_the_cache_is_refused_at_once(tmp_path, monkeypatch):
    memory, where = fsspec.filesystem("memory"), "memory://bucket/set"
    write_set(tmp_path / "set", SINGLE)
    memory.put(str(tmp_path / "set"), "/bucket/set", recursive=True)
    size = sum(path.stat().st_size for path in (tmp_path / "set").glob("*.array_record"))
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VIT_JAX_CACHE_GB", str((size - 1) / 1e9))
    with pytest.raises(UserError, match=r"the 3 shards to read, .*memory:.* need .* GB, more than .*VIT_JAX_CACHE_GB"):
        open_source(f"array_record:{where}", "train")
    assert len(open_source(f"array_record:{where}", "train[:7]")) == 7  # in two of the three shards
    assert len(open_source(f"array_record:{tmp_path / 'set'}", "train")) == 11
    monkeypatch.setenv("VIT_JAX_CACHE_GB", str((size + 1) / 1e9))
    assert numbers(open_source(f"array_record:{where}", "train")) == list(range(11))
    memory.rm("/bucket/set", recursive=True)


def test_opening_a_thousand_shards_opens_none(tmp_path, monkeypatch):
    write_set(tmp_path / "one", [[0]], total=1)
    [path], total = (tmp_path / "one").glob("*.array_record"), 1000
    (tmp_path / "set").mkdir()
    names = [array_record_file.file_name("train", number, total) for number in range(total)]
    for name in names:
        os.link(path, tmp_path / "set" / name)
    listed = [{"name": name, "records": 1, "bytes": path.stat().st_size} for name in names]
    info = {"version": 1, "name": "many", "num_classes": 1, "splits": {"train": listed}}
    (tmp_path / "set" / "info.json").write_text(json.dumps(info))
    opened = []
    original = readers.open_reader
    monkeypatch.setattr(readers, "open_reader", lambda *args: opened.append(args) or original(*args))
    start = time.monotonic()
    source = open_source(f"array_record:{tmp_path / 'set'}", "train")
    assert len(source) == 1000 and not opened and time.monotonic() - start < 5
    assert source[999]["label"] == 0 and len(opened) == 1
