"""Folders of images as they are published: nested, flat beside a list, with names in words, with files left out."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT, write_tfds
from tests.data.test_sources import open_source, write_image
from vit_jax import UserError, data, evaluate, pack, predict, train
from vit_jax.config import parse_command_line
from vit_jax.data import sources
from vit_jax.data.images import decode

WNIDS = ("n01443537", "n01629819", "n01440764")  # as in Tiny-ImageNet's list, which is not sorted
WORDS = {
    "n01440764": "tench, Tinca tinca",
    "n01443537": "goldfish, Carassius auratus",
    "n01629819": "European fire salamander, Salamandra salamandra",
}
IN_WORDS = tuple(f"{WORDS[wnid]} [{wnid}]" for wnid in sorted(WNIDS))
LABELS = [0, 1, 2, 1]  # of the validation images, in their order


def tiny_imagenet(root):
    """Tiny-ImageNet's exact tree."""
    for label, wnid in enumerate(sorted(WNIDS)):
        for number in range(3):
            write_image(root / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", 80 * label)
        boxes = "".join(f"{wnid}_{number}.JPEG\t0\t10\t63\t58\n" for number in range(3))
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text(boxes)
    for number, label in enumerate(LABELS):
        write_image(root / "val" / "images" / f"val_{number}.JPEG", 80 * label)
        write_image(root / "test" / "images" / f"test_{number}.JPEG")
    rows = [f"val_{number}.JPEG\t{sorted(WNIDS)[label]}\t0\t32\t44\t62\n" for number, label in enumerate(LABELS)]
    (root / "val" / "val_annotations.txt").write_text("".join(rows))
    (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    words = {"n00001740": "entity", **WORDS, "n15300051": "yuan"}
    (root / "words.txt").write_text("".join(f"{wnid}\t{said}\n" for wnid, said in words.items()))
    return root


def imagenet(root, lists=None):
    """ImageNet's tree as Kaggle unpacks it, with its lists beside the splits, or elsewhere."""
    lists = lists or root
    for label, wnid in enumerate(sorted(WNIDS)):
        for number in range(3):
            write_image(root / "train" / wnid / f"{wnid}_{number}.JPEG", 80 * label)
    for number, label in enumerate(LABELS, 1):
        write_image(root / "val" / f"ILSVRC2012_val_{number:08}.JPEG", 80 * label)
        write_image(root / "test" / f"ILSVRC2012_test_{number:08}.JPEG")
    rows = [
        f"ILSVRC2012_val_{number:08},{sorted(WNIDS)[label]} 111 108 230 297 " + f"{sorted(WNIDS)[label]} 1 2 3 4 " * 2
        for number, label in enumerate(LABELS, 1)
    ]
    (lists / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *reversed(rows)]) + "\n")
    test = [f"ILSVRC2012_test_{number:08},7 0 0 0 0" for number in range(1, 5)]
    (lists / "LOC_sample_submission.csv").write_text("\n".join(["ImageId,PredictionString", *test]) + "\n")
    synsets = "".join(f"{wnid} {said}\n" for wnid, said in WORDS.items())
    (lists / "LOC_synset_mapping.txt").write_text(synsets)
    return root


def open_folder(root, split, **fields):
    return sources.open_split(sources.SourceConfig(f"folder:{root}", **fields), split)


