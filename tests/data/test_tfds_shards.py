"""TFDS data in shards: what a bucket holds is read as what lies here, and no shard is copied that is not needed."""

import json
import pickle

import fsspec
import numpy as np
import pytest

from tests.conftest import write_tfds
from tests.data.test_array_record import cut
from tests.data.test_loader import assert_same, read_batches
from tests.data.test_sources import open_source
from tests.data.test_stream import config_of, wait_for_fetchers
from vit_jax import UserError, data
from vit_jax.data.images import DecodeError
from vit_jax.data.order import StreamOrder
from vit_jax.data.preprocess import parse_pipe
from vit_jax.data.shard_fetcher import ShardFetcher
from vit_jax.data.shards import readers
from vit_jax.data.sources import SourceConfig, open_split
from vit_jax.storage import cache, filesystem

PIPE = parse_pipe("resize(4)|value_range(-1,1)", 4)
COUNT, SHARDS, BATCH = 60, 8, 4


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A prepared data set of 60 images in eight shards, here and in a bucket in memory; the copies are recorded."""
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    write_tfds(tmp_path / "tfds", "tiny", "1.2.3", ["a", "b", "c"], {"train": COUNT, "test": 5}, shards=SHARDS)
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    store.put(str(tmp_path / "tfds"), "/b/tfds", recursive=True)
    copied, plain = [], filesystem.download
    monkeypatch.setattr(
        filesystem, "download", lambda folder, names, target: (copied.extend(names), plain(folder, names, target))
    )
    yield copied
    for path in (tmp_path / "cache" / "files").glob("*.lock"):
        cache.unlock_folder(path.with_suffix(""))


def opened(place, split="train", streams=True):
    return open_split(SourceConfig("tfds:tiny", data_dir=str(place)), split, streams)


def is_shard(name):
    return "array_record" in name


def examples(source):
    return [(int(np.asarray(one["image"])[0, 0, 0]), one["label"]) for one in source]


def stream(source, count):
    order = StreamOrder(source.shards.examples, BATCH, 2, 2, 5)
    rows = np.arange(BATCH)
    fetcher = ShardFetcher(order, source.shards, rows)
    batches = read_batches(source.streamed(), PIPE, order, batch=BATCH, rows=rows, fetcher=fetcher)
    taken = [next(batches) for _ in range(count)]
    batches.close()
    return taken


def test_a_bucket_gives_what_the_disk_does(bucket, tmp_path):
    here, there = opened(tmp_path / "tfds"), opened("memory://b/tfds")
    assert there.fingerprint == here.fingerprint and len(there.shards.runs) == SHARDS and there.shards.shuffled
    assert [run[1:3] for run in there.shards.runs] == [run[1:3] for run in here.shards.runs]
    assert there.shards.examples == here.shards.examples
    assert examples(here) == [(number, number % 3) for number in range(COUNT)]
    assert not any(map(is_shard, bucket)) and "dataset_info.json" in bucket
    assert_same(stream(there, 18), stream(here, 18))
    assert examples(pickle.loads(pickle.dumps(there))) == examples(here)


def test_only_the_shards_that_are_read_are_copied(bucket):
    source = opened("memory://b/tfds", "train[5:20]", streams=False)
    assert len(source.shards.runs) == 3 and source.shards.remote_bytes == sum(run.size for run in source.shards.runs)
    assert source[2]["label"] == 7 % 3 and source[9]["label"] == 14 % 3
    assert [*filter(is_shard, bucket)] == ["tiny-train.array_record-00001-of-00008"]
    assert examples(source) == [(number, number % 3) for number in range(5, 20)]
    assert len([*filter(is_shard, bucket)]) == len(set(filter(is_shard, bucket))) == 3


def test_what_exceeds_the_cache_is_streamed_or_refused(bucket, monkeypatch):
    size = opened("memory://b/tfds").shards.remote_bytes
    monkeypatch.setenv("VIT_JAX_CACHE_GB", str(0.8 * size / 1e9))
    with pytest.raises(UserError, match=r"the 8 shards to read, such as memory://b/tfds/tiny/.* need"):
        opened("memory://b/tfds", streams=False)
    taken = [image for batch in stream(opened("memory://b/tfds"), COUNT // BATCH) for image in batch["image"]]
    assert len({float(image[0, 0, 0]) for image in taken}) == COUNT
    readers.close_streamed(())
    wait_for_fetchers()


def test_what_tfds_has_shuffled_needs_no_packing(tmp_path):
    write_tfds(tmp_path, "tiny", "1.2.3", ["a", "b"], {"train": 24}, shards=4)
    fields = {"order": "stream", "data_dir": str(tmp_path)}
    _, info = data.complete_config(config_of("tfds:tiny", **fields))
    assert "Order: streamed, readers=8 with window=4 shards each." in info.notes
    path = tmp_path / "tiny" / "1.2.3" / "dataset_info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"disableShuffling": True}))
    _, info = data.complete_config(config_of("tfds:tiny", **fields))
    assert "They may be sorted by class" in info.notes[0]


def test_damage_is_named(tmp_path):
    write_tfds(tmp_path, "tiny", "1.2.3", ["a", "b"], {"train": 9}, shards=3)
    shards = sorted((tmp_path / "tiny" / "1.2.3").glob("*.array_record-*"))
    content = bytearray(shards[0].read_bytes())
    content[100] ^= 1
    shards[0].write_bytes(content)
    source = open_source("tfds:tiny", "train", data_dir=str(tmp_path))
    with pytest.raises(DecodeError, match=r"cannot read record 0 of .*-00000-of-00003: .*hash mismatch"):
        source[0]
    path = tmp_path / "tiny" / "1.2.3" / "dataset_info.json"
    path.write_text(path.read_text().replace('"shardLengths": ["3", "3", "3"]', '"shardLengths": ["3", "4", "3"]'))
    with pytest.raises(UserError, match=r"-00001-of-00003 has 3 records, but its data set states 4; copy or"):
        opened(tmp_path)[5]
    source = opened(tmp_path)
    cut(shards[2])
    with pytest.raises(UserError, match=r"-00002-of-00003 has \d+ bytes, but its data set states \d+; copy or"):
        source[8]
    shards[2].unlink()
    with pytest.raises(
        UserError, match=r"1.2.3 lacks 1 of the 3 files of the split train, such as tiny-train.array_record-00002-of"
    ):
        opened(tmp_path)
