"""The streamed order: each epoch is every example once, on any hosts; and what it needs of the cache and of a store."""

import contextlib
import io
import pickle
import random
import threading
import time

import fsspec
import numpy as np
import pytest
from PIL import Image

from configs.base import get_config
from tests.conftest import bytes_in
from tests.data.test_array_record import write_set
from tests.data.test_loader import assert_same, read_batches
from vit_jax import UserError, data
from vit_jax.config import check_resumes, keep_choices, save_config
from vit_jax.data import shard_fetcher
from vit_jax.data.order import StreamOrder
from vit_jax.data.preprocess import parse_pipe
from vit_jax.data.shard_fetcher import COPIED_AHEAD, ShardFetcher
from vit_jax.data.shards import readers
from vit_jax.data.sources import SourceConfig, open_split
from vit_jax.storage import cache, filesystem

PIPE = parse_pipe("resize(4)|value_range(-1,1)", 4)
BATCH, READERS, WINDOW = 8, 4, 2
COUNT, SHARDS = 190, 24
ORDER = [0, 4, 1, 3, 23, 22, 18, 20, 9, 7, 2, 10, 16, 17, 19, 21]  # which a resumed run must find again


def some_order(chance: random.Random) -> StreamOrder:
    readers, lengths = chance.choice([1, 2, 3, 4, 8]), [chance.randint(0, 9) for _ in range(chance.randint(1, 12))]
    lengths[0] += readers
    return StreamOrder(lengths, readers * chance.randint(1, 6), readers, chance.randint(1, 5), chance.randint(0, 9))