def labels_of(source):
    """Returns the value of each image's first pixel, over 80, beside its label."""
    return sorted((int(np.asarray(row["image"])[0, 0, 0]) // 79, row["label"]) for row in source)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [tiny_imagenet, imagenet])
def test_a_run_on_a_folder_is_evaluated_and_predicts_in_words(tree, tmp_path, capsys):
    root, run = tree(tmp_path / "data"), tmp_path / "run"
    words = [f"--config={ROOT}/configs/folder.py", f"--config.data.source=folder:{root}", f"--workdir={run}"]
    words += ["--config.data.split=train", "--config.evals.test.split=val", "--config.model.name=ViT-mu/16"]
    words += ["--config.resolution=16", "--config.model.depth=1", "--config.batch=8", "--config.total_steps=2"]
    words += ["--config.warmup_steps=1", "--config.model.stochastic_depth=0.0", "--config.eval_every=2"]
    metrics = train.train(*parse_command_line(["main.py", *words]))
    assert metrics["test/n"] == 4 and metrics["test/top5"] == 1  # of three classes, which nobody needs to be told
    assert "accuracy" in (run / "train.log").read_text() and "top5" not in (run / "train.log").read_text()
    assert (
        "/val: 4 images, labels from " in (run / "train.log").read_text() and "WARNING" not in capsys.readouterr().err
    )
    assert json.loads((run / "model.json").read_text())["class_names"] == list(IN_WORDS)
    assert evaluate.evaluate(run)["test/n"] == 4 and not capsys.readouterr().err
    predict.main(["predict", str(run), str(next((root / "test").rglob("*.JPEG"))), "--top=3"])
    printed = [line.split("%  ")[1] for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert sorted(printed) == sorted(IN_WORDS)


@pytest.mark.parametrize("folder", ["", "train", "Training"])
def test_images_that_need_no_labels(tmp_path, folder):
    for number in range(9):
        write_image(tmp_path / folder / f"{number}.png", 27 * number)
    write_image(tmp_path / folder / "deeper" / "9.png", 27 * 9)
    with pytest.raises(UserError, match="contains images directly"):
        open_folder(tmp_path, "train")
    found = open_folder(tmp_path, "train", needs_labels=False)
    assert [row["label"] for row in found] == [-1] * 10 and found.num_classes == 0 and found.class_names is None
    assert {found.example_name(row) for row in range(10)} >= {f"{folder}/8.png".strip("/")}
    assert sources.describe_classes(found) == "10 images without labels" and "no labels" in found.notes[0]
    assert len(open_folder(tmp_path, "train[70%:]", reads_labels=False)) == 3


def test_labels_are_read_where_they_are_not_needed(tmp_path):
    root = tiny_imagenet(tmp_path)
    for split in ("train", "val"):
        labelled, other = (open_folder(root, split, needs_labels=needed) for needed in (True, False))
        assert other.fingerprint == labelled.fingerprint and labels_of(other) == labels_of(labelled)
    assert [row["label"] for row in open_folder(root, "test", needs_labels=False)] == [-1] * 4
    (tmp_path / "empty" / "train").mkdir(parents=True)
    (tmp_path / "empty" / "val" / "a").mkdir(parents=True)
    with pytest.raises(UserError, match=r"empty/train contains no images"):
        open_folder(tmp_path / "empty", "train", needs_labels=False)


def test_tiny_imagenet(tmp_path, caplog, capsys):
    root = f"folder:{tiny_imagenet(tmp_path)}"
    source = open_source(root, "train")
    assert labels_of(source) == [(label, label) for label in range(3) for _ in range(3)]
    assert source.class_names == IN_WORDS and source.class_ids == tuple(sorted(WNIDS))
    assert source.notes == () and source.split_names == ("train", "val")
    for split in ("val", "validation"):
        source = open_source(root, split)
        assert labels_of(source) == sorted((label, label) for label in LABELS)
        assert source.notes == (f"{tmp_path}/val: 4 images, labels from val_annotations.txt",)
    sentence = r"test has no labels \(its folder images is not a class of train\); vit_jax\.predict takes .*/test\.csv$"
    with pytest.raises(UserError, match=sentence):
        open_source(root, "test")
    assert sources.list_splits(sources.SourceConfig(root)) == ["train", "validation"]
    assert "test has no labels and is skipped" in capsys.readouterr().err and not caplog.records


@pytest.mark.parametrize("kaggle", [False, True])
def test_imagenet(tmp_path, kaggle):
    root = tmp_path / "ILSVRC/Data/CLS-LOC" if kaggle else tmp_path
    root.mkdir(parents=True, exist_ok=True)
    source = open_source(f"folder:{imagenet(root, tmp_path)}", "val")
    assert labels_of(source) == sorted((label, label) for label in LABELS) and source.class_names == IN_WORDS
    assert len(open_source(f"folder:{root}", "train+validation[:50%]")) == 11
    with pytest.raises(UserError, match=r"test has no labels; .*such as .*/test\.csv"):
        open_source(f"folder:{root}", "test")
    if kaggle:
        for above in (tmp_path, tmp_path / "ILSVRC", tmp_path / "ILSVRC/Data"):
            with pytest.raises(
                UserError, match=f"{above} is Kaggle's ImageNet; use --config.data.source=folder:{root}$"
            ):
                open_source(f"folder:{above}", "val")


def test_what_is_skipped_is_told_once(tmp_path, tiny, monkeypatch):
    """Training reads the path as it is given, an evaluation its absolute form."""
    root = tiny_imagenet(tmp_path / "photos")
    (root / "train" / min(WNIDS) / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    tiny.data.source, tiny.data.num_classes, tiny.data.num_examples, tiny.batch = f"folder:{root.name}", 3, None, 4
    tiny.data.split, tiny.evals.test.split = "train[:5]", "train[5:]"
    told = [note for note in data.complete_config(tiny)[1].notes if "skipped" in note]
    assert told == [f"{root}/train: 9 images; skipped: 1 .txt"]


def test_a_split_that_is_not_used_is_told(tmp_path, tiny):
    root = tiny_imagenet(tmp_path)
    tiny.data.source, tiny.data.num_classes, tiny.data.num_examples, tiny.batch = f"folder:{root}", 3, None, 4
    tiny.data.split, tiny.evals.test.split = "train[:5]", "train[5:]"
    flags = "--config.data.split=train --config.evals.test.split=val"
    sentence = f"The split val is here and not used; to evaluate on it: {flags}"
    assert data.complete_config(tiny)[1].notes[1:] == (sentence,)  # and nothing of test, which has no labels
    tiny.evals.test.split = "val"
    assert data.complete_config(tiny)[1].notes[1:] == (f"{root}/val: 4 images, labels from val_annotations.txt",)
    tiny.data.source, tiny.evals.test.split = f"folder:{root}/train", "train[5:]"
    assert data.complete_config(tiny)[1].notes[1:] == ()


def test_training_images_among_those_of_an_evaluation_are_told(tmp_path, tiny, caplog):
    for path in ("one/a/1.png", "one/a/2.png", "one/b/1.png", "other/a/1.png", "other/a/2.png", "other/b/1.png"):
        write_image(tmp_path / path)
    tiny.data.source, tiny.data.num_classes, tiny.data.num_examples, tiny.batch = f"folder:{tmp_path}/one", 2, None, 2
    for evaluated, split, warned in ((None, "train[1:]", True), (None, "train[2:]", False), ("other", "train", False)):
        tiny.evals.test.source = evaluated and f"folder:{tmp_path}/{evaluated}"
        tiny.data.split, tiny.evals.test.split = "train[:2]", split
        caplog.clear()
        data.complete_config(tiny)
        assert ("evals.test contains training images" in caplog.text) == warned


def test_words_change_neither_labels_nor_fingerprints(tmp_path, tiny):
    tiny_imagenet(tmp_path / "data")
    words = tmp_path / "data" / "words.txt"
    text = words.read_text()
    words.unlink()
    root = f"folder:{tmp_path}/data"
    before = open_source(root, "train")
    assert before.class_names == tuple(sorted(WNIDS))
    tiny.data.source, tiny.data.num_classes, tiny.data.num_examples = root, 3, 9
    tiny.evals.test.split, tiny.batch = "val", 8
    info = data.complete_config(tiny)[1]
    words.write_text(text)
    after = open_source(root, "train")
    assert after.class_names == IN_WORDS
    assert after.fingerprint == before.fingerprint and data.complete_config(tiny)[1].fingerprint == info.fingerprint


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("val.csv", "a.png,cat\nb.png,big dog\n"),
        ("val/labels.tsv", "file\tclass\na\tcat\nb\tbig dog\n"),
        ("my_validation-list.CSV", "image,label\nval/a.png,cat\nval/b,big dog\n"),
        ("val.csv", '"a.png","cat"\n"b.png","big dog"\n'),
    ],
)
def test_lists(tmp_path, name, text):
    for path in ("train/cat/1.png", "train/big dog/1.png", "val/a.png", "val/b.png"):
        write_image(tmp_path / path, 80 * ("dog" not in path and "b.png" not in path))
    (tmp_path / name).write_text(text)
    source = open_source(f"folder:{tmp_path}", "val")
    assert source.class_names == ("big dog", "cat") and labels_of(source) == [(0, 0), (1, 1)]


@pytest.mark.parametrize("place", ["train", "."])
def test_a_training_split_beside_a_list(tmp_path, place):
    for number in range(4):
        write_image(tmp_path / place / f"{number}.png", 80 * (number % 2))
    (tmp_path / "train.csv").write_text("id,label\n0,b\n1,a\n2,b\n3,a\n")
    if place == "train":
        (tmp_path / "sample_submission.csv").write_text("id,label\n9,a\n")
    source = open_source(f"folder:{tmp_path}", "train")
    assert source.class_names == ("a", "b") and labels_of(source) == [(0, 1), (0, 1), (1, 0), (1, 0)]


@pytest.mark.parametrize(
    ("lists", "sentence"),
    [
        ({}, r"val has no labels; .*a label file with the columns image and class, such as \S*/val\.csv$"),
        ({"val.csv": "a,cow\n"}, r"the label file of \S*/val has classes that train does not have: cow$"),
        ({"val.csv": "a,cat\n", "LOC_val.csv": "a,cat\n"}, r"several label files: LOC_val\.csv, val\.csv; keep one"),
        ({"val.csv": "a,cat\na.png,dog\n"}, "gives a.png two classes, cat and dog"),
        ({"val.csv": "x,cat\ny,dog\n"}, "none of the 2 files that .*val.csv lists exists"),
        ({"val.csv": "a\n"}, "the line a must have at least 2 columns, with image and class"),
        ({"val.csv": "same,cat\n"}, r"same in .* could be any of val/same\.jpg, val/same\.png; write the path"),
    ],
)
def test_wrong_lists(tmp_path, lists, sentence):
    for path in ("train/cat/1.png", "train/dog/1.png", "val/a.png", "val/same.png", "val/same.jpg"):
        write_image(tmp_path / path)
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=sentence):
        open_source(f"folder:{tmp_path}", "val")
    assert len(open_source(f"folder:{tmp_path}", "train")) == 2  # whatever the other splits are


def test_what_is_left_out_is_told_by_reason(tmp_path, capsys):
    for path in ("train/a/1.png", "train/b/deep/er/2.bmp", "val/1.png", "val/2.png"):
        write_image(tmp_path / path)
    for path in ("a/3.heic", "a/4.HEIC", "a/notes", "a/.5.png", "b/.cache/6.png", "b/deep/7.avif"):
        (tmp_path / "train" / path).parent.mkdir(exist_ok=True)
        (tmp_path / "train" / path).touch()
    (tmp_path / "train" / "b" / "again").symlink_to(tmp_path)
    (tmp_path / "val.csv").write_text("1,a\n9,b\n8,b\n")
    source = open_source(f"folder:{tmp_path}", "train+val")
    assert len(source) == 3 and [re.sub(r"^.*/", "", note) for note in source.notes] == [
        "train: 2 images; skipped: 1 .avif, 2 .heic, 2 hidden, 1 links to parent folders, 1 without a suffix",
        "val: 1 images, labels from val.csv; skipped: 2 listed in val.csv but missing, 1 not listed in val.csv",
    ]
    pack.main(["pack", f"folder:{tmp_path}", f"{tmp_path}-packed"])
    assert "train: 2 images; skipped: 1 .avif" in capsys.readouterr().err


def test_a_folder_that_was_read_before_has_its_fingerprint(tmp_path):
    """The fingerprint is that of version 0.1.0, so that a run on the folder goes on."""
    for path in ("train/cat/1.png", "train/cat/2.jpg", "train/dog/3.webp", "val/dog/4.png", "val/cat/5.gif"):
        write_image(tmp_path / path)
    (tmp_path / "val" / "labels.csv").write_text("4.png,cat\n5.gif,dog\n")  # class folders come first
    prints = {split: open_source(f"folder:{tmp_path}", split).fingerprint for split in ("train", "val", "validation")}
    assert prints == {"train": "c70eef9156f92317", "val": "72544d615dfcc622", "validation": "c0d2e465352cb69a"}


@pytest.mark.parametrize("kind", ["folder", "array_record", "tfds"])
def test_val_and_validation_are_one_split(tmp_path, kind, capsys):
    source, fields = f"folder:{tmp_path}/photos", {}
    write_image(tmp_path / "photos" / "train" / "a" / "1.png")
    write_image(tmp_path / "photos" / "val" / "a" / "2.png")
    if kind == "array_record":
        pack.main(["pack", source, f"{tmp_path}/packed", "--splits=train,val"])
        source = f"array_record:{tmp_path}/packed"
    if kind == "tfds":
        write_tfds(tmp_path, "small", "1.0.0", ["a"], {"train": 1, "validation": 1})
        source, fields = "tfds:small", {"data_dir": str(tmp_path)}
    one, other = (open_source(source, split, **fields) for split in ("val", "validation"))
    assert one.overlaps(other) and one[0]["label"] == other[0]["label"] == 0
    assert open_source(source, "valid", **fields).overlaps(one)
    with pytest.raises(UserError, match="'evaluation'"):
        open_source(source, "evaluation", **fields)


def test_the_word_that_was_typed_is_told(tmp_path):
    write_image(tmp_path / "photos" / "train" / "a" / "1.png")
    root = f"folder:{tmp_path}/photos"
    with pytest.raises(UserError, match=r"unknown split of the folder .* 'val'; choose from train"):
        open_source(root, "val")
    with pytest.raises(UserError, match="unknown split 'val'; choose from train"):
        pack.main(["pack", root, f"{tmp_path}/packed", "--splits=val"])


@pytest.mark.parametrize("suffix", ["bmp", "tif", "tiff", "ppm", "jfif"])
def test_formats(tmp_path, suffix):
    pixels = np.arange(9 * 8 * 3, dtype=np.uint8).reshape(9, 8, 3)
    path = tmp_path / f"x.{suffix}"
    options = {"format": "JPEG", "quality": 100, "subsampling": 0} if suffix == "jfif" else {}
    Image.fromarray(pixels).save(path, **options)
    read = np.asarray(decode.read_image(path))
    assert np.abs(read.astype(int) - pixels).max() <= (10 if suffix == "jfif" else 0)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(decode.DecodeError, match="cannot decode the image"):
        decode.read_image(path).decode()


def test_images_too_large_and_of_floating_point_are_refused(tmp_path):
    Image.new("1", (10_001, 10_000)).save(tmp_path / "huge.tif", compression="group4")
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "float.tif")
    (tmp_path / "bomb.ppm").write_bytes(b"P6\n100000 100000\n255\n")
    for name, sentence in (("huge.tif", "more than the limit"), ("bomb.ppm", "limit"), ("float.tif", "floating-point")):
        with pytest.raises(decode.DecodeError, match=sentence):
            decode.read_image(tmp_path / name).decode()


