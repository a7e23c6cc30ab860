"""Classes of two sources are joined and compared by what they have in common: names or ids, in one form of Unicode."""

import json
import shutil
import unicodedata

import pytest

from tests.conftest import write_tfds
from tests.data.test_folder_splits import write_splits
from tests.data.test_parquet import write_table
from tests.data.test_sources import open_source, write_image
from vit_jax import UserError, data, pack
from vit_jax.config.resume import check_data
from vit_jax.data import sources

NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


def labels(source):
    return [source.label(row) for row in range(len(source))]


def test_a_folder_with_words_joins_one_without(tmp_path):
    plain, words = write_splits(tmp_path / "plain", "train"), write_splits(tmp_path / "words", "train", "val")
    (tmp_path / "words" / "words.txt").write_text("dog\tpug\ncat\ttabby\n")
    joined = open_source(f"mix:1*{words}+1*{plain}", "train")
    assert joined.class_names == ("tabby [cat]", "pug [dog]") and joined.class_ids == ("cat", "dog")
    assert sorted(labels(joined)) == [0] * 4 + [1] * 4 and joined.name.endswith("joined by id or in one Unicode form")
    assert joined.notes[-1] == f"The classes of the mixture are joined: {words} by id, {plain} by name; 2 in all."
    write_tfds(tmp_path, "some", "1.0.0", ["cat", "dog", "owl"], {"train": 3})
    third = open_source(f"mix:1*{words}+1*tfds:some", "train", data_dir=str(tmp_path))
    assert third.class_names == ("tabby [cat]", "pug [dog]", "owl") and labels(third)[-3:] == [0, 1, 2]
    pack.main(["pack", words, f"{tmp_path}/packed"])
    fourth = open_source(f"mix:1*array_record:{tmp_path}/packed+1*{plain}", "train")
    assert fourth.num_classes == 2 and fourth.class_ids == ("cat", "dog")


def test_numbers_are_no_ids_of_classes(tmp_path):
    """Folders `0` and `1` whose words stand in other orders: by these numbers, dogs would be cats."""
    folders = [tmp_path / name for name in "ab"]
    for folder, words in zip(folders, (("cat", "dog"), ("dog", "cat")), strict=True):
        for number in (0, 1):
            write_image(folder / "train" / str(number) / "x.png")
        (folder / "words.txt").write_text(f"0\t{words[0]}\n1\t{words[1]}\n")
    one, other = (open_source(f"folder:{folder}", "train") for folder in folders)
    assert not sources.have_same_classes(one, other)
    mixed = open_source(f"mix:1*folder:{folders[0]}+1*folder:{folders[1]}", "train")
    assert mixed.num_classes == 4 and sorted(labels(mixed)) == [0, 1, 2, 3]


def test_a_mixture_of_an_older_version_is_resumed_or_named(tmp_path, tiny):
    words = [write_splits(tmp_path / name, "train", "val") for name in "ab"]
    for name in "ab":
        (tmp_path / name / "words.txt").write_text("dog\tpug\ncat\ttabby\n")
    both = open_source(f"mix:1*{words[0]}+1*{words[1]}", "train")
    assert both.class_names == ("tabby [cat]", "pug [dog]") and both.class_ids is None
    # Of the version before: a run on it goes on.
    assert (both.name, both.fingerprint) == ("mix", "f81aebb36fb97e20")
    (tmp_path / "b" / "words.txt").unlink()
    tiny.data.update(source=f"mix:1*{words[0]}+1*{words[1]}", split="train", num_classes=None, num_examples=None)
    tiny.evals.test.split, tiny.batch = "val", 8
    now = data.complete_config(tiny)[1].fingerprint
    with pytest.raises(UserError, match=r"data set: mix -> mix with its classes joined by id or .*; classes: 4 -> 2"):
        check_data(now | {"data set": "mix", "classes": 4}, now, False, "workdirs/old")


def test_an_evaluation_has_the_classes_of_training_by_id(tmp_path, tiny):
    plain, words = write_splits(tmp_path / "plain", "train", "val"), write_splits(tmp_path / "words", "train", "val")
    (tmp_path / "words" / "words.txt").write_text("dog\tpug\ncat\ttabby\n")
    tiny.data.update(source=words, split="train", num_classes=None, num_examples=None)
    tiny.evals.test.update(source=plain, split="val")
    tiny.batch = 4
    assert data.complete_config(tiny)[0].data.num_classes == 2
    shutil.move(tmp_path / "plain" / "train" / "dog", tmp_path / "plain" / "train" / "owl")
    shutil.move(tmp_path / "plain" / "val" / "dog", tmp_path / "plain" / "val" / "owl")
    with pytest.raises(UserError, match="has other classes than the training data"):
        data.complete_config(tiny)


def test_names_are_compared_in_one_form_of_unicode(tmp_path):
    for split, form in (("train", NFD), ("val", NFC)):
        for label, name in enumerate((form, "tea")):
            write_image(tmp_path / "set" / split / name / "1.png", label)
    write_image(tmp_path / "set" / "test" / "1.png")
    (tmp_path / "set" / "test.csv").write_text(f"1,{NFC}\n")
    (tmp_path / "set" / "words.txt").write_text(f"{NFC}\ta drink\n")
    folder = f"folder:{tmp_path}/set"
    assert open_source(folder, "train").class_names == (f"a drink [{NFD}]", "tea")
    assert sorted(labels(open_source(folder, "val"))) == [0, 1] and labels(open_source(folder, "test")) == [0]
    table = write_table(
        tmp_path / "a.parquet", {"label": {"_type": "ClassLabel", "names": ["tea", NFC]}}, label=[0, 1] * 2, count=4
    )
    mixed = open_source(f"mix:1*{folder}+1*{table}", "train")
    assert mixed.num_classes == 2 and labels(mixed)[-4:] == [1, 0, 1, 0]
    (tmp_path / "map.json").write_text(json.dumps({NFD: "tea"}))
    assert open_source(f"mix:1*{table},classes={tmp_path}/map.json+1*{table}", "train").class_names == ("tea", NFC)
    pack.main(["pack", folder, f"{tmp_path}/packed", f"--classes={NFC}", "--splits=train"])
    write_image(tmp_path / "set" / "train" / NFC / "1.png")
    with pytest.raises(UserError, match="several classes café, whose names differ only in their form of Unicode"):
        open_source(folder, "val")
