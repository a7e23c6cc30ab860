"""Parquet files: which columns are read, and what is wrong with them is named."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.test_array_record import numbers, picture
from tests.data.test_formats import config_of, examples, here, there  # noqa: F401
from tests.data.test_sources import open_source
from vit_jax import UserError, data, pack
from vit_jax.data.images import DecodeError
from vit_jax.data.shards import parquet_file
from vit_jax.data.sources import SourceConfig, change_paths, open_split
from vit_jax.storage import filesystem


def write_table(path, features=None, count=9, group=4, **columns):
    """Images that count themselves in groups of four, with `label` or other columns; returns the source."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"image": [{"bytes": picture(row), "path": None} for row in range(count)], **columns}
    if len(columns) == 1:
        columns["label"] = [row % 3 for row in range(count)]
    table = pa.table({name: column for name, column in columns.items() if column is not None})
    if features:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=group)
    return f"parquet:{path}"


def opened(source, split="train", **fields):
    return open_source(source, split, **{"num_classes": 3, **fields})


def test_names_and_classes_are_those_of_the_description(here, there, monkeypatch):  # noqa: F811
    source = open_split(config_of("parquet", here), "test")
    assert source.class_names == ("cat", "dog", "owl") and source.example_name(5) == "105.jpg"
    asked, plain = [], filesystem.read_range
    monkeypatch.setattr(
        filesystem, "read_range", lambda path, start, end: asked.append((path, end - start)) or plain(path, start, end)
    )
    remote = open_split(config_of("parquet", there), "test")
    sizes = [run.size for run in remote.shards.runs]
    assert [size for _, size in sorted(asked)] == sizes and len(remote) == 7  # both are smaller than what is read first
    monkeypatch.setattr(parquet_file, "FOOTER", 100)
    asked.clear()
    assert open_split(config_of("parquet", there), "test").shards.runs == remote.shards.runs
    assert len(asked) == 4 and sum(size for _, size in asked) < sum(sizes)


@pytest.mark.parametrize("label", [None, ["a word"] * 9])
def test_images_to_predict_need_no_labels(tmp_path, label):
    source = write_table(tmp_path / "test.parquet", label=label)
    assert [int(np.asarray(image.read())[0, 0, 0]) for image in data.list_source_images(source, "test")] == [*range(9)]