HEADERS = {
    ",file,class": "{row},{row}.png,{name}",
    "file_name,caption,label": "{row}.png,a photo of number {row},{name}",
    "Unnamed: 0,photo,breed": "{row},{other}.png,{name_of_other}",
    "label,Image_Path": "{name},train/{row}.png",
    "image_id,dx,age": "{row},{name},{row}",
    "id,width,file,category": "{other},{row},{row}.png,{name}",
    "ImageId,PredictionString": "{row},{name}",
    "image,label,source": "{row},{name},web",
    "photo,breed,age": "{row},{name},{row}",
    ",a,b": "{row},{row}.png,{name}",
    "id,photo,label": "{other},{row}.png,{name}",
    "image,label,male": "{row}.png,{name},1",
    "breed,photo": "{name},{row}.png",
}


@pytest.mark.parametrize("header", HEADERS)
def test_columns_of_a_label_file_are_found_by_their_names(tmp_path, header):
    lines = [header]
    for row in range(8):
        write_image(tmp_path / "train" / f"{row}.png", 80 * (row % 2))
        names = {"name": ("cat", "dog")[row % 2], "name_of_other": ("dog", "cat")[row % 2]}
        lines.append(HEADERS[header].format(row=row, other=(row + 1) % 8, **names))
    (tmp_path / "train.csv").write_text("\n".join(lines))
    source = open_source(f"folder:{tmp_path}", "train")
    assert source.class_names == ("cat", "dog") and labels_of(source) == [(0, 0)] * 4 + [(1, 1)] * 4


