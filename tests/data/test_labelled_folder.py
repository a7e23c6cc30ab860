"""Folders whose labels a CSV file gives: several classes an image, or numbers."""

import numpy as np
import pytest
from PIL import Image

from vit_jax import UserError, pack
from vit_jax.config import get_config
from vit_jax.data.sources import SourceConfig, change_paths, list_splits, open_split, source_label
from vit_jax.program import prepare

FLAGS = "image,red,green\nb/2.png,0,1\n1.png,1,1\n./3.png,0,0\n"
LISTS = 'id,file_name,classes\n0,b/2.png,green\n1,1.png,"red; green"\n2,3,\n'
NUMBERS = "path,age,weight\n1.png,30,1e3\nb/2.png,40,-2\n3.png,35.5,7\n"


@pytest.fixture
def place(tmp_path):
    """Three images, and files with their classes and numbers."""
    (tmp_path / "photos" / "b").mkdir(parents=True)
    for number, name in enumerate(("1.png", "b/2.png", "3.png")):
        Image.fromarray(np.full((8, 8, 3), number * 90, np.uint8)).save(tmp_path / "photos" / name)
    for name, text in {"flags.csv": FLAGS, "lists.csv": LISTS, "numbers.csv": NUMBERS}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def opened(place, options, split="train", **fields):
    return open_split(SourceConfig(f"folder:{place}/photos,table={place}/{options}", **fields), split)


def answers(source):
    return {source.example_name(index): np.asarray(source[index]["label"]).tolist() for index in range(len(source))}


def test_classes_in_columns_and_in_lists_are_the_same(place):
    flags, lists = opened(place, "flags.csv"), opened(place, "lists.csv,separator=semicolon")
    assert flags.class_names == ("red", "green") and lists.class_names == ("green", "red")
    assert answers(flags) == {"1.png": [0, 1], "b/2.png": [1, -1], "3.png": [-1, -1]}
    assert answers(lists) == {"1.png": [0, 1], "b/2.png": [0, -1], "3.png": [-1, -1]}
    assert flags.class_counts().tolist() == [1, 2] and flags.max_labels == 2
    (place / "order.txt").write_text("red\ngreen\n")
    ordered = opened(place, f"lists.csv,separator=;,classes={place}/order.txt")
    assert answers(ordered) == answers(flags) and ordered.fingerprint == flags.fingerprint
    one = opened(place, "flags.csv,label=green")
    assert one.class_names == ("green",) and answers(one)["1.png"] == [0]


def test_a_cell_may_have_several_lines(place):
    """In quotes; of other characters that end lines of text, none ends a line of a table."""
    text = 'path,age,note\r\n1.png,30,"torn,\nand wet"\r\nb/2.png,40,a\u2028b\x0bc\r\n3.png,35.5,\r\n'
    (place / "notes.csv").write_text(text, newline="")
    assert answers(opened(place, "notes.csv,targets=age")) == {"1.png": [30], "b/2.png": [40], "3.png": [35.5]}


def test_numbers_keep_their_columns(place):
    source = opened(place, "numbers.csv,targets=weight+age")
    assert source.has_numbers and source.class_names == ("weight", "age") and source.class_counts() is None
    assert answers(source) == {"1.png": [1000, 30], "b/2.png": [-2, 40], "3.png": [7, 35.5]}
    assert source[0]["label"].dtype == source.blank_label.dtype == np.float32


@pytest.mark.parametrize("options", ["flags.csv", "lists.csv,separator=semicolon", "numbers.csv,targets=age"])
def test_another_label_is_other_data_also_for_pack(place, options, capsys):
    name = f"folder:{place}/photos,table={place}/{options}"
    before, out = opened(place, options).fingerprint, f"{place}/packed"
    pack.main(["pack", name, out])
    packed = open_split(SourceConfig(f"array_record:{out}"), "train")
    source = opened(place, options)
    assert [row["label"].tolist() for row in packed] == [row["label"].tolist() for row in source]
    assert packed.class_names == source.class_names and packed.has_numbers == source.has_numbers
    if packed.has_numbers:
        np.testing.assert_array_equal(packed.labels(), source.labels())
    file = place / options.partition(",")[0]
    file.write_text(file.read_text().replace("2.png,0,1", "2.png,1,0").replace("40", "41").replace("g,green", "g,red"))
    assert opened(place, options).fingerprint != before
    with pytest.raises(UserError, match="was packed with other settings"):
        pack.main(["pack", name, out])


def test_folders_named_after_splits_are_splits(place):
    photos = place / "photos"
    (photos / "test").mkdir()
    (photos / "b").rename(photos / "train")
    for name in ("1.png", "3.png"):
        (photos / name).rename(photos / "test" / name)
    (place / "numbers.csv").write_text("image,age\ntest/1.png,1\ntrain/2.png,2\n")
    name = f"folder:{photos},table={place}/numbers.csv,targets=age"
    assert sorted(list_splits(SourceConfig(name))) == ["test", "train"]
    assert answers(opened(place, "numbers.csv,targets=age")) == {"train/2.png": [2]}
    with pytest.raises(UserError, match=r"has no line for 1 of the 2 images of .*test: test/3.png"):
        opened(place, "numbers.csv,targets=age", "test")
    (place / "few.csv").write_text("image,age\ntrain/2.png,2\n")
    assert list_splits(SourceConfig(f"folder:{photos},table={place}/few.csv,targets=age")) == ["train"]
    unlabelled = opened(place, "numbers.csv,targets=age", "test", needs_labels=False)
    assert np.isnan(answers(unlabelled)["test/3.png"]).all()


