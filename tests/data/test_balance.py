"""Classes that are not equal in number: how many images they have, and how often they are read."""

import dataclasses
import pickle

import numpy as np
import pytest
from PIL import Image

from vit_jax import UserError, data, pack
from vit_jax.config import get_config
from vit_jax.data.class_counts import balanced_counts, describe_counts, drawn_counts
from vit_jax.data.order import BalancedOrder, BalancedStreamOrder, ClassDraws, MixedOrder, MixedStreamOrder, apportion
from vit_jax.data.order_choice import check_balance, training_order
from vit_jax.data.sources import Mixture, SourceConfig, open_split
from vit_jax.program import prepare

LABELS = np.repeat([0, 1, 2], [60, 30, 6])[np.random.default_rng(0).permutation(96)]
SHARDS = [20, 30, 1, 25, 20]


def epoch(order, number, count=96):
    return [order[position] for position in range(number * count, (number + 1) * count)]


@pytest.mark.parametrize(("balance", "expected"), [(0.0, [60, 30, 6]), (0.5, [47, 34, 15]), (1.0, [32, 32, 32])])
def test_an_epoch_has_each_class_in_its_share(balance, expected):
    orders = (
        BalancedOrder(ClassDraws(LABELS, balance, 3)),
        BalancedStreamOrder(ClassDraws(LABELS, balance, 3), SHARDS, 8, 2, 2),
    )
    for order in orders:
        read = np.zeros(96, int)
        for number in range(7):
            found = np.bincount(epoch(order, number), minlength=96)
            read += found
            assert np.bincount(LABELS, weights=found).tolist() == expected
            for label in range(3):  # no image of a class is behind
                assert np.ptp(read[label == LABELS]) <= 1
        assert (found == order.draws.copies(6)).all()
        assert epoch(order, 0) != epoch(order, 1)


def test_a_run_finds_the_same_images_wherever_it_goes_on():
    for make in (
        lambda: BalancedOrder(ClassDraws(LABELS, 0.7, 3)),
        lambda: BalancedStreamOrder(ClassDraws(LABELS, 0.7, 3), SHARDS, 8, 2, 2),
    ):
        whole, resumed = make(), make()
        for position in range(250):
            whole[position]
        again = pickle.loads(pickle.dumps(whole))
        assert [resumed[position] for position in range(250, 300)] == [again[position] for position in range(250, 300)]


def test_a_reader_needs_the_shards_of_its_window():
    order = BalancedStreamOrder(ClassDraws(LABELS, 1.0, 3), SHARDS, 8, 2, 2)
    for number in range(40):
        for reader in range(2):
            rows = range(8 * number + 4 * reader, 8 * number + 4 * reader + 4)
            read = {order.shard_of(order[position]) for position in rows}
            assert read <= set(order.needed(reader, number, number))


def test_each_part_of_a_mixture_is_balanced_by_itself():
    mixture, labels = Mixture((96, 20), (1, 1)), np.concatenate([LABELS, np.repeat([1, 3], [15, 5])])
    orders = MixedOrder(mixture, 5, labels, 1.0), MixedStreamOrder(mixture, [*SHARDS, 12, 8], 8, 2, 2, 5, labels, 1.0)
    for order in orders:
        found = np.array([order[position] for position in range(2 * 96 * 5)])
        first, second = labels[found[found < 96]], labels[found[found >= 96]]
        assert len(first) == len(second) == 480
        assert np.bincount(first).tolist() == [160, 160, 160]
        assert np.bincount(second).tolist() == [0, 240, 0, 240]


def test_numbers_in_proportion():
    assert apportion(np.array([1.0, 1.0, 1.0]), 8).tolist() == [3, 3, 2]
    assert apportion(np.array([60.0, 30.0, 6.0]), 96).tolist() == [60, 30, 6]
    few = apportion(np.array([10_000, 1, 1, 3]) ** 0.5, 10_005)
    assert few.sum() == 10_005 and few.min() >= 1


