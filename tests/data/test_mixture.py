"""Mixtures: shares that are exact, each part in epochs of its own, and classes that join."""

import pickle
import random
from collections import Counter

import numpy as np
import pytest

from tests.data.test_formats import config_of, examples, here, there  # noqa: F401
from tests.data.test_loader import assert_same, read_batches
from tests.data.test_parquet import write_table
from tests.data.test_sources import open_source, write_image
from tests.data.test_stream import COUNT, shard_bytes, shards, wait_for_fetchers  # noqa: F401
from tests.data.test_stream import config_of as run_config
from vit_jax import UserError, data
from vit_jax.data.order import MixedOrder, MixedStreamOrder
from vit_jax.data.order_choice import training_order
from vit_jax.data.preprocess import parse_pipe
from vit_jax.data.setup import absolute_source
from vit_jax.data.shard_fetcher import ShardFetcher
from vit_jax.data.sources import Mixture, list_splits
from vit_jax.data.sources.mixture import WeightedSource, parse_mixture, parse_proportions
from vit_jax.data.sources.source import SourceConfig

PIPE = parse_pipe("resize(4)|value_range(-1,1)", 4)


def mixed(here, *weights):  # noqa: F811
    """The Parquet and the TFRecord set, which have the same images and classes."""
    return f"mix:{weights[0]}*parquet:{here}/parquet+{weights[1]}*tfds:tiny", {"data_dir": f"{here}/tfds"}


@pytest.mark.parametrize(("lengths", "weights"), [((20, 7), (7, 3)), ((5, 5), (1, 1)), ((3, 11, 4), (1, 2, 4))])
def test_shares_are_exact_and_epochs_are_of_each_part(lengths, weights):
    order = MixedOrder(Mixture(lengths, weights), 5)
    count = 25 * sum(weights)
    drawn = [order[position] for position in range(count)]
    starts = np.cumsum([0, *lengths])
    part = np.searchsorted(starts, drawn, side="right") - 1
    for number, weight in enumerate(weights):
        taken = np.cumsum(part == number)
        shares = np.arange(1, count + 1) * weight / sum(weights)
        assert np.abs(taken - shares).max() < len(weights)
        assert taken[sum(weights) - 1 :: sum(weights)].tolist() == [weight * turn for turn in range(1, 26)]
        own = [index for index, one in zip(drawn, part, strict=True) if one == number]
        length, epochs = lengths[number], len(own) // lengths[number]
        passes = [own[epoch * length : (epoch + 1) * length] for epoch in range(epochs)]
        assert all(sorted(one) == list(range(starts[number], starts[number + 1])) for one in passes)
        assert length < 4 or len({tuple(one) for one in passes}) > 1
    assert [order[position] for position in (40, 2, 27)] == [drawn[position] for position in (40, 2, 27)]


def some_mixture(chance):
    """A mixture in shards: its streamed order, and the part and the shard of each example."""
    readers, parts = chance.choice([1, 2, 4]), chance.randint(2, 3)
    parted = [[chance.randint(1, 9) for _ in range(chance.randint(4, 8))] for _ in range(parts)]
    mixture = Mixture(tuple(map(sum, parted)), tuple(chance.randint(1, 9) for _ in range(parts)))
    lengths = [length for of_part in parted for length in of_part]
    stream = MixedStreamOrder(mixture, lengths, readers * chance.randint(1, 6), readers, chance.randint(1, 3), 7)
    part_of = np.repeat(np.arange(parts), mixture.lengths)
    return mixture, stream, part_of, np.repeat(np.arange(len(lengths)), lengths)


