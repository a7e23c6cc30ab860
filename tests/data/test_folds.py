"""Folds of a split, groups that no fold divides, and lists of images that are left out."""

import itertools
import re

import numpy as np
import pytest

from tests.data.test_sources import write_image
from vit_jax import UserError, data, pack
from vit_jax.config import get_config
from vit_jax.data.order import StreamOrder
from vit_jax.data.sources import SourceConfig, open_split
from vit_jax.data.sources.folds import grouped_folds, stratified_folds
from vit_jax.evals.prediction_files import split_label
from vit_jax.program import prepare


def opened(source, split="train", **fields):
    return open_split(SourceConfig(str(source), **fields), split)


def keys(source):
    return [source.example_key(index) for index in range(len(source))]


def write_list(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of 12, 7 and 5 images for training, of 4 patients a class and one of all, and 2 for testing."""
    folder = tmp_path_factory.mktemp("photos")
    patients = ["image,side,patient"]
    for label, (name, count) in enumerate({"cat": 12, "dog": 7, "eel": 5}.items()):
        for number in range(count):
            write_image(folder / f"train/{name}/{name}{number}.png", 20 * label)
            patients.append(f"{name}{number},left,{'all' if number == 4 else f'{name}{number % 4}'}")
    for name in ("cat", "dog", "eel"):
        write_image(folder / f"test/{name}/{name}0.png", 0)
    write_list(folder.parent / "patients.csv", *patients)
    return folder


@pytest.fixture(scope="module")
def packed(photos, tmp_path_factory):
    """The same images in four shards, with their labels."""
    out = tmp_path_factory.mktemp("packed") / "photos"
    pack.main(["pack.py", f"folder:{photos}", str(out), "--shards=4", "--shuffle=0", "--index-labels"])
    return f"array_record:{out}"


# Which image is in which fold.


@pytest.mark.parametrize("split", ["train", "train[100:700]", "train[25%:]"])
def test_folds_are_disjoint_cover_the_split_and_are_stratified(split):
    whole, folds = opened("digits", split), [opened("digits", f"{split}[fold {number}/7]") for number in range(1, 8)]
    assert sorted(itertools.chain(*map(keys, folds))) == sorted(keys(whole))
    counts = np.array([fold.class_counts() for fold in folds])
    assert np.ptp(counts, axis=0).max() <= 1 and np.ptp(counts.sum(axis=1)) <= 1
    rest = opened("digits", f"{split}[not fold 3/7]")
    assert sorted(keys(rest) + keys(folds[2])) == sorted(keys(whole))
    assert [rest[index]["label"] for index in range(0, len(rest), 50)] == rest.labels()[::50].tolist()
    assert rest.class_counts().tolist() == (whole.class_counts() - counts[2]).tolist()


def test_the_folds_of_a_set_never_change():
    assert opened("digits", "train[fold 2/5]").parts[0][1].digest == "39eced3831b549f3"
    assert stratified_folds(np.array([0, 1, 0, 1, 0, -1, 0]), 2).tolist() == [0, 0, 1, 1, 1, 0, 0]
    labels, groups = np.arange(12) % 3, list("aabbccddeeff")
    assert grouped_folds(labels, groups, 2).tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1]


def test_fold_k_of_5_is_folds_k_and_k_plus_5_of_10():
    assert keys(opened("digits", "train[fold 2/5]")) == sorted(
        keys(opened("digits", "train[fold 2/10]")) + keys(opened("digits", "train[fold 7/10]")),
        key=lambda key: int(key.partition("/")[2]),
    )


def test_the_check_of_overlapping_splits_knows_folds():
    folds = {text: opened("digits", f"train[{text}]") for text in ("fold 1/5", "fold 2/5", "not fold 1/5", "fold 1/3")}
    whole, some, tests = opened("digits"), opened("digits", "train[:50]"), opened("digits", "test")
    assert not folds["fold 1/5"].overlaps(folds["fold 2/5"]) and not folds["fold 1/5"].overlaps(folds["not fold 1/5"])
    assert folds["fold 2/5"].overlaps(folds["not fold 1/5"]) and folds["fold 1/5"].overlaps(folds["fold 1/3"])
    for fold in folds.values():
        assert fold.overlaps(whole) and some.overlaps(fold) and not fold.overlaps(tests)
    assert len({source.fingerprint for source in (*folds.values(), whole, some)}) == 6


def test_parts_of_a_sum_and_of_a_mixture_have_folds_of_their_own():
    both = opened("digits", "train[fold 1/2]+test")
    assert keys(both) == keys(opened("digits", "train[fold 1/2]")) + keys(opened("digits", "test"))
    mixed = opened("mix:1*digits+3*digits", "test[fold 1/3]")
    assert len(mixed) == 2 * len(opened("digits", "test[fold 1/3]")) and mixed.mixture.weights == (1, 3)
    assert mixed.class_counts().tolist() == (2 * opened("digits", "test[fold 1/3]").class_counts()).tolist()


def test_packed_and_streamed_images_have_the_folds_of_their_labels(packed, photos, tmp_path):
    fold, rest = opened(packed, "train[fold 1/4]"), opened(packed, "train[not fold 1/4]")
    assert fold.class_counts().tolist() == [3, 2, 1] and rest.class_counts().tolist() == [9, 5, 4]
    assert rest.labels().tolist() == [rest[index]["label"] for index in range(len(rest))] and not rest.notes
    assert sum(rest.shards.examples) == len(rest) and 1 < len(rest.shards.runs) <= 4
    order = StreamOrder(rest.shards.examples, 2, 2, 2, 0)
    assert sorted(order[position] for position in range(len(rest))) == list(range(len(rest)))
    plain = tmp_path / "plain"
    pack.main(["pack.py", f"folder:{photos}", str(plain), "--shards=1"])
    [note] = opened(f"array_record:{plain}", "train[fold 1/4]").notes
    assert note.startswith("The folds of train[fold 1/4] are drawn without regard to classes")
    assert [len(opened(f"array_record:{plain}", f"train[fold {number}/5]")) for number in range(1, 6)] == [
        5,
        5,
        5,
        5,
        4,
    ]


def test_a_group_is_never_divided(photos):
    groups = {"groups": str(photos.parent / "patients.csv"), "group_column": "patient"}
    folds = [opened(f"folder:{photos}", f"train[fold {number}/3]", **groups) for number in range(1, 4)]
    assert sorted(itertools.chain(*map(keys, folds))) == sorted(keys(opened(f"folder:{photos}")))
    assert sum(len(fold.groups) for fold in folds) == 13 and not folds[0].groups & folds[1].groups
    counts = np.array([fold.class_counts() for fold in folds])
    assert np.ptp(counts.sum(axis=1)) <= 2 and np.ptp(counts, axis=0).max() <= 3


def test_grouped_folds_are_balanced_by_class():
    random = np.random.default_rng(0)
    groups = random.integers(0, 400, 4000)
    labels = random.choice(4, 4000, p=[0.6, 0.2, 0.15, 0.05])
    assigned = grouped_folds(labels, [*map(str, groups)], 5)
    assert all(len(set(assigned[groups == group])) == 1 for group in set(groups.tolist()))
    counts = np.array([np.bincount(labels[assigned == fold]) for fold in range(5)])
    assert np.ptp(counts, axis=0).max() <= 6  # of 2,400, 800, 600 and 200 images


def test_a_run_warns_where_evaluation_and_training_share_groups(photos, caplog):
    fields = {"data.groups": str(photos.parent / "patients.csv"), "data.group_column": "patient"}
    data.complete_config(configured(f"folder:{photos}", "train[not fold 1/3]", "train[fold 1/3]", **fields))
    assert not caplog.messages
    data.complete_config(configured(f"folder:{photos}", "train[:50%]", "train[50%:]", **fields))
    assert re.search(r"evals\.test shares \d+ groups of data\.groups with the training images", caplog.text)


# Images that are left out.


def test_images_whose_answers_a_table_gives_have_groups_and_are_left_out(tmp_path):
    lines = [f"{number}.png,{number / 8},site{number % 4}" for number in range(12)]
    table = write_list(tmp_path / "table.csv", "image,grade,site", *lines)
    for number in range(12):
        write_image(tmp_path / f"photos/{number}.png", 0)
    source, fields = f"folder:{tmp_path}/photos,table={table},targets=grade", {"groups": table, "group_column": "site"}
    folds = [opened(source, f"train[fold {number}/4]", **fields) for number in range(1, 5)]
    assert [len(fold) for fold in folds] == [3, 3, 3, 3] and all(len(fold.groups) == 1 for fold in folds)
    assert folds[0].notes[-1].endswith("drawn without regard to classes: images have numbers.")
    left = opened(source, "train[fold 1/4]", exclude=write_list(tmp_path / "list.txt", keys(folds[0])[0]), **fields)
    assert keys(left) == keys(folds[0])[1:] and left[1]["label"] == folds[0][2]["label"]


def test_listed_images_are_left_out_and_no_other_moves(photos, tmp_path):
    source = f"folder:{photos}"
    listed = write_list(
        tmp_path / "list.csv", "score,image", "1,train/cat/cat0.png", "2,train/dog/dog3.png", "3,test/cat/cat0.png"
    )
    for split in ("train", "train[fold 1/2]", "train[:50%]", "test"):
        before, after = opened(source, split), opened(source, split, exclude=listed)
        gone = {"train/cat/cat0.png", "train/dog/dog3.png", "test/cat/cat0.png"} & set(keys(before))
        assert keys(after) == [key for key in keys(before) if key not in gone]
        assert (after.fingerprint == before.fingerprint) == (not gone)
    assert opened(source, exclude=listed).class_counts().tolist() == [11, 6, 5]


def test_images_without_names_are_listed_by_position(packed, tmp_path):
    for source in ("digits", packed):
        whole = opened(source)
        listed = write_list(tmp_path / "list.txt", "train/0", f"train/{len(whole) - 1}", "train/7", "test/1")
        left = opened(source, exclude=listed)
        assert keys(left) == [key for index, key in enumerate(keys(whole)) if index not in (0, 7, len(whole) - 1)]
        assert left[5]["label"] == whole[6]["label"] and left[6]["label"] == whole[8]["label"]
    assert sum(left.shards.examples) == len(left)


def test_a_run_has_the_numbers_and_the_fingerprint_of_what_is_left(photos, tmp_path):
    listed = write_list(tmp_path / "list.txt", "train/cat/cat11.png")
    excluding = configured(f"folder:{photos}", "train", "test", **{"data.exclude": listed})
    completed, info = data.complete_config(excluding)
    assert (completed.data.num_examples, completed.data.exclude) == (23, listed)
    assert info.class_counts == (11, 7, 5)
    write_list(tmp_path / "list.txt", "train/cat/cat10.png")
    assert data.complete_config(excluding)[1].fingerprint["contents"] != info.fingerprint["contents"]
    assert prepare(excluding)[0].total_steps == int(2 * 23 / 8)


# Mistakes.


def configured(source, split, evaluated, **fields):
    config = get_config()
    config.update_from_flattened_dict(
        {"data.source": source, "data.split": split, "evals.test.split": evaluated, "batch": 8, "total_epochs": 2.0}
        | {"resolution": 16, "model.name": "ViT-mu/16", "evals.test.preprocess": "resize(16)|value_range(-1,1)"}
        | fields
    )
    return config


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("train[fold 6/5]", "there is no train[fold 6/5]; the 5 folds have the numbers 1 to 5"),
        ("train[not fold 0/5]", "there is no train[not fold 0/5]; the 5 folds have the numbers 1 to 5"),
        ("train[fold 1/1]", "there is no train[fold 1/1]; a split is divided into 2 folds or more"),
        ("train[fold 1/6]", "there is no train[fold 1/6]: there are only 5 images of eel"),
        ("train[fold 1/5]+train[fold 2/5]+test[fold 1/5]", "there is no test[fold 1/5]: there is only 1 image of cat"),
        ("train[fold 2]", "write train, train[:98%], train[-1000:], train+test or train[fold 2/5]"),
        ("train[fold 1/5][:50%]", "cannot read the split 'train[fold 1/5][:50%]'"),
        ("trian[fold 1/5]", "did you mean 'train'"),
    ],
)
def test_folds_that_do_not_exist_are_refused(photos, split, message):
    with pytest.raises(UserError, match=re.escape(message)):
        opened(f"folder:{photos}", split)


@pytest.mark.parametrize(
    ("lines", "fields", "message"),
    [
        (["image,site", "a.png,1", "b.png"], {}, "the line b.png has 1 columns, the first 2"),
        (["cat0,1"], {}, "needs a first line that names its columns"),
        (["image,site,side", "cat0,1,2"], {}, "has no column group, but image, site, side; set data.group_column"),
        (["image,site", "cat0,1"], {"group_column": "sight"}, "has no column sight, but image, site"),
        (["image,site", "cat0,1", "train/cat/cat0.png,2"], {}, "gives train/cat/cat0.png two groups, 1 and 2"),
        (["image,site", "cat0,1", "dog0,2"], {}, "states no group for 22 of 24 images of train[fold 1/2], such as"),
    ],
)
def test_groups_that_do_not_fit_are_refused(photos, tmp_path, lines, fields, message):
    groups = write_list(tmp_path / "groups.csv", *lines)
    with pytest.raises(UserError, match=re.escape(message)):
        opened(f"folder:{photos}", "train[fold 1/2]", groups=groups, **fields)


def test_fewer_groups_than_folds_and_sums_of_grouped_folds_are_refused(tmp_path):
    groups = write_list(tmp_path / "groups.csv", "id,group", *(f"test/{row},{row % 3}" for row in range(359)))
    assert len(opened("digits", "test[fold 3/3]", groups=groups).groups) == 1
    with pytest.raises(UserError, match="states only 3 groups; take fewer folds"):
        opened("digits", "test[fold 1/4]", groups=groups)
    with pytest.raises(UserError, match=r"folds of several parts, which data\.groups could not keep apart"):
        opened("digits", "test[:50%][fold 1/2]+test[50%:][fold 1/2]", groups=groups)


@pytest.mark.parametrize(
    ("source", "lines", "message"),
    [
        (
            "folder",
            ["train/cat/cat1.png", "cat0.png"],
            "lists images that the data do not have (1 in all): cat0.png; write paths as in",
        ),
        ("folder", ["test/cat/cat9.png", "train/0"], "lists images that the data do not have (1 in all): train/0"),
        ("digits", ["train/1438"], "lists images that the data do not have (1 in all): train/1438; write positions"),
        (
            "digits",
            [f"test/{row}" for row in range(400)],
            "lists images that the data do not have (41 in all): test/359",
        ),
        ("mix:1*digits+1*digits", ["train/0"], "list images of one source, not of a mixture"),
        ("digits", [f"test/{row}" for row in range(359)], "lists all 359 images of the split; leave some"),
    ],
)
def test_lists_that_do_not_fit_are_refused(photos, tmp_path, source, lines, message):
    listed = write_list(tmp_path / "list.txt", *lines)
    source = f"folder:{photos}" if source == "folder" else source
    split = "test" if lines[0].startswith("test") and source == "digits" else "train"
    with pytest.raises(UserError, match=re.escape(message)):
        opened(source, split, exclude=listed)


def test_an_end_of_a_path_that_fits_several_images_is_refused(tmp_path):
    for name in ("a/1.png", "b/1.png", "a/2.png", "b/3.png"):
        write_image(tmp_path / "photos" / name, 0)
    groups = write_list(tmp_path / "groups.csv", "image,group", "a/1,x", "b/1.png,y", "2,x", "3.png,y")
    assert len(opened(f"folder:{tmp_path}/photos", "train[fold 1/2]", groups=groups)) == 2
    write_list(tmp_path / "groups.csv", "image,group", "1.png,x")
    with pytest.raises(UserError, match=r"1\.png in .*groups\.csv could be any of a/1\.png, b/1\.png; write the path"):
        opened(f"folder:{tmp_path}/photos", "train[fold 1/2]", groups=groups)


def test_folds_in_names_of_files():
    assert split_label("train[fold 2/5]") == "train_fold_2_5"
    assert split_label("train[:80%][not fold 2/5]+test") == "train_0_80pct_not_fold_2_5_test"