def test_a_class_for_each_image_is_believed_where_the_columns_are_named(tmp_path):
    for row in range(4):
        write_image(tmp_path / "train" / f"{row}.png")
    lines = ["file_name,label", *(f"{row}.png,class{row}" for row in range(4))]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    assert open_source(f"folder:{tmp_path}", "train").num_classes == 4


def test_columns_are_not_guessed(tmp_path):
    for row in range(4):
        write_image(tmp_path / "train" / f"ISIC_{row}.png")
    lines = [f"HAM_{row},ISIC_{row},mel" for row in range(4)]
    (tmp_path / "train.csv").write_text("\n".join(["lesion_id,image_id,dx", *lines]))
    with pytest.raises(UserError, match=r"none of the 5 files that .* lists exists"):
        open_source(f"folder:{tmp_path}", "train")


@pytest.mark.parametrize("header", ["image,MEL,NV", "photo,a,b", None])
def test_a_column_for_each_class_is_refused(tmp_path, header):
    """Image, and 1 in the column of its class: the table of ISIC's challenges."""
    for row in range(4):
        write_image(tmp_path / "train" / f"{row}.png")
    lines = [header] * bool(header) + [f"{row}.png,{row % 2}.0,{1 - row % 2}.0" for row in range(4)]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"train.csv has 2 columns of 0 and 1, so .* write one column label"):
        open_source(f"folder:{tmp_path}", "train")


@pytest.mark.parametrize(
    "line", ["{row},{row}.png,dog", "{row}.png,a photo of {row},dog", "{row}.png,{row},dog", "{row},{row},photo"]
)
def test_a_label_file_with_a_class_for_each_image_is_refused(tmp_path, line):
    for row in range(8):
        write_image(tmp_path / "train" / f"{row}.png")
    (tmp_path / "train.csv").write_text("\n".join(line.format(row=row) for row in range(8)))
    with pytest.raises(UserError, match=r"train.csv gives 8 images 8 classes, such as '.*0.*', so the column that was"):
        open_source(f"folder:{tmp_path}", "train")