@pytest.mark.parametrize("seed", range(10))
def test_a_streamed_mixture_reads_each_part_in_epochs_of_its_own(seed):
    mixture, stream, part_of, shard_of = some_mixture(random.Random(seed))
    rows, total = stream.batch // stream.readers, sum(mixture.weights)
    batches = -(-3 * max(mixture.lengths) * total // (min(mixture.weights) * stream.batch)) + 2
    drawn = np.array([stream[position] for position in range(batches * stream.batch)]).reshape(batches, -1)
    for part, weight in enumerate(mixture.weights):
        read = dict[int, list[int]]()  # batch, row -> slot in the part's own stream
        for reader in range(stream.readers):
            own = drawn[:, reader * rows : (reader + 1) * rows].ravel()
            taken = np.cumsum(part_of[own] == part)
            assert np.abs(taken - np.arange(1, len(own) + 1) * weight / total).max() < 2 * len(mixture.weights)
            for number, index in enumerate(own[part_of[own] == part].tolist()):
                read[number * stream.readers + reader] = index
            needed = [stream.needed(reader, number, number) for number in range(batches)]
            used = drawn[:, reader * rows : (reader + 1) * rows]
            assert all({*shard_of[one].tolist()} <= set(of_batch) for one, of_batch in zip(used, needed, strict=True))
        length, start = mixture.lengths[part], mixture.starts[part]
        for epoch in range(2):
            indices = [read[slot] for slot in range(epoch * length, (epoch + 1) * length)]
            assert sorted(indices) == list(range(start, start + length))
    assert [pickle.loads(pickle.dumps(stream))[at] for at in range(9)] == drawn.ravel()[:9].tolist()
    for index in range(len(part_of)):
        others = np.array([stream.neighbour(index, distance) for distance in range(mixture.lengths[part_of[index]])])
        own = others[: np.sum(shard_of == shard_of[index])]
        assert set(shard_of[own]) == {shard_of[index]} and others[0] == index
        assert sorted(others) == np.flatnonzero(part_of == part_of[index]).tolist()


def test_a_batch_of_a_streamed_mixture_has_the_shares():
    stream = MixedStreamOrder(Mixture((3000, 3000), (7, 3)), [100] * 60, 640, 64, 2, 0)
    of_second = [sum(stream[number * 640 + row] >= 3000 for row in range(640)) for number in range(8)]
    assert all(abs(count - 192) <= 6 for count in of_second)  # 64 readers in step would be 64 rows apart


def test_weights_are_read_exactly(here):  # noqa: F811
    def weights(*texts):
        return parse_proportions([WeightedSource(text, "digits") for text in texts])

    assert weights("0.7", "0.3") == (7, 3) and weights("2", "1/3", "1e-1") == (60, 10, 3)
    for wrong in ("x", "0", "-1", "nan", "inf", "", "1/0"):
        with pytest.raises(
            UserError, match=rf"the weight '{wrong}' of digits must be a number above 0, as in mix:0.7\*S"
        ):
            weights("1", wrong)
    parts = parse_mixture("0.5*parquet:gs://b/a+b/x-*.parquet,label=y+1/3*digits,classes=gs://b/c.json+x*folder:c")
    assert [tuple(part) for part in parts] == [
        ("0.5", "parquet:gs://b/a+b/x-*.parquet,label=y", ""),
        ("1/3", "digits", "gs://b/c.json"),
        ("x", "folder:c", ""),
    ]
    for wrong in ("digits", "0.5*digits", "digits+synthetic"):
        with pytest.raises(UserError, match=r"cannot read the data source mix:.*; write mix:0.7\*SOURCE\+0.3\*SOURCE"):
            parse_mixture(wrong)
    changed = absolute_source("mix:1*folder:/a/../b,classes=/c/../d.json+2*digits")
    assert changed == "mix:1*folder:/b,classes=/d.json+2*digits"


def test_the_examples_are_those_of_the_parts(here, there):  # noqa: F811
    name, fields = mixed(here, 0.7, 0.3)
    source = pickle.loads(pickle.dumps(open_source(name, "train[:5]", **fields)))
    parquet, tfds = (open_source(one, "train[:5]", **fields) for one in (f"parquet:{here}/parquet", "tfds:tiny"))
    assert examples(source) == examples(parquet) + examples(tfds) and source.class_names == ("cat", "dog", "owl")
    assert [source.example_name(row) for row in (0, 5)] == [parquet.example_name(0), tfds.example_name(0)]
    assert examples(source.streamed()) == examples(source) and source.shards.remote_bytes == 0
    other, _ = mixed(here, 0.6, 0.4)
    assert open_source(other, "train[:5]", **fields).fingerprint != source.fingerprint
    assert list_splits(SourceConfig(name, **fields)) == ["test", "train"]
    remote, remote_fields = mixed(there, 0.7, 0.3)
    assert examples(open_source(remote, "train[:5]", **remote_fields)) == examples(source)


def test_a_mixture_of_any_size_is_streamed(shards, monkeypatch):  # noqa: F811
    config = run_config(f"mix:2*{shards}+1*{shards}", window=1)
    whole = data.complete_config(config)[1].opened["", "train"]
    assert whole.shards.remote_bytes == sum(shard_bytes(shards))  # which both parts share
    monkeypatch.setenv("VIT_JAX_CACHE_GB", str(0.6 * whole.shards.remote_bytes / 1e9))
    chosen, info = data.complete_config(config)
    assert chosen.data.order == "stream" and "streamed, readers=1 with window=1 shards each" in info.notes[0]
    chosen.data.readers = 2
    source, runs = info.opened["", "train"].streamed(), whole.shards

    def batches(start, count, rows):
        order = training_order(chosen, whole)
        fetcher = ShardFetcher(order, runs, rows)
        local = read_batches(source, PIPE, order, batch=8, rows=rows, start=start, fetcher=fetcher)
        taken = [next(local) for _ in range(count)]
        local.close()
        return taken

    taken = batches(0, 90, np.arange(8))
    assert len({int(image[0, 0, 0]) for batch in taken for image in batch["image"]}) == COUNT
    assert_same(batches(70, 20, np.arange(8)), taken[70:])
    for half in (np.arange(4), np.arange(4, 8)):
        part = [{name: array[half] for name, array in batch.items()} for batch in taken[:20]]
        assert_same(batches(0, 20, half), part)
    wait_for_fetchers()


def test_what_is_not_streamed_must_fit(there, tmp_path, monkeypatch):  # noqa: F811
    name, fields = mixed(there, 1, 1)
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "empty"))  # a copy for an earlier test may still have arrived
    monkeypatch.setenv("VIT_JAX_CACHE_GB", "3e-5")
    with pytest.raises(UserError, match=r"data.readers=1 with data.window=1 needs about .* GB of cache on each host"):
        data.complete_config(run_config(name, **fields, readers=1, window=1))
    for number in range(3):
        write_image(tmp_path / "photos" / ("cat", "dog", "owl")[number] / "1.png", number)
    with pytest.raises(UserError, match=r"shards to read, such as memory:.*, need .* GB, more than"):
        open_source(f"mix:1*folder:{tmp_path}/photos+1*parquet:{there}/parquet", "train")