@pytest.mark.parametrize("seed", range(20))
def test_an_epoch_is_every_example_once_and_the_uses_of_shards_are_stated(seed):
    stream = some_order(random.Random(seed))
    batch, readers, count = stream.batch, stream.readers, stream.count
    slots = {}
    for position in range((3 * count // batch + 1) * batch):
        number, row = divmod(position, batch)
        reader, k = divmod(row, batch // readers)
        slots[number * batch + k * readers + reader] = stream[position]
    for epoch in range(3):
        own = range(epoch * count, (epoch + 1) * count)
        assert sorted(slots[slot] for slot in own) == list(range(count))
        for reader in range(readers):
            read = [(stream.shard_of(slots[slot]), slot // batch) for slot in own if slot % readers == reader]
            uses = stream.uses(epoch, reader)
            assert uses.first.tolist() == sorted(uses.first)
            assert set(uses.shards.tolist()) == {shard for shard, _ in read}
            for shard, first, last in zip(*uses, strict=True):
                batches = [number for one, number in read if one == shard]
                assert (batches[0], batches[-1]) == (first, last)
    for index in range(count):  # in whose place another is read if it is unreadable
        others = [stream.neighbour(index, distance) for distance in range(count)]
        own = others[: stream.lengths[stream.shard_of(index)]]
        assert {stream.shard_of(other) for other in own} == {stream.shard_of(index)}
        assert others[0] == index and sorted(others) == list(range(count))
    assert [pickle.loads(pickle.dumps(stream))[at] for at in range(9)] == [stream[at] for at in range(9)]


def test_a_reader_needs_its_window_of_shards_and_mixes_them():
    stream = StreamOrder([50] * 64, 64, 8, 4, 0)
    shards, first, last = stream.uses(0, 3)
    live = [int(np.sum((first <= number) & (last >= number))) for number in range(50)]
    # Within a batch of eight examples one shard may end and the next begin, of a range that begins within a shard.
    assert len(shards) in (8, 9) and max(live) <= 4 + 1 and np.mean(live[10:40]) > 3.5
    read = [stream.shard_of(stream[number * 64 + 3 * 8 + k]) for number in range(20, 30) for k in range(8)]
    assert len(set(read)) >= 4 and sorted(read) != read


def test_the_order_is_that_of_the_seed_and_of_this_version():
    stream = StreamOrder([5, 7, 3, 9], 8, 2, 2, seed=3)
    assert [stream[at] for at in range(16)] == ORDER
    assert [StreamOrder([5, 7, 3, 9], 8, 2, 2, seed=4)[at] for at in range(16)] != ORDER


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Some images in shards of eight, in a bucket in memory; the cache is of the test's own."""
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    write_set(tmp_path / "set", [[row % 4] for row in range(COUNT)], SHARDS)
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    for path in (tmp_path / "set").iterdir():
        store.pipe(f"memory://b/set/{path.name}", path.read_bytes())
    yield "array_record:memory://b/set"
    cache_files = tmp_path / "cache" / "files"
    for path in cache_files.glob("*.lock"):
        cache.unlock_folder(path.with_suffix(""))


def wait_for_fetchers():
    """Waits for closed fetchers: a shard that one still opens would be copied to the cache of the next test."""
    for thread in threading.enumerate():
        if thread.name == "shard fetcher":
            thread.join(5)


def shard_bytes(where: str) -> list[int]:
    return [run.size for run in open_split(SourceConfig(where), "train").shards.runs]


def stream(where, count, rows=None, start=0, workers=0, watch=lambda: None, split="train", wait=20):
    """Labels and first pixels of batches."""
    source = open_split(SourceConfig(where), split, streams=True)
    rows = np.arange(BATCH) if rows is None else rows
    order = StreamOrder(source.shards.examples, BATCH, READERS, WINDOW, 5)
    fetcher = ShardFetcher(order, source.shards, rows)
    options = {"batch": BATCH, "rows": rows, "start": start, "workers": workers, "fetcher": fetcher}
    batches = read_batches(source.streamed(), PIPE, order, **options)
    taken = []
    with contextlib.closing(batches):
        for _ in range(count):
            taken.append(next(batches))
            watch()
    if fetcher._thread:  # none where worker processes read
        fetcher._thread.join(wait)
    return taken


def test_batches_do_not_depend_on_hosts_workers_starts_or_where_the_shards_lie(shards, tmp_path):
    whole = stream(shards, 30)
    images = [int(image[0, 0, 0]) for batch in whole for image in batch["image"]]
    assert set(images) == set(range(COUNT)) and images[:COUNT] != sorted(images[:COUNT])
    assert_same(stream(f"array_record:{tmp_path}/set", 30), whole)
    assert_same(stream(shards, 9, start=21), whole[21:])
    for hosts in (2, 4, 8):
        for host in range(hosts):
            rows = np.array_split(np.arange(BATCH), hosts)[host]
            part = [{name: array[rows] for name, array in batch.items()} for batch in whole]
            assert_same(stream(shards, 30, rows), part)


def test_slices_are_streamed(shards):
    slices = "train[:10%]+train[60:100]"  # which cut shards
    taken = stream(shards, 59, split=slices)  # as many batches as images: the epochs are as many as a batch has rows
    images = [int(image[0, 0, 0]) for batch in taken for image in batch["image"]]
    assert sorted(images) == sorted(BATCH * [*range(19), *range(60, 100)])


@pytest.mark.slow
def test_streamed_batches_do_not_depend_on_the_number_of_workers(shards, tmp_path):
    local = f"array_record:{tmp_path}/set"
    assert_same(stream(local, 12, workers=2), stream(local, 12))


def held(folder):
    """The copies in a cache that this process uses."""
    return [copy.name for copy in cache._uses if copy.parent == folder]


def test_a_set_of_many_times_the_bound_is_read_and_the_bound_is_kept(shards, tmp_path, monkeypatch):
    rows = np.arange(2)  # of one reader
    need = (WINDOW + 1 + 2) * max(shard_bytes(shards))  # a batch reads two of the eight images of a shard
    assert need < sum(shard_bytes(shards)) / 4
    monkeypatch.setenv("VIT_JAX_CACHE_GB", str(need / 1e9))
    sampled = []

    def sample():
        time.sleep(0.01)
        sampled.append(bytes_in(tmp_path / "cache"))

    assert len(stream(shards, 60, rows, watch=sample)) == 60
    assert need / 2 < max(sampled) <= need
    deadline = time.monotonic() + 20
    while held(tmp_path / "cache" / "files"):  # nothing is, once the loader is closed and its last reads have ended
        assert time.monotonic() < deadline
        time.sleep(0.05)
        readers.close_streamed(())


def test_a_host_copies_the_shards_of_its_readers_alone(shards, tmp_path, monkeypatch):
    copied = []
    plain = filesystem.download

    def download(folder, names, target):
        copied.extend(names)
        plain(folder, names, target)

    monkeypatch.setattr(filesystem, "download", download)
    steps = COUNT // BATCH - COPIED_AHEAD
    stream(shards, steps, np.arange(2))
    assert len(copied) == len(set(copied)) <= SHARDS / READERS + 3  # its share, a shard at each end, and the next


def test_shards_are_copied_before_they_are_needed_and_given_back_behind(shards, tmp_path):
    source = open_split(SourceConfig(shards), "train", streams=True)
    lengths = source.shards.examples
    fetcher = ShardFetcher(StreamOrder(lengths, BATCH, READERS, WINDOW, 5), source.shards, np.arange(2))
    try:
        for number in (0, 3, 9):
            fetcher.advance(number)
            wanted = {source.shards.runs[shard].path for shard in fetcher.numbers(number)}
            deadline = time.monotonic() + 20
            while set(readers._streamed) != wanted:
                assert time.monotonic() < deadline, (number, readers._streamed)
                time.sleep(0.01)
    finally:
        fetcher.close()
        wait_for_fetchers()


@pytest.mark.parametrize(
    ("text", "closed", "warned"),
    [("no room", False, True), ("Event loop is closed", True, False), ("after shutdown", False, False)],
)
def test_no_copy_is_missed_once_the_run_has_ended(shards, monkeypatch, caplog, text, closed, warned):
    source = open_split(SourceConfig(shards), "train", streams=True)
    order = StreamOrder(source.shards.examples, BATCH, READERS, WINDOW, 5)
    fetcher, begun, ended = ShardFetcher(order, source.shards, np.arange(2)), threading.Event(), threading.Event()

    def copy(*_, **__):
        begun.set()
        ended.wait(20)
        raise RuntimeError(text)

    monkeypatch.setattr(shard_fetcher, "streamed_reader", copy)
    fetcher.advance(0)
    assert begun.wait(20)
    if closed:
        fetcher.close()
    ended.set()
    wait_for_fetchers()
    assert any("can no longer be copied ahead" in record.message for record in caplog.records) == warned


def test_a_cache_that_is_too_small_after_all_costs_time_alone(shards, monkeypatch):
    whole = stream(shards, 12)
    readers.close_streamed(())
    for path in (cache.root() / "files").glob("*.lock"):
        cache.unlock_folder(path.with_suffix(""))
    monkeypatch.setenv("VIT_JAX_CACHE_GB", str(3.5 * max(shard_bytes(shards)) / 1e9))  # four readers need eight shards
    assert_same(stream(shards, 12), whole)


def config_of(where: str, **fields):
    config = get_config()
    config.batch, config.resolution = 8, 4
    config.data.source, config.data.split = where, "train"
    config.data.preprocess = config.evals.test.preprocess = "resize(4)|value_range(-1,1)"
    config.evals.test.split = "train[:3]"
    config.data.update(fields)
    return config


def test_the_order_is_chosen_once_and_told(shards, tmp_path, monkeypatch):
    complete = data.complete_config
    chosen, info = complete(config_of(shards))
    assert (chosen.data.order, chosen.data.readers, info.notes) == ("global", None, ())
    assert "order" not in info.fingerprint
    total = sum(shard_bytes(shards))
    monkeypatch.setenv("VIT_JAX_CACHE_GB", str(0.5 * total / 1e9))
    chosen, info = complete(config_of(shards, window=1))
    assert (chosen.data.order, chosen.data.readers) == ("stream", 2)
    assert "streamed, readers=2 with window=1 shards each" in info.notes[0] and "all shards need" in info.notes[0]
    assert info.fingerprint["order"].startswith(f"2 readers, window 1, {SHARDS} shards ")
    save_config(chosen, tmp_path / "config.json")
    monkeypatch.setenv("VIT_JAX_CACHE_GB", "50")
    kept, _ = complete(keep_choices(config_of(shards, window=1), str(tmp_path)))
    assert kept.data == chosen.data
    assert not check_resumes(chosen, kept, "run")
    with pytest.raises(UserError, match=r"data\.order: stream -> global"):
        check_resumes(chosen, complete(config_of(shards, order="global"))[0], "run")
    assert keep_choices(config_of(shards, order="stream"), str(tmp_path)).data.readers == 2  # with more hosts, too
    assert keep_choices(config_of(shards), str(tmp_path / "none")).data.order == "auto"
    text = (tmp_path / "config.json").read_text()
    names = ("order", "readers", "window")
    older = [line for line in text.splitlines() if not any(f'"{name}"' in line for name in names)]
    (tmp_path / "config.json").write_text("\n".join(older))
    assert keep_choices(config_of(shards), str(tmp_path)).data.order == "global"


def test_a_folder_in_a_bucket_says_what_would_be_faster(shards):
    for number in range(8):
        content = io.BytesIO()
        Image.fromarray(np.full((9, 9, 3), number, np.uint8)).save(content, "PNG")
        fsspec.filesystem("memory").pipe(f"memory://b/photos/{'ab'[number % 2]}/{number}.png", content.getvalue())
    config = config_of("folder:memory://b/photos")
    chosen, info = data.complete_config(config)
    assert chosen.data.order == "global" and "read one by one" in info.notes[0] and "pack --shuffle=0" in info.notes[0]


def test_what_cannot_be_streamed_is_refused_in_a_sentence(shards, monkeypatch):
    for where, fields, sentence in [
        (shards, {"readers": 3}, r"data\.readers=3 must divide the batch of 8 and .* set --config\.data\.readers=8"),
        ("digits", {}, "the training images are not all in shards; pack them"),
    ]:
        with pytest.raises(UserError, match=sentence):
            data.complete_config(config_of(where, order="stream", **fields))
    monkeypatch.setenv("VIT_JAX_CACHE_GB", str(0.5 * sum(shard_bytes(shards)) / 1e9))
    with pytest.raises(
        UserError, match=r"readers=8 with data\.window=4 needs about \S+ GB of cache .* \(data\.readers=1 needs"
    ):
        data.complete_config(config_of(shards, order="stream", readers=8))
