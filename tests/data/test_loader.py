import dataclasses
import itertools
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chex
import cv2
import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image

from configs.base import get_config
from vit_jax import UserError, data
from vit_jax.data import loader, pipeline
from vit_jax.data.images import DecodeError
from vit_jax.data.loader import ExampleReader, LocalBatches, RowGroups, choose_workers
from vit_jax.data.order import EvalOrder, Order, RepeatedOrder, ShuffledOrder, StreamOrder
from vit_jax.data.preprocess import parse_pipe, value_range
from vit_jax.data.sources import Source, kinds

BATCH = 12


def sharding(*names: str) -> NamedSharding:
    """Splits dimension 0 over the named axes of a mesh of 2 x (all the other) devices."""
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(2 if len(devices) % 2 == 0 else 1, -1), ("data", "fsdp"))
    return NamedSharding(mesh, PartitionSpec(names))


class Host(jax.sharding.Sharding):
    """What a process sees of a batch that is split over the devices of several."""

    def __init__(self, pieces: int, mine: tuple[int, ...]):
        self.pieces, self.mine = pieces, mine

    def addressable_devices_indices_map(self, shape):
        size = shape[0] // self.pieces
        return {piece: (slice(piece * size, (piece + 1) * size),) for piece in self.mine}


def noise(split: str, index: int):
    # A worker that asks for devices would take the accelerator from the process that trains.
    in_worker = multiprocessing.parent_process() is not None
    assert not in_worker or not jax._src.xla_bridge.backends_are_initialized()
    assert not in_worker or cv2.getNumThreads() == 1
    return np.random.default_rng(index).integers(0, 256, (9, 11, 3), np.uint8), index


def numbers(count: int, read=noise) -> Source:
    """A source of `count` images of random noise, whose label is their number."""
    return Source("numbers", (("train", range(count)),), read, count)


def read_batches(source, preprocess, order: Order | None = None, *, seed=0, **options) -> LocalBatches:
    """The rows of a process; all examples are shuffled, by `seed`, unless another order is stated."""
    return LocalBatches(source, preprocess, order or ShuffledOrder(len(source), seed), **options)


PIPE = parse_pipe("inception_crop(6)|flip_lr|value_range(-1,1)", 6)


def take(count: int, rows=None, source=None, **options):
    options = {"batch": BATCH, "seed": 3, **options}
    rows = np.arange(options["batch"]) if rows is None else rows
    batches = read_batches(source or numbers(30), PIPE, rows=rows, **options)
    taken = list(itertools.islice(batches, count))
    batches.close()
    return taken


def assert_same(some, others):
    chex.assert_trees_all_equal(jax.device_get(some), jax.device_get(others))


@pytest.mark.parametrize("hosts", [2, 4])
def test_the_assembled_batch_does_not_depend_on_hosts(hosts):
    whole = take(4)
    # Devices in an order that no arithmetic on process numbers would find; each piece is held twice.
    pieces = [tuple(range(host, 4, hosts)) for host in range(hosts)]
    for host in range(hosts):
        rows = loader.local_rows(Host(4, pieces[host] + pieces[host]), BATCH)
        part = take(4, rows)
        assert_same(part, [{name: array[rows] for name, array in batch.items()} for batch in whole])