def test_a_column_that_stands_twice_is_refused(tmp_path):
    columns = [[picture(row) for row in range(4)], [0, 1, 0, 1], [1, 0, 1, 0]]
    table = pa.table(list(map(pa.array, columns)), names=["image", "label", "label"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a.parquet has two columns label; give each column a name of its own"):
        opened(f"parquet:{tmp_path}/a.parquet")


def test_columns_are_chosen_by_name_or_kind(tmp_path):
    fine = {"_type": "ClassLabel", "names": ["a", "b", "c"]}
    columns = {"img": [picture(row) for row in range(9)], "image": None, "fine": [row % 3 for row in range(9)]}
    columns["coarse"] = [row % 2 for row in range(9)]
    features = {"img": {"_type": "Image"}, "fine": fine}
    one = write_table(tmp_path / "one.parquet", features, **columns)
    source = opened(one, num_classes=None)
    assert examples(source) == [(row, row % 3) for row in range(9)] and source.class_names == ("a", "b", "c")
    assert source.example_name(3) == "train/3"  # bytes have no path
    other = opened(f"{one},label=coarse", num_classes=2)
    assert [one["label"] for one in other] == [row % 2 for row in range(9)] and other.class_names is None
    assert other.fingerprint != source.fingerprint
    with pytest.raises(
        UserError, match=r"do not describe the column coarse; set --config.data.num_classes, or write the names of the"
    ):
        opened(f"{one},label=coarse", num_classes=None)
    two = write_table(tmp_path / "two.parquet", {**features, "coarse": {**fine, "names": ["x", "y"]}}, **columns)
    with pytest.raises(UserError, match=r"parquet has no column label, only img, fine, coarse; .* as ,label=COLUMN"):
        opened(two)
    assert opened(f"{two},label=coarse", num_classes=None).class_names == ("x", "y")
    with pytest.raises(
        UserError, match=r"has no column picture, only img, fine, coarse; .* the images .* as ,image=COLUMN"
    ):
        opened(f"{two},image=picture,label=fine")


def test_names_as_labels_are_the_classes_of_train(tmp_path):
    words = ["owl", "cat", "dog"] * 3
    write_table(tmp_path / "train.parquet", label=words)
    source = write_table(tmp_path / "test.parquet", count=3, label=["dog", "owl", "owl"]).replace("/test.parquet", "")
    for split, labels in (("train", [2, 0, 1] * 3), ("test", [1, 2, 2])):
        found = opened(source, split, num_classes=None)
        assert found.class_names == ("cat", "dog", "owl") and [one["label"] for one in found] == labels
    (tmp_path / "names.txt").write_text("dog\nowl\ncat\nbird\n")
    found = opened(f"{source},classes={tmp_path}/names.txt", "test", num_classes=None)
    assert found.class_names == ("dog", "owl", "cat", "bird") and [one["label"] for one in found] == [0, 1, 1]
    write_table(tmp_path / "test.parquet", count=3, label=["dog", "eel", "owl"])
    with pytest.raises(UserError, match=r"record 1 of .* must be a whole number, or one of the names .*, not 'eel'"):
        opened(source, "test", num_classes=None)[1]
    dictionary = pa.array(words).dictionary_encode()
    for column in (dictionary, pa.array([[word] for word in words])):
        name = "once" if column is dictionary else "lists"
        other = write_table(tmp_path / name / "a.parquet", label=column)
        assert [one["label"] for one in opened(other, num_classes=None)] == [2, 0, 1] * 3


def test_numbers_get_names_from_a_file(tmp_path):
    source = write_table(tmp_path / "a.parquet")
    names = tmp_path / "names.txt"
    names.write_text("cat\nsea lion\r\n  owl\n\n", newline="")
    found = opened(f"{source},classes={names}", num_classes=None)
    assert found.class_names == ("cat", "sea lion", "owl") and [one["label"] for one in found] == [0, 1, 2] * 3
    for wrong, name in (("", ""), ("cat\n\nowl", ""), ("cat\ncat", "cat")):
        names.write_text(wrong)
        with pytest.raises(UserError, match=f"names.txt has a class '{name}'; each class must have a name of its own"):
            opened(f"{source},classes={names}")
    feature = {"_type": "ClassLabel", "names": ["a", "b", "c"]}
    write_table(tmp_path / "a.parquet", {"label": feature})
    names.write_text("cat\ndog\n")
    with pytest.raises(UserError, match=r"names.txt names 2 classes, but the files of .* state 3"):
        opened(f"{source},classes={names}")
    names.write_text("x\ny\nz\n")
    assert opened(f"{source},classes={names}").class_names == ("x", "y", "z")
    with pytest.raises(UserError, match=r"cannot read .*absent.txt"):
        opened(f"{source},classes={tmp_path}/absent.txt")


def test_texts_that_are_no_classes_are_refused(tmp_path):
    captions = write_table(tmp_path / "a.parquet", label=[f"a photo of {row}" for row in range(9)])
    with pytest.raises(UserError, match=r"gives 9 images 9 classes, such as 'a photo of 0', so it is not one of clas"):
        opened(captions)
    gap = write_table(tmp_path / "b.parquet", label=["cat", ""] * 4 + ["cat"])
    with pytest.raises(UserError, match=r"the column label of .* has a class ''; each class must have a name"):
        opened(gap)


def test_names_in_a_bucket_are_listed_from_copies(here, there, tmp_path, monkeypatch):  # noqa: F811
    write_table(tmp_path / "named" / "train.parquet", label=["owl", "cat", "dog"] * 3)
    (tmp_path / "names.txt").write_text("dog\nowl\ncat\n")
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path / "named"), "/b/named", recursive=True)
    store.put(str(tmp_path / "names.txt"), "/b/names.txt")
    config = SourceConfig("parquet:memory://b/named")
    assert open_split(config, "train").class_names == ("cat", "dog", "owl")
    monkeypatch.setenv("VIT_JAX_CACHE_GB", "1e-9")
    with pytest.raises(UserError, match=r"do not fit into the cache .* to list them; write the names of the classes"):
        open_split(config, "train", streams=True)
    config = SourceConfig("parquet:memory://b/named,classes=memory://b/names.txt")
    assert open_split(config, "train", streams=True).class_names == ("dog", "owl", "cat")