def test_the_options_stay_with_the_source(place):
    name = "folder:data/photos,table=labels.csv,targets=age"
    changed = change_paths(name, lambda path: f"/a/{path}", lambda path: f"/b/{path}")
    assert changed == "folder:/a/data/photos,table=/b/labels.csv,targets=age"
    assert source_label(name) == "photos"


WRONG = {
    "flags.csv": {
        "image,red,green\n1.png,1\n": "line 2 has 2 cells, but there are 3 columns",
        "image,red,green\n": "a line for each image",
        "red,green\n1,1\n": "must name the column of the images",
        "image,red,red\n1.png,1,1\n": "two columns 'red'",
        "image,red\n1.png,1\nb/2.png,1\n3.png,maybe\n": "line 4 of .*, column red: 'maybe' is neither 0 nor 1",
        "image,red\n1.png,1\n\n1.png,0\n": "lines 2 and 4 of .* are of the same image",
        "image,red\n1.png,1\n1,0\n": "lines 2 and 3 of .* are of the same image",
        "image,red\n1.png,1\n9.png,0\n": "no image 9.png in .*, which line 3",
        "image,red\n1.png,1\n": r"no line for 2 of the 3 images of .*: 3.png, b/2.png; add",
        "image,red\n,1\n": "line 2 names no image",
        "image\n1.png\n": "no column beside",
    },
    "flags.csv,label=blue": {FLAGS: "no column 'blue'; choose from red, green"},
    "flags.csv,label=red,separator=tab": {FLAGS: "unknown separator .tab.; choose from comma"},
    "flags.csv,separator=semicolon": {FLAGS: "say which column .* lists of classes: ,label=COLUMN"},
    "flags.csv,targets=red,label=green": {FLAGS: "leave out label="},
    "flags.csv,colour=red": {FLAGS: "colour=red is no option"},
    "lists.csv,separator=semicolon": {
        "image,label\n1.png,a;a\n": "line 2 .* names the class 'a' twice",
        "image,label\n1.png,\n": "no line of .* names a class",
    },
    "numbers.csv,targets=age": {
        "image,age\n1.png,\n": "line 2 of .*, column age: '' is not a finite number",
        "image,age\n1.png,nan\n": "'nan' is not a finite number",
        "image,age\n1.png,1e39\n": "'1e39' is not a finite number",
        "image,age\n1.png,1_0\n": "'1_0' is not a finite number",
    },
    "numbers.csv,targets=age+age": {NUMBERS: "names the column 'age' twice"},
}


@pytest.mark.parametrize(
    ("options", "text", "message"), [(options, *pair) for options, of in WRONG.items() for pair in of.items()]
)
def test_a_wrong_file_is_told_with_its_line(place, options, text, message):
    (place / options.partition(",")[0]).write_text(text)
    with pytest.raises(UserError, match=message):
        opened(place, options)


def regression(place, options="numbers.csv,targets=age+weight", **fields):
    config = get_config()
    config.update({"resolution": 16, "batch": 8, "total_steps": 2})
    config.model.name = "ViT-mu/4"
    config.data.update({"source": f"folder:{place}/photos,table={place}/{options}", "split": "train"})
    config.task.update({"kind": "regress", "loss": "huber"})
    config.evals.test.update({"split": "train", "preprocess": "resize(16)|value_range(-1,1)"})
    config.update_from_flattened_dict(fields)
    return config


CLASSES = {"task.kind": "classify", "task.loss": "sigmoid"}


def test_an_image_may_be_left_out_and_folds_know_no_classes(place):
    (place / "without.txt").write_text("b/2.png\n")
    config = regression(place, **{"data.exclude": f"{place}/without.txt", "checkpoint.best_metric": "test/mae"})
    config.evals.test.kind = "regression"
    completed, info, _ = prepare(config)
    assert completed.data.num_examples == 2 and completed.task.target_means == (32.75, 503.5)
    config = regression(place, **{"data.split": "train[not fold 1/3]", "checkpoint.best_metric": "test/mae"})
    config.evals.test.update({"kind": "regression", "split": "train[fold 1/3]"})
    completed, info, program = prepare(config)
    assert completed.data.num_examples == 2 and any("images have numbers" in note for note in info.notes)
    assert program.model.target_scale == program.task.scale and program.model.class_names == ("age", "weight")


REFUSED = [
    ({"task.loss": "softmax"}, "task.kind=regress learns numbers: choose --config.task.loss=l1"),
    ({"task.kind": "classify"}, "task.loss=huber is for numbers"),
    ({"task.mixup": 0.2, "task.label_smoothing": 0.1}, "task.label_smoothing, task.mixup are for classes"),
    ({"task.huber_delta": 2.0, "task.loss": "l1"}, "needs --config.task.loss=huber"),
    ({"task.target_means": (1.0,)}, "has 1 numbers and task.target_deviations 0"),
    ({"task.target_means": (1.0,), "task.target_deviations": (1.0,)}, "has 1 numbers, but .* has 2: age, weight"),
    (CLASSES | {"task.target_means": (1.0,), "task.target_deviations": (1.0,)}, "need --config.task.kind=regress"),
    (CLASSES, "are numbers, which task.kind=classify does not learn"),
    ({"data.balance": 1.0}, "data.balance needs images with one label"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_does_not_go_with_numbers_is_refused(place, fields, message):
    with pytest.raises(UserError, match=message):
        prepare(regression(place, **{"checkpoint.best_metric": "test/accuracy", **fields}))


def test_classes_are_no_numbers(place):
    with pytest.raises(UserError, match=r"learns numbers, but .*flags.csv has none"):
        prepare(regression(place, "flags.csv"))
    (place / "numbers.csv").write_text("image,age\n1.png,5\n3.png,5\nb/2.png,5\n")
    with pytest.raises(UserError, match="age is 5 for all images"):
        prepare(regression(place, "numbers.csv,targets=age"))