@pytest.mark.parametrize("repeats", [2, 3])
def test_a_batch_holds_copies_of_its_images_each_augmented_anew(repeats):
    order = RepeatedOrder(ShuffledOrder(30, 3), BATCH, repeats)
    taken = take(8, order=order)
    images = -(-BATCH // repeats)
    for batch in taken:
        labels = batch["label"].tolist()
        assert labels == (labels[:images] * repeats)[:BATCH] and len(set(labels[:images])) == images
        assert all(a != b for a, b in itertools.pairwise([*labels, labels[0]]))  # MixUp mixes no copies
        assert len({image.tobytes() for image in batch["image"]}) == BATCH
    firsts = [label for batch in taken for label in batch["label"][:images].tolist()]
    assert len(set(firsts[:30])) == 30  # an epoch of different images
    assert_same(take(3, order=order, start=5), taken[5:])


def test_batches_do_not_depend_on_the_number_of_workers():
    assert_same(take(3, workers=2), take(3))


@pytest.mark.slow
def test_a_worker_outlives_the_signals_to_its_job_but_not_the_kernels():
    batches = read_batches(numbers(30), PIPE, rows=np.arange(BATCH), batch=BATCH, seed=3, workers=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, batches)
        while not (children := multiprocessing.active_children()):
            time.sleep(0.001)
        [worker] = children
        for number in (signal.SIGTERM, signal.SIGINT):  # as it starts
            os.kill(worker.pid, number)
        first.result()
    os.kill(worker.pid, signal.SIGTERM)
    assert_same(list(itertools.islice(batches, 9)), take(10)[1:])
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(
        UserError, match=r"ended by SIGKILL, as the kernel's out-of-memory .* set --config\.data\.workers"
    ):
        list(itertools.islice(batches, 100))
    batches.close()


def test_opencv_starts_no_threads_beside_those_of_the_loader():
    cv2.setNumThreads(2)
    take(1)
    assert cv2.getNumThreads() == 1


def test_epochs_cover_everything_each_in_its_own_order():
    labels = np.concatenate([batch["label"] for batch in take(10)])
    epochs = labels.reshape(4, 30)
    for epoch in epochs:
        assert sorted(epoch) == list(range(30))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert not np.array_equal(np.concatenate([batch["label"] for batch in take(10, seed=4)]), labels)


def test_the_same_example_is_preprocessed_anew_in_each_epoch():
    batches = take(2, source=numbers(BATCH))
    images = [batch["image"][np.argsort(batch["label"])] for batch in batches]
    assert (np.abs(images[0] - images[1]).max((1, 2, 3)) > 0).sum() >= BATCH - 1


@pytest.mark.parametrize("start", [1, 2, 3, 7])
def test_start_is_the_number_of_batches_skipped(start):
    assert_same(take(3, start=start), take(start + 3)[start:])


@pytest.mark.flaky(reruns=1)  # it waits on the clock
def test_shuffling_303_million_examples_is_cheap():
    config = get_config()
    config.resolution = 6
    config.data.num_classes, config.data.num_examples = 18291, 303_000_000
    source = kinds.open_source(config, "train")
    began = time.monotonic()
    first, again = (take(1, source=source, start=1_000_000) for _ in range(2))
    assert time.monotonic() - began < 5
    assert_same(first, again)


@pytest.mark.parametrize(("count", "batch"), [(30, 8), (32, 8), (5, 8), (30, 16)])
def test_evaluation_covers_every_example_once(count, batch):
    preprocess = parse_pipe("resize(4)|value_range(-1,1)", 4)
    rows = [np.arange(batch // 2), np.arange(batch // 2, batch)]
    order = EvalOrder([count], batch, 1)
    hosts = []
    for part in rows:
        batches = read_batches(numbers(count), preprocess, order, batch=batch, rows=part, on_bad="raise")
        hosts.append(list(batches))
        batches.close()
    assert len(hosts[0]) == len(hosts[1]) == -(-count // batch)
    assembled = [{name: np.concatenate([a[name], b[name]]) for name in a} for a, b in zip(*hosts, strict=True)]
    labels = np.concatenate([group["label"] for group in assembled])
    mask = np.concatenate([group["mask"] for group in assembled])
    images = np.concatenate([group["image"] for group in assembled])
    np.testing.assert_array_equal(labels[mask == 1], np.arange(count))
    assert mask.sum() == count and mask.dtype == np.float32 and not images[mask == 0].any()


@pytest.fixture
def damaged(tmp_path):
    """A folder of 20 images, of which numbers 3, 4 and 19 of the source are truncated."""
    (tmp_path / "a").mkdir()
    for number in range(20):
        Image.fromarray(np.full((9, 9, 3), number, np.uint8)).save(tmp_path / "a" / f"{number}.jpg")
    config = get_config()
    config.data.source, config.resolution, config.batch = f"folder:{tmp_path}", 6, 16
    config.data.preprocess = config.evals.test.preprocess = "resize({resolution})|value_range(0,255)"
    config.evals.test.split = "train"
    source = kinds.open_source(config, "train")
    for number in (3, 4, 19):
        path = Path(source[number]["image"].name)
        path.write_bytes(path.read_bytes()[:-20])
    return config, source


def test_bad_images_fail_and_name_the_file(damaged):
    config, _ = damaged
    batches = data.train_batches(config, sharding("data"))
    with pytest.raises(UserError, match=r"cannot decode the image .*/a/\d+.jpg: .*--config.data.bad_images=replace"):
        list(itertools.islice(batches, 4))
    config.data.bad_images = "replace"
    with pytest.raises(
        UserError, match=r"cannot decode the image .*/a/\d+.jpg: .*; repair or remove it: an evaluation"
    ):
        list(data.EvalBatches(config, "test", sharding("data")))


def test_bad_images_are_replaced_by_the_next_readable(damaged, caplog):
    config, source = damaged
    config.data.bad_images, config.data.max_bad = "replace", 0.15
    prepare = ExampleReader(source, parse_pipe(config.data.preprocess, 6), ShuffledOrder(20, 0), "replace")
    rows = [prepare(index, np.random.default_rng(0)) for index in range(20)]
    values = [int(row["image"][0, 0, 0]) for row in rows]
    assert (values[3], values[4], values[19]) == (values[5], values[5], values[0]) and len(set(values)) == 17
    assert [int(row["bad"]) for row in rows] == [i if i in (3, 4, 19) else -1 for i in range(20)]
    first, second = (data.train_batches(config, sharding("data")) for _ in range(2))
    assert_same(list(itertools.islice(first, 10)), list(itertools.islice(second, 10)))
    first.close()
    second.close()
    assert first.replaced == second.replaced == 3  # distinct ones: the run saw each seven times
    assert sum("is replaced by the next" in record.message for record in caplog.records) == 6
    with pytest.raises(UserError, match="100 images in a row"):
        ExampleReader(numbers(1000, unreadable), PIPE, ShuffledOrder(1000, 0), "replace")(0, np.random.default_rng(0))


def test_an_unreadable_image_whose_name_is_not_utf8_is_replaced(damaged):
    config, source = damaged
    broken = source[3]["image"]
    unnamed = dataclasses.replace(broken, name=os.fsdecode(b"\xfcber.jpg"))
    examples = numbers(2, lambda split, index: ((unnamed, source[0]["image"])[index], 0))
    preprocess, order = parse_pipe(config.data.preprocess, 6), ShuffledOrder(2, 0)
    row = ExampleReader(examples, preprocess, order, "replace")(0, np.random.default_rng(0))
    assert int(row["bad"]) == 0 and b"the image \\udcfcber.jpg: " in row["fault"].tolist()


def test_a_streamed_image_alone_in_its_shard_is_replaced_from_the_next_shard(damaged):
    config, source = damaged
    streamed = StreamOrder([3, 2, 15], 4, 2, 1, 0)  # images 3 and 4, a shard of their own, are unreadable
    read = ExampleReader(source, parse_pipe(config.data.preprocess, 6), streamed, "replace")
    row, wanted = (read(index, np.random.default_rng(0)) for index in (4, 5))
    assert int(row["bad"]) == 4
    np.testing.assert_array_equal(row["image"], wanted["image"])
    with pytest.raises(UserError, match=r"^3 images in a row"):
        ExampleReader(numbers(3, unreadable), PIPE, ShuffledOrder(3, 0), "replace")(0, np.random.default_rng(0))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_bad_images_end_the_run(damaged, workers):
    config, _ = damaged
    config.data.bad_images, config.data.max_bad, config.data.workers = "replace", 0.1, workers
    batches = data.train_batches(config, sharding("data"))
    with pytest.raises(
        UserError,
        match=r"/a/\d+.jpg: .* 3 of 20 images .* more than the 2 that .*max_bad=0.1 allows; .* set \S+max_bad=0.15",
    ):
        list(itertools.islice(batches, 10))


def unreadable(split: str, index: int):
    raise DecodeError("no")


def digits(batch: int = 16, workers: int | str = 0):
    config = get_config()
    config.data.workers = workers
    config.resolution, config.batch, config.data.source = 8, batch, "digits"
    config.data.preprocess = config.evals.test.preprocess = "resize({resolution})|value_range(-1,1)"
    return data.complete_config(config)[0]


@pytest.mark.parametrize("names", [("data",), ("data", "fsdp"), ("fsdp", "data"), ()])
def test_make_gives_global_arrays(names):
    config = digits()
    batches = data.train_batches(config, sharding(*names), start=2)
    batch = next(batches)
    batches.close()
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        "image": ((16, 8, 8, 3), np.float32),
        "label": ((16,), np.int32),
    }
    assert batch["image"].sharding.is_equivalent_to(sharding(*names), 4)
    source = kinds.open_source(config, "train")
    preprocess = parse_pipe(config.data.preprocess, 8)
    options = {"batch": 16, "rows": np.arange(16), "seed": config.seed, "start": 2}
    local = read_batches(source, preprocess, **options)
    expected = next(local)
    local.close()
    assert expected["image"].dtype == np.uint8  # a quarter of the bytes to move
    wanted = [value_range(image, np.random.default_rng(0), -1, 1) for image in expected["image"]]
    np.testing.assert_allclose(batch["image"], np.stack(wanted), rtol=0, atol=1.2e-7)
    np.testing.assert_array_equal(batch["label"], expected["label"])


def test_make_eval_starts_anew_each_time():
    config = digits()
    config.batch_eval = 64
    evaluation = data.EvalBatches(config, "test", sharding("data"))
    first, second = list(evaluation), list(evaluation)
    assert_same(first, second)
    assert len(first) == len(evaluation) == 6 and sum(float(batch["mask"].sum()) for batch in first) == 359
    assert first[0]["image"].shape == (64, 8, 8, 3) and first[0]["mask"].shape == (64,)
    with pytest.raises(UserError, match="unknown evaluation 'tset'; did you mean 'test'"):
        data.EvalBatches(config, "tset", sharding("data"))


def test_a_batch_that_cannot_be_split_is_a_sentence():
    with pytest.raises(UserError, match="a batch of 15 cannot be split evenly over"):
        data.train_batches(digits(15), sharding("data", "fsdp"))


def test_the_next_two_batches_are_on_the_devices_and_errors_wait_for_their_turn():
    class Three(loader.LocalBatches):
        def __init__(self):
            self.given, self.closed, self.batch, self.rows = 0, False, 2, np.arange(2)

        def __next__(self):
            self.given += 1
            if self.given > 3:
                raise UserError("bad")
            return {"image": np.zeros((2, 4, 4, 3), np.uint8), "label": np.full(2, self.given, np.int32)}

        def close(self):
            self.closed = True

    local = Three()
    batches = loader.DevicePrefetcher(local, sharding(), (-1.0, 1.0))
    assert local.given == 0
    next(batches)
    assert local.given == 3
    assert [int(next(batches)["label"][0]) for _ in range(2)] == [2, 3] and local.closed
    for _ in range(2):
        with pytest.raises(UserError, match="bad"):
            next(batches)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 1.0), (-2.1, 2.6), (0.0, 255.0)])
