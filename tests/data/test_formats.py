"""Data sets as other libraries write them, here and in a bucket: `tests/fixtures/formats/make.py` made them."""

import pickle
import shutil

import fsspec
import numpy as np
import pytest

from tests.conftest import ROOT
from tests.data.test_loader import assert_same, read_batches
from vit_jax import UserError
from vit_jax.data.images import DecodeError
from vit_jax.data.order import StreamOrder
from vit_jax.data.preprocess import parse_pipe
from vit_jax.data.shard_fetcher import ShardFetcher
from vit_jax.data.shards import readers
from vit_jax.data.shards.tfrecord_file import record_starts
from vit_jax.data.sources import SourceConfig, open_split
from vit_jax.storage import cache

FIXTURES = ROOT / "tests" / "fixtures" / "formats"
PIPE = parse_pipe("resize(4)|value_range(-1,1)", 4)
BATCH, TRAIN = 4, 20


def config_of(kind, place):
    """Where the data of a kind lie below a folder, local or remote."""
    return {
        "tfds": SourceConfig("tfds:tiny", data_dir=f"{place}/tfds"),
        "parquet": SourceConfig(f"parquet:{place}/parquet"),
        "webdataset": SourceConfig(f"webdataset:{place}/webdataset", num_classes=3),
    }[kind]


KINDS = ["tfds", "webdataset", "parquet"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A copy of the data sets, and a cache of the test's own."""
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    shutil.copytree(FIXTURES, tmp_path / "sets")
    yield tmp_path / "sets"
    readers.close_streamed(())
    for path in (tmp_path / "cache" / "files").glob("*.lock"):
        cache.unlock_folder(path.with_suffix(""))


@pytest.fixture
def there(here, monkeypatch):
    """The same in a bucket in memory."""
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    store.put(str(here), "/b/sets", recursive=True)
    return "memory://b/sets"


def examples(source):
    return [(int(np.asarray(one["image"])[0, 0, 0]), one["label"]) for one in source]


def stream(source, count, start=0):
    order = StreamOrder(source.shards.examples, BATCH, 2, 1, 5)
    rows = np.arange(BATCH)
    fetcher = ShardFetcher(order, source.shards, rows)
    options = {"batch": BATCH, "rows": rows, "start": start, "fetcher": fetcher}
    batches = read_batches(source.streamed(), PIPE, order, **options)
    taken = [next(batches) for _ in range(count)]
    batches.close()
    return taken


@pytest.mark.parametrize("kind", KINDS)
def test_every_image_has_its_label_here_and_in_a_bucket(kind, here, there):
    for split, first, count in (("train", 0, TRAIN), ("test", 100, 7)):
        source = open_split(config_of(kind, here), split)
        assert sorted(examples(source)) == [(first + number, number % 3) for number in range(count)]
        assert source.class_names in (("cat", "dog", "owl"), None) and source.num_classes == 3
        assert not any(run.path.startswith("memory") for run in source.shards.runs)
        remote = open_split(config_of(kind, there), split)
        assert remote.fingerprint == source.fingerprint and remote.shards.remote_bytes > 0
        assert examples(pickle.loads(pickle.dumps(remote))) == examples(source)
        assert [source.example_name(row) for row in (0, 1)] == [remote.example_name(row) for row in (0, 1)]
    assert (
        examples(open_split(config_of(kind, here), "train[5:-3]"))
        == examples(open_split(config_of(kind, here), "train"))[5:-3]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_streamed_is_the_same_from_a_bucket_and_after_a_restart(kind, here, there, monkeypatch):
    local, remote = (open_split(config_of(kind, place), "train", streams=True) for place in (here, there))
    monkeypatch.setenv("VIT_JAX_CACHE_GB", str(0.9 * remote.shards.remote_bytes / 1e9))
    whole = stream(local, 10)
    assert_same(stream(remote, 10), whole)
    assert_same(stream(remote, 4, start=6), whole[6:])
    seen = [float(image[0, 0, 0]) for batch in whole[:5] for image in batch["image"]]
    assert len(set(seen)) == TRAIN and seen != sorted(seen)
    with pytest.raises(UserError, match=r"shards to read, such as memory://b/sets/.*, need"):
        open_split(config_of(kind, there), "train")


def shard(folder, number=0):
    return sorted(folder.rglob("tiny-train.tfrecord-*"))[number]


def test_a_damaged_tfrecord_is_named_with_its_place(here):
    path = shard(here)
    content = path.read_bytes()
    config = config_of("tfds", here)

    def damage(at, size=None):
        changed = bytearray(content[:size])
        changed[at] ^= 1
        path.write_bytes(changed)
        return open_split(config, "train")

    first = int.from_bytes(content[:8], "little")
    with pytest.raises(DecodeError, match=rf"cannot read record 0 of {path}: its checksum, at byte {first + 12} of"):
        damage(40)[0]
    assert len(examples(open_split(config, "train[1:]"))) == TRAIN - 1  # the others are read
    with pytest.raises(UserError, match=rf"read {path}: it is damaged or .* \(the checksum at byte {first + 24} is"):
        damage(first + 17)[0]
    with pytest.raises(UserError, match=rf"{path} is truncated: the record at byte \d+ .* 3000 bytes of the file"):
        damage(2999, 3000)[0]
    path.write_bytes(content + content)
    with pytest.raises(UserError, match=rf"{path} has 14 records, but its data set states 7; copy or pack it again"):
        open_split(config, "train")[0]
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"has 0 records, but its data set states 7"):
        open_split(config, "train")[0]


def test_the_index_of_a_file_outlives_its_reader_and_not_its_contents(here):
    path = shard(here)
    reader = readers.open_reader(str(path), str(path), format="tfrecord")
    records = [reader.read(row) for row in range(reader.num_records())]
    missed = record_starts.cache_info().misses
    again = readers.open_reader(str(path), str(path), format="tfrecord")
    assert [again.read(row) for row in range(7)] == records
    assert record_starts.cache_info().misses == missed
    path.write_bytes(shard(here, 1).read_bytes())
    assert readers.open_reader(str(path), str(path), format="tfrecord").num_records() == 6


def test_other_formats_of_tfds_are_named(here):
    info = here / "tfds" / "tiny" / "1.0.0" / "dataset_info.json"
    text = info.read_text()
    info.write_text(text.replace('"tfrecord"', '"riegeli"'))
    with pytest.raises(UserError, match=r"is in the format riegeli, and neither in ArrayRecord nor in TFRecord; prep"):
        open_split(config_of("tfds", here), "train")