def test_a_run_draws_in_the_proportions_and_resumes(here, tmp_path):  # noqa: F811
    for number in range(5):
        write_image(tmp_path / "photos" / "bee" / f"{number}.png", 200 + number)
    name, _ = f"mix:3*parquet:{here}/parquet+1*folder:{tmp_path}/photos", None
    completed, info = data.complete_config(run_config(name))
    assert (completed.data.num_classes, completed.data.num_examples) == (4, 25) and completed.data.order == "global"
    source = info.opened["", "train"]

    def batches(start, count, workers=0):
        options = {"batch": 8, "rows": np.arange(8), "start": start, "workers": workers}
        local = read_batches(source, PIPE, MixedOrder(source.mixture, 3), **options)
        taken = [next(local) for _ in range(count)]
        local.close()
        return taken

    whole = batches(0, 12)
    for one, other in zip(batches(7, 5), whole[7:], strict=True):
        assert all((one[name] == other[name]).all() for name in one)
    assert all(Counter((batch["label"] == 3).tolist()) == {False: 6, True: 2} for batch in whole)
    with pytest.raises(UserError, match=r"data.order=stream reads shards, but the training images are not all in sh"):
        data.complete_config(run_config(name, order="stream"))


def test_classes_join_by_name_or_number(tmp_path):
    def table(name, classes, count=6, **columns):
        described = {"label": {"_type": "ClassLabel", "names": classes}} if classes else None
        labels = columns or {"label": [row % (len(classes) if classes else 2) for row in range(count)]}
        return write_table(tmp_path / f"{name}.parquet", described, count, **labels)

    animals, others, bare = table("a", ["cat", "dog"]), table("b", ["owl", "cat"]), table("c", None)
    joined = open_source(f"mix:1*{animals}+1*{others}", "train")
    assert joined.class_names == ("cat", "dog", "owl") and joined.num_classes == 3
    assert [one["label"] for one in joined] == [0, 1] * 3 + [2, 0] * 3
    numbered = open_source(f"mix:1*{animals}+1*{bare}", "train", num_classes=2)
    assert [one["label"] for one in numbered] == [0, 1] * 6 and numbered.class_names == ("cat", "dog")
    with pytest.raises(UserError, match=r"c.parquet has 2 classes without names, but .* 3 classes; .*c.parquet,c"):
        open_source(f"mix:1*{animals}+1*{others}+1*{bare}", "train", num_classes=2)
    with pytest.raises(UserError, match=r"the classes of .*d.parquet do not join by name, since several have the same"):
        open_source(f"mix:1*{animals}+1*{table('d', ['x', 'x'])}", "train")
    labels = tmp_path / "map.json"
    labels.write_text('{"0": "dog", "1": "dog"}')
    mapped = open_source(f"mix:1*{animals}+1*{others}+1*{bare},classes={labels}", "train", num_classes=3)
    assert mapped.class_names == ("cat", "dog", "owl") and [one["label"] for one in mapped][12:] == [1] * 6
    before = mapped.fingerprint
    labels.write_text('{"0": "dog", "1": "cat"}')
    mapped = open_source(f"mix:1*{animals}+1*{others}+1*{bare},classes={labels}", "train", num_classes=3)
    assert [one["label"] for one in mapped][12:] == [1, 0] * 3 and mapped.fingerprint != before
    labels.write_text('{"1": "cat",\n "0": "dog"}')  # the same, written otherwise
    other = open_source(f"mix:1*{animals}+1*{others}+1*{bare},classes={labels}", "train", num_classes=3)
    assert other.fingerprint == mapped.fingerprint
    for text, sentence in (
        ('{"2": "dog"}', "map.json renames the class '2', but the classes of parquet are 0 to 0"),
        ('{"0": "dog", "x": "cat"}', "map.json renames the class 'x', but the classes of parquet are 0 to 1"),
        ('["dog", "cat"]', """map.json: it must be an object of names, such as {"tabby": "cat"}"""),
        ("{", "cannot read .*map.json: JSONDecodeError"),
        ('{"0": "cat", "1": "dog", "0": "dog"}', "cannot read .*map.json: ValueError: the key '0' occurs twice"),
    ):
        labels.write_text(text)
        with pytest.raises(UserError, match=sentence):
            open_source(f"mix:1*{animals}+1*{bare},classes={labels}", "train", num_classes=2)
    labels.write_text('{"owl": "bird"}')
    renamed = open_source(f"mix:1*{animals}+1*{others},classes={labels}", "train")
    assert renamed.class_names == ("cat", "dog", "bird")
    several = table("e", None, label=[[0], [1, 0], [], [1], [0], [1]])
    many = open_source(f"mix:1*{several}+2*{several}", "train", num_classes=2, max_labels=2)
    assert many[1]["label"].tolist() == many[7]["label"].tolist() == [1, 0]
    labels.write_text('{"0": "pet", "1": "pet"}')
    merged = open_source(f"mix:1*{several},classes={labels}+1*{several},classes={labels}", "train", max_labels=2)
    assert [one["label"].tolist() for one in merged][:3] == [[0, -1], [0, -1], [-1, -1]]