# Counts.


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of 12, 4 and 2 images."""
    folder = tmp_path_factory.mktemp("photos")
    for label, (name, count) in enumerate({"cat": 12, "dog": 4, "eel": 2}.items()):
        (folder / name).mkdir()
        for number in range(count):
            grey = np.full((8, 8, 3), 20 * number + label, np.uint8)
            Image.fromarray(grey).save(folder / name / f"{number}.png")
    return f"folder:{folder}"


@pytest.fixture(scope="module")
def indexed(photos, tmp_path_factory):
    """The folder, and the same images packed with their labels."""
    out = tmp_path_factory.mktemp("packed") / "photos"
    pack.main(["pack.py", photos, str(out), "--shards=2", "--shuffle=0", "--index-labels"])
    return photos, f"array_record:{out}"


def opened(source, split="train"):
    return open_split(SourceConfig(source), split)


def test_packed_labels_are_those_of_the_records(indexed):
    folder, records = map(opened, indexed)
    assert records.labels().tolist() == [records[index]["label"] for index in range(len(records))]
    assert records.class_counts().tolist() == folder.class_counts().tolist() == np.bincount(folder.labels()).tolist()
    half = opened(indexed[1], "train[:50%]")
    assert half.class_counts().tolist() == np.bincount(half.labels(), minlength=half.num_classes).tolist()
    assert (
        "_labels" not in repr(pickle.dumps(half)) or not pickle.loads(pickle.dumps(half)).split_labels.__self__._labels
    )


def test_labels_are_added_to_a_packed_set(photos, tmp_path):
    words = ["pack.py", photos, str(tmp_path), "--shards=1"]
    pack.main(words)
    before = opened(f"array_record:{tmp_path}")
    assert before.class_counts() is None and before.labels() is None
    pack.main([*words, "--index-labels"])
    after = opened(f"array_record:{tmp_path}")
    assert after.fingerprint == before.fingerprint and after.labels() is not None
    pack.main(words)  # which keeps them
    assert opened(f"array_record:{tmp_path}").class_counts() is not None
    np.save(tmp_path / "train-labels.npy", np.zeros(1, np.int32))
    with pytest.raises(UserError, match=r"train-labels\.npy: it does not have the labels of .* with --index-labels"):
        opened(f"array_record:{tmp_path}").labels()


def test_a_mixture_counts_what_it_draws(indexed):
    folder, records = indexed
    mixed = opened(f"mix:3*{folder}+1*{records}")
    counts = opened(folder).class_counts()
    assert mixed.class_counts().tolist() == (2 * counts).tolist()
    assert np.bincount(mixed.labels()).tolist() == (2 * counts).tolist()
    np.testing.assert_allclose(drawn_counts(mixed), 2 * counts)  # both parts have the same classes
    np.testing.assert_allclose(drawn_counts(mixed, 1.0), 2 * counts.sum() / len(counts))
    np.testing.assert_allclose(balanced_counts(np.array([16, 4, 0]), 0.5), [40 / 3, 20 / 3, 0])


def test_the_first_lines_name_the_smallest_and_the_largest_classes():
    names = ("cat", "dog", "eel", "fox", "gnu", "hen")
    assert describe_counts(np.array([9, 9]), None) == ["Classes: 9 images each."]
    assert describe_counts(np.array([9, 5, 7]), names) == ["Classes: from 5 images (dog) to 9 (cat)."]
    line, advice = describe_counts(np.array([1000, 2, 2, 2, 2, 1000]), names)
    assert line == "Classes: from 2 images (dog; eel; fox; ...) to 1,000 (cat; hen)."
    assert advice.startswith("The largest class has 500 times as many images as the smallest: docs/recipes.md")
    assert "there are none of the smallest" in describe_counts(np.array([3, 0]), None)[1]


# In a run.


def configured(source, **fields):
    config = get_config()
    config.update_from_flattened_dict(
        {"data.source": source, "data.split": "train", "evals.test.split": "train", "batch": 8, "total_steps": 2}
        | {"resolution": 16, "model.name": "ViT-mu/16"}
        | fields
    )
    return config


def test_a_streamed_run_reads_a_balanced_epoch(indexed):
    config = configured(indexed[1], **{"data.order": "stream", "data.balance": 1.0})
    completed, info = data.complete_config(config)
    source = info.opened["", "train"]
    order, count = training_order(completed, source), len(source)
    drawn = source.labels()[[order[position] for position in range(count)]]
    assert np.ptp(np.bincount(drawn)) <= 1
    assert any(
        note.startswith("Classes balanced by 1: an epoch has an image of the smallest class") for note in info.notes
    )
    np.testing.assert_allclose(info.class_counts, count / source.num_classes)


def test_what_cannot_be_balanced_is_refused(indexed):
    config = configured("synthetic", **{"data.balance": 0.5, "data.num_classes": 3, "data.num_examples": 40})
    with pytest.raises(UserError, match=r"data\.balance=0\.5 needs the label of each image .* --index-labels"):
        prepare(config)
    several = dataclasses.replace(opened(indexed[0]), max_labels=2)
    with pytest.raises(UserError, match="needs images with one label each"):
        check_balance(configured(indexed[0], **{"data.balance": 0.5}), several)
    for field, value in (("class_weights", "balanced"), ("logit_adjustment", 1.0)):
        config = configured("synthetic", **{"data.num_classes": 3, "data.num_examples": 40, f"task.{field}": value})
        with pytest.raises(UserError, match=rf"task\.{field}=\w+ needs the number of images of each class"):
            prepare(config)


def test_the_weights_of_a_run_follow_what_it_draws(indexed):
    fields = {"task.class_weights": "balanced", "evals.test.preprocess": "resize(16)|value_range(-1,1)"}
    counts = opened(indexed[0]).class_counts()
    _, _, program = prepare(configured(indexed[0], **fields))
    np.testing.assert_allclose(program.task.class_weights, counts.sum() / (len(counts) * counts))
    _, _, program = prepare(configured(indexed[0], **fields | {"data.balance": 1.0}))
    np.testing.assert_allclose(program.task.class_weights, 1.0)