def test_the_file_of_names_is_a_path_of_the_source():
    moved = {"a/b,label=c,classes=d.txt": "A/b,label=c,classes=D.txt", "a,classes=d": "A,classes=D"}
    for before, after in moved.items():
        change = (lambda path: path.replace("a", "A"), lambda path: path.replace("d", "D"))
        assert change_paths(f"parquet:{before}", *change) == f"parquet:{after}"
    assert change_paths("hf://datasets/a/b,classes=d.txt", str.upper, str.upper) == "hf://datasets/a/b,classes=D.TXT"


def test_labels_of_multi_label_data(tmp_path):
    feature = {"feature": {"_type": "ClassLabel", "names": ["a", "b", "c"]}, "_type": "List"}
    several = write_table(
        tmp_path / "a.parquet", {"kinds": feature}, kinds=[[row % 3, 0] if row % 3 else [] for row in range(9)]
    )
    labels = np.stack([one["label"] for one in opened(several, max_labels=2, num_classes=None)])
    assert labels[:3].tolist() == [[-1, -1], [1, 0], [2, 0]]
    with pytest.raises(UserError, match=r"record 1 of .* has 2 labels, but one is expected"):
        opened(several)[1]
    without = write_table(tmp_path / "b.parquet", {"kinds": feature}, kinds=[[-1]] * 9)
    with pytest.raises(UserError, match=r"record 0 of .* has the label -1; several labels an image are a list"):
        opened(without, max_labels=2, num_classes=None)[0]


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"label": [0.5] * 9}, r"the column label of record 0 of .*a.parquet must be a whole number, or a list of th"),
        ({"label": [None] * 9}, r"must be a whole number, or a list of these, not None"),
        ({"label": [-2] * 9}, r"has the label -2, but there are 3 classes"),
        ({"label": [0] * 9, "image": [None] * 9}, r"cannot read record 0 of .*: its column image contains no bytes of"),
        (
            {"label": [0] * 9, "image": [{"bytes": None, "path": "x.jpg"}] * 9},
            r"cannot read record 0 of .*: its column image contains no bytes of an image",
        ),
    ],
)
def test_rows_that_are_wrong(tmp_path, columns, sentence):
    with pytest.raises((UserError, DecodeError), match=sentence):
        opened(write_table(tmp_path / "a.parquet", **columns))[0]


def test_a_row_without_an_image_has_a_name(tmp_path):
    images = [{"bytes": picture(0), "path": "cats/1.jpg"}, None]
    source = opened(write_table(tmp_path / "a.parquet", count=2, image=images, label=[0, 0]))
    assert [source.example_name(index) for index in range(2)] == ["cats/1.jpg", "train/1"]
    with pytest.raises(DecodeError, match=r"its column image contains no bytes of an image"):
        source[1]


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "a.parquet"
    source = write_table(path)
    whole = path.read_bytes()
    for content in (whole[:-100], b"", b"no parquet" * 100):
        path.write_bytes(content)
        with pytest.raises(
            UserError, match=r"cannot read .*a.parquet: it is truncated or not a Parquet file \(Parquet"
        ):
            opened(source)
    content = bytearray(whole)
    offset = pq.read_metadata(path.write_bytes(whole) and path).row_group(1).column(0).data_page_offset
    content[offset : offset + 8] = b"\xff" * 8
    path.write_bytes(content)
    damaged = opened(source)
    assert damaged[8]["label"] == 2 and damaged[3]["label"] == 0
    with pytest.raises(DecodeError, match=r"cannot read record 4 of .*a.parquet: its row group 1 is damaged \(.+\)"):
        damaged[4]
    write_table(tmp_path / "b.parquet", kind=[0] * 9)
    with pytest.raises(UserError, match=r"b.parquet has no column label, only image, kind"):
        path.write_bytes(whole)
        opened(f"parquet:{tmp_path}")