def test_the_devices_map_every_level_as_the_host_does_up_to_roundings(low, high):
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)
    mapped = loader.scale_levels(levels, (low, high))
    rounding = 2 * np.finfo(np.float32).eps * max(-low, high)
    np.testing.assert_allclose(mapped, value_range(levels, np.random.default_rng(0), low, high), rtol=0, atol=rounding)


@pytest.mark.flaky(reruns=1)  # it waits on the clock
def test_closing_leaves_no_threads_and_no_batches():
    before = threading.active_count()
    config = digits()
    batches = data.train_batches(config, sharding("data"))
    next(batches)
    batches.close()
    batches.close()
    assert list(batches) == []
    for _ in data.EvalBatches(config, "test", sharding("data")):
        break
    list(data.EvalBatches(config, "test", sharding("data")))
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


class Waits(grain.DatasetIterator):
    """An iterator of grain whose `next`, once another thread has closed it, waits for ever."""

    def __init__(self, memory):
        super().__init__()
        self.memory, self.threads, self.reading = memory, set(), threading.Event()

    def get_state(self):
        """Which grain asks of its iterators."""

    def set_state(self, state):
        """Which grain asks of its iterators."""

    def __next__(self):
        self.threads.add(threading.current_thread())
        self.reading.set()  # and then wait: a later batch has no memory until the first is taken
        RowGroups(grain.MapDataset.range(999), 1, np.arange(1), self.memory)[900]

    def close(self):
        self.threads.add(threading.current_thread())