def test_images_of_training_are_found_in_an_evaluation(tmp_path, here, tiny, caplog):  # noqa: F811
    for place in ("a", "b"):
        write_table(tmp_path / place / "train.parquet")
    one, other, bucket = f"parquet:{tmp_path}/a", f"parquet:{tmp_path}/b", f"parquet:{here}/parquet"
    fields = {"num_classes": 3, "data_dir": f"{here}/tfds"}

    def overlap(first, second, split="train"):
        return open_source(first, "train", **fields).overlaps(open_source(second, split, **fields))

    assert overlap(one, one) and overlap(f"{one},label=label", one) and not overlap(one, other)
    assert overlap(bucket, bucket) and not overlap(bucket, bucket, "test") and overlap("tfds:tiny", "tfds:tiny")
    mixture = f"mix:1*{one}+2*tfds:tiny"
    assert overlap(mixture, one) and overlap("tfds:tiny", mixture, "train[:2]") and not overlap(mixture, other)
    assert overlap(mixture, f"mix:1*{other}+1*tfds:tiny") and not overlap(mixture, "tfds:tiny", "test")
    pipe = "resize(16)|value_range(-1,1)"
    tiny.data.update(source=other, split="train", num_examples=None, num_classes=3, preprocess=pipe)
    tiny.evals.test.update(source="", split="train")
    tiny.batch = 8
    data.complete_config(tiny)
    assert "evals.test contains training images: its split overlaps with data.split" in caplog.text