@pytest.mark.parametrize("length", [0, 300])
def test_a_file_that_becomes_shorter_is_damaged(tmp_path, length):
    """It ended the process by SIGBUS when it was mapped into memory."""
    source = opened(write_table(tmp_path / "train.parquet"))
    assert source[0]["label"] == 0
    os.truncate(tmp_path / "train.parquet", length)
    with pytest.raises(DecodeError, match=r"record 5 of .*train\.parquet: its row group 1 is damaged"):
        source[5]


def test_a_split_is_of_one_folder(tmp_path):
    for folder in ("fine", "coarse"):
        write_table(tmp_path / folder / "train-00000-of-00001.parquet")
    with pytest.raises(
        UserError, match=r"the split train of .* lies in several folders; name one of them: coarse, fine"
    ):
        opened(f"parquet:{tmp_path}")
    assert len(opened(f"parquet:{tmp_path}/fine")) == 9


def test_a_group_is_decoded_once_and_few_are_kept(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    source, decoded = opened(write_table(path, count=40, group=5)), []
    plain = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, group, **words: decoded.append(group) or plain(self, group, **words),
    )
    assert source[0]["label"] == 0  # opened once
    with ThreadPoolExecutor(8) as pool:
        assert numbers(pool.map(source.__getitem__, range(40))) == list(range(40))
    assert sorted(decoded) == list(range(8))
    monkeypatch.setattr(parquet_file, "KEPT_BYTES", 1)
    parquet_file._kept.clear()
    decoded.clear()
    assert numbers(source[row] for row in (0, 1, 6, 7, 0)) == [0, 1, 6, 7, 0]
    assert len(parquet_file._kept) == 1 and decoded == [0, 1, 0]


def test_files_that_number_their_classes_differently_are_refused(tmp_path, capsys):
    def write(name, classes):
        label = {"_type": "ClassLabel", "names": classes} if classes else None
        write_table(tmp_path / "set" / name, label and {"label": label}, count=3)

    source = f"parquet:{tmp_path}/set"
    write("train-00000-of-00003.parquet", ["cat", "dog", "owl"])
    write("train-00001-of-00003.parquet", ["cat", "owl", "dog"])
    write("train-00002-of-00003.parquet", None)
    sentence = r"the label 1 is 'dog' in .*train-00000.*, but 'owl' in .*train-00001.*; all files of a data set must"
    for opening in (lambda: opened(source), lambda: pack.main(["pack", source, f"{tmp_path}/packed"])):
        with pytest.raises(UserError, match=sentence):
            opening()
    write("train-00001-of-00003.parquet", ["cat", "dog"])
    with pytest.raises(UserError, match=r"the label 2 is 'owl' in .*, but None in"):
        opened(source)
    write("train-00001-of-00003.parquet", ["cat", "dog", "owl"])
    write("test-00000-of-00001.parquet", ["owl", "dog", "cat"])
    assert opened(source, num_classes=None).class_names == ("cat", "dog", "owl")
    with pytest.raises(UserError, match=r"the label 0 is 'cat' in .*train.*, but 'owl' in .*test"):
        opened(source, "train+test")
    with pytest.raises(UserError, match=r"the splits .* and .* have different classes, or number them differently"):
        pack.main(["pack", source, f"{tmp_path}/packed"])
    pack.main(["pack", source, f"{tmp_path}/packed", "--splits=test"])
    packed = json.loads((tmp_path / "packed" / "info.json").read_text())
    assert packed["class_names"] == ["owl", "dog", "cat"]