@pytest.fixture
def waiting():
    """Batches whose reading does not go on, and the iterator that waits."""
    batches = read_batches(numbers(30), PIPE, rows=np.arange(1), batch=1, seed=3)
    batches._iterator.close()
    batches._iterator = Waits(batches._memory)
    yield batches, batches._iterator
    batches.close()


def wait_for_a_batch(batches, waits) -> threading.Thread:
    """Asks for a batch in another thread, and returns that thread once the reading waits."""
    asking = threading.Thread(target=next, args=(batches, None))
    asking.start()
    waits.reading.wait()
    while batches._thread is None:
        time.sleep(0.001)
    return asking


@pytest.mark.parametrize("read", [True, False])
def test_the_thread_that_reads_closes_what_it_reads(waiting, read):
    batches, waits = waiting
    if read:
        wait_for_a_batch(batches, waits)
    batches.close()
    assert len(waits.threads) == 1 and (threading.current_thread() in waits.threads) != read
    assert not any(thread.is_alive() for thread in waits.threads - {threading.current_thread()})


def test_a_thread_that_waits_for_a_batch_is_woken_when_the_reading_ends(waiting):
    asking = wait_for_a_batch(*waiting)
    waiting[0].close()
    asking.join(10)
    assert not asking.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_loaders_that_are_left_early_leave_nothing(how):
    """200 took 200 threads and 3,800 descriptors, before the thread that reads closed what it reads."""

    def held():
        return threading.active_count(), len(os.listdir("/proc/self/fd")), len(multiprocessing.active_children())

    found = []
    for cycle in range(12):
        local = read_batches(numbers(30), PIPE, rows=np.arange(BATCH), batch=BATCH, seed=3, workers=1)
        batches = loader.DevicePrefetcher(local, sharding(), (-1.0, 1.0))
        for _ in range(cycle % 4):  # none, or some while the worker reads ahead
            next(batches)
        if how == "closed":
            batches.close()
        del batches, local
        found.append(held())
    assert found[3:] == found[3:4] * 9  # grain's own thread comes once


@pytest.mark.parametrize(
    ("asked", "cores", "workers"), [(0, 224, 0), (16, 2, 16), ("auto", 1, 0), ("auto", 7, 0), ("auto", 8, 6)]
)
def test_workers_are_chosen_by_cores_where_that_is_asked(asked, cores, workers):
    assert choose_workers(asked, cores) == workers


def test_auto_is_resolved_where_the_batches_are_made(monkeypatch):
    config, told, make = digits(workers="auto"), [], loader.LocalBatches
    monkeypatch.setattr(pipeline, "count_cores", lambda: 16)
    monkeypatch.setattr(loader, "LocalBatches", lambda *a, workers, **o: (told.append(workers), make(*a, **o))[1])
    data.train_batches(config, sharding("data")).close()
    assert told == [14] and data.EvalBatches(config, "test", sharding("data")).workers == 14
