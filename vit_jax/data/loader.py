"""From an order of examples to batches on the devices. Global batch n is the same whichever processes read its rows.

A process reads the rows that its devices hold (`local_rows`). Row r of batch n is the example at position n * batch + r
of the order; `ExampleReader` reads it. A thread or worker process reads a group of rows at a time into the memory of
their batch (`RowGroups`, `BatchMemory`). `LocalBatches` gives the batches whose groups are all there, and
`DevicePrefetcher` transfers them, `TRANSFERRED_AHEAD` ahead. How many groups are read ahead depends on the host
(`LocalBatches`); how many shards are copied ahead of these does not (`shard_fetcher`).
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import multiprocessing
import os
import queue
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any, TypeAlias

import cv2
import grain
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Array, Float32, Int64, UInt8

from vit_jax import UserError, encode_text, format_rounded_up
from vit_jax.data.batch_memory import BatchMemory, MemoryClosed
from vit_jax.data.images import DecodeError
from vit_jax.data.order import Order
from vit_jax.data.preprocess import Preprocessor
from vit_jax.data.shard_fetcher import ShardFetcher
from vit_jax.data.sources import Source
from vit_jax.machine import count_cores, keep_freed_memory

RowNumbers: TypeAlias = Int64[np.ndarray, " rows"]  # sorted numbers of rows of a global batch
MAX_SKIPPED = 100  # unreadable images in a row
FAULT_BYTES = 500  # of the sentence on an unreadable image
ROWS_PER_GROUP = 8
MAX_BATCHES = 2**40
MAX_THREADS = 32  # more would only wait for the interpreter's lock
FEW_CORES = 7  # on at most so many, threads read as fast as processes: docs/data.md, "What a host can feed"
TRANSFERRED_AHEAD = 2  # batches on the devices, or on the way there, beside the one that is in use
CLOSE_WAIT = 5.0  # seconds; a read that takes longer, such as one from a slow store, ends in the background
STOPS = (signal.SIGINT, signal.SIGTERM)  # answered by the main process; terminals and schedulers send them to all


def local_rows(sharding: jax.sharding.Sharding, batch: int) -> RowNumbers:
    """Returns the sorted numbers of the rows of a global batch that the devices of this process hold.

    Args:
        sharding: the sharding of the batch, which splits dimension 0.
        batch: rows of the global batch.

    Raises:
        UserError: the batch cannot be split evenly over the devices.
    """
    try:
        indices = sharding.addressable_devices_indices_map((batch,))
    except ValueError:
        parts = len(sharding.device_set)
        unequal = f"a batch of {batch} cannot be split evenly over {parts} devices"
        raise UserError(f"{unequal}; choose a multiple of {parts}") from None
    return np.unique(np.concatenate([np.arange(batch, dtype=np.int64)[index] for index in indices.values()]))


@dataclasses.dataclass(frozen=True)
class ExampleReader:
    """Reads an example and preprocesses its image, or reads another in place of one that is unreadable.

    The result is a function of the index and a random generator.

    Attributes:
        source: the source of the examples.
        preprocess: the preprocessing of the image. Its last op is not applied, since uint8 is a quarter of the bytes to
            transfer.
        order: the order of the examples, which says which example replaces an unreadable one.
        on_bad: what to do with an unreadable image: `fail`, `replace` it by the next readable example, `raise`: fail
            without suggesting `replace`, or `mark`: read zeros in its place, with `mask` 0.
    """

    source: Source
    preprocess: Preprocessor
    order: Order
    on_bad: str

    def __call__(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns one row: `image` uint8 [height, width, 3], `label`, `mask` 1, `bad` and `fault`.

        `bad` is the index of an unreadable example that was replaced or marked, and `fault` says why it is unreadable;
        else they are -1 and empty. A negative `index` gives `blank`.

        Raises:
            UserError: an image is unreadable and may not be replaced, or `MAX_SKIPPED` images in a row are unreadable.
        """
        if index < 0:
            return self.blank
        fault = ""
        most = min(MAX_SKIPPED, len(self.source))
        for skipped in range(most):
            try:
                example = self.source[self.order.neighbour(index, skipped)]
                image = self.preprocess.apply_ops(example["image"], rng)
                label = np.asarray(example["label"], self.source.blank_label.dtype)
                return _row(image, label, 1, index if skipped else -1, fault)
            except DecodeError as error:
                fault = fault or str(error)
                if self.on_bad == "mark":
                    return self.blank | {"bad": np.array(index), "fault": _encode_fault(fault)}
                if self.on_bad == "raise":
                    raise UserError(f"{error}; repair or remove it: an evaluation skips no image") from error
                if self.on_bad == "fail":
                    raise UserError(f"{error}; repair it, or set --config.data.bad_images=replace") from error
        raise UserError(f"{most} images in a row are unreadable; the data may be damaged")

    @property
    def blank(self) -> dict[str, np.ndarray]:
        """The row that stands for no example: zeros, with `mask` 0."""
        return _row(np.zeros(self.preprocess.shape, np.uint8), self.source.blank_label, 0)


def _row(image: np.ndarray, label: np.ndarray, mask: int, bad: int = -1, fault: str = "") -> dict[str, np.ndarray]:
    numbers = {"mask": np.array(mask, np.float32), "bad": np.array(bad)}
    return {"image": image, "label": label, **numbers, "fault": _encode_fault(fault)}


def _encode_fault(fault: str) -> np.ndarray:
    return np.array(encode_text(fault), f"S{FAULT_BYTES}")


class RowGroups:
    """A data source for grain: element k is the k-th group of local rows, batch after batch.

    An element is read into the memory of its batch; its value is only k.
    """

    def __init__(
        self,
        examples: grain.MapDataset,
        batch: int,
        rows: RowNumbers,
        memory: BatchMemory,
        fetcher: ShardFetcher | None = None,
    ):
        """Divides the rows of a process into groups of at most ROWS_PER_GROUP rows.

        Args:
            examples: position in the run -> the row there.
            batch: rows of a global batch.
            rows: the rows of a global batch that this process reads.
            memory: where the rows are written.
            fetcher: is told the number of a batch whenever a group of it is going to be read.
        """
        self.examples, self.batch, self.rows = examples, batch, rows
        self.memory, self.fetcher = memory, fetcher
        self.groups = np.array_split(np.arange(len(rows)), count_groups(len(rows)))  # places among the rows
        self.batches = min(len(examples) // batch, MAX_BATCHES)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Sets up the worker process that receives this object."""
        vars(self).update(state)
        use_one_opencv_thread()
        set_up_worker()

    def __len__(self) -> int:
        """Returns the number of groups in all batches."""
        return self.batches * len(self.groups)

    def __getitem__(self, index: int) -> int:
        """Reads group `index` into the memory of its batch, unless that is closed, and returns `index`."""
        batch_number, group = divmod(index, len(self.groups))
        try:
            arrays = self.memory.get_arrays(batch_number)
        except MemoryClosed:  # raised on, its traceback would hold what the loader has opened
            return index
        if self.fetcher:
            self.fetcher.advance(batch_number)
        for place in self.groups[group].tolist():
            row = self.examples[batch_number * self.batch + int(self.rows[place])]
            for name, value in row.items():
                arrays[name][place] = value
        return index


def count_groups(rows: int) -> int:
    """Returns the number of groups into which `rows` rows of a batch are divided."""
    return math.ceil(rows / ROWS_PER_GROUP)


def use_one_opencv_thread() -> None:
    """Turns off OpenCV's own threads: the threads or worker processes of the loader already keep every core busy."""
    cv2.setNumThreads(0)


class LocalBatches(Iterator[dict[str, np.ndarray]]):
    """Iterates over the rows of this process of one global batch after another. It must be closed.

    A thread of its own waits for the groups of a batch: the thread that trains would have to wait for the interpreter's
    lock for each group. The thread starts with the first batch, and holds this object until `close`.

    Attributes:
        batch: rows of the global batch.
        rows: the rows of a global batch that this process reads.
        replaced: index of each unreadable example met so far -> why it is unreadable.
    """

    def __init__(
        self,
        source: Source,
        preprocess: Preprocessor,
        order: Order,
        *,
        batch: int,
        rows: RowNumbers,
        start: int = 0,
        workers: int = 0,
        on_bad: str = "fail",
        max_bad: float = 0.0,
        fetcher: ShardFetcher | None = None,
    ):
        """Begins to read ahead, in threads or in worker processes.

        Args:
            source: the source of the examples.
            preprocess: applied to each image; its randomness is a function of the order's seed and of the position.
            order: position -> index of the example.
            batch: rows of the global batch.
            rows: the rows of a global batch that this process reads.
            start: number of the first batch: `start=n` continues after n batches.
            workers: number of worker processes; 0: threads of this process read.
            on_bad: what to do with an unreadable image, see `ExampleReader`.
            max_bad: the largest fraction of the examples that may be replaced; any number may be marked.
            fetcher: opens the shards from which the examples are streamed; None: they are not streamed.
        """
        self.batch, self.rows, self.replaced = batch, rows, dict[int, str]()
        self._count, self._max_bad, self._marks = len(source), max_bad, on_bad == "mark"
        self._start, self._workers, self._fetcher = start, workers, fetcher
        groups = count_groups(len(rows))
        threads = min(count_cores(), MAX_THREADS)
        ahead = max(2 * groups, 2 * workers or threads)  # groups that are read, or wait, beside those of the next batch
        reader = ExampleReader(source, preprocess, order, on_bad)
        self._memory = BatchMemory(
            reader.blank, len(rows), start=start, prefetch=math.ceil(ahead / groups), shared=workers > 0
        )
        self._groups = groups
        examples = order.dataset().random_map(reader)
        row_groups = RowGroups(examples, batch, rows, self._memory, fetcher)
        dataset = grain.MapDataset.source(row_groups)[start * groups :]
        if workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # grain passes its flags to the workers, even outside of an absl app
            options = grain.MultiprocessingOptions(workers, per_worker_buffer_size=math.ceil(ahead / workers))
            iterable = dataset.to_iter_dataset(grain.ReadOptions(0, 0)).mp_prefetch(options)
        else:
            use_one_opencv_thread()
            iterable = dataset.to_iter_dataset(grain.ReadOptions(threads, ahead))
        self._iterator = iter(iterable)
        self._received = queue.Queue[dict[str, np.ndarray] | BaseException](1)  # a batch, or what ended the reading
        self._end: BaseException | None = None  # after which no batch follows
        self._thread: threading.Thread | None = None
        self._closed = False

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns `image` uint8 [rows, height, width, 3], `label` [rows, ...] as `Source.blank_label` and
        `mask` float32 [rows].

        Raises:
            UserError: an image is unreadable, or too many are; or a signal has ended a worker process.
        """
        if self._end is None and self._thread is None:
            self._thread = start_without_signals(self._receive)
        received = self._end or self._received.get()
        if isinstance(received, BaseException):
            self._end = received
            raise received
        faults = dict(zip(received.pop("bad").tolist(), received.pop("fault").tolist(), strict=True))
        for index in sorted(faults.keys() - self.replaced - {-1}):
            self.replaced[index] = fault = faults[index].decode(errors="ignore")
            if not self._marks:
                report_replaced(len(self.replaced), self._count, self._max_bad, fault)
        return received

    def _receive(self) -> None:
        """Hands over one batch after another, until `close` is called or the reading ends or fails."""
        try:
            for number in itertools.count(self._start):
                if self._closed:
                    break
                with worker_exit_errors(self._workers):
                    for _ in range(self._groups):
                        next(self._iterator)
                self._received.put(self._memory.take(number))
        except MemoryClosed:
            pass
        except BaseException as error:
            self._received.put(error)
        finally:
            self._iterator.close()  # by the thread that reads: closed by another, grain's `next` may wait for ever
            with contextlib.suppress(queue.Full):
                self._received.put_nowait(StopIteration())  # for a thread that waits for a batch

    def close(self) -> None:
        """Ends the reading; waits up to `CLOSE_WAIT` seconds until its threads or processes have ended."""
        if self._closed:
            return
        self._closed, self._end = True, self._end or StopIteration()
        in_own_thread = self._thread is threading.current_thread()  # where the garbage collector may call this
        if not in_own_thread:
            with contextlib.suppress(queue.Empty):
                self._received.get_nowait()  # the thread may be about to put one more
        self._memory.close()  # ends the reading, and so the thread
        if self._fetcher:
            self._fetcher.close()
        if self._thread is None:
            self._iterator.close()  # grain's iterators print errors if they outlive their module
        elif not in_own_thread:
            self._thread.join(CLOSE_WAIT)


def report_replaced(met: int, count: int, max_bad: float, fault: str) -> None:
    """Logs that an example was replaced, or raises UserError if too many were.

    Args:
        met: the number of unreadable examples so far.
        count: the number of all examples.
        max_bad: the largest fraction of the examples that may be replaced.
        fault: says which example was replaced now, and why.
    """
    allowed = math.floor(max_bad * count * (1 + 1e-12))  # 0.29 of 100 is 29
    if met > allowed:
        raise UserError(
            f"{fault}; {met} of {count:,} images are unreadable so far, more than the {allowed} that "
            f"--config.data.max_bad={max_bad:g} allows; repair them, "
            f"or set --config.data.max_bad={format_rounded_up(met / count, 2)}"
        )
    logging.getLogger(__name__).warning("%s; it is replaced by the next readable image", fault)


class DevicePrefetcher(Iterator[dict[str, jax.Array]]):
    """Iterates over batches on the devices; transfers `TRANSFERRED_AHEAD` more while the current one is in use.

    Transfers are asynchronous, so this needs no thread of its own. An error of the loader is raised only when its batch
    is requested. Until then it is the `failure`, so that the caller can prepare for it. The reading ends with `close`,
    or when nothing refers to this object any more.

    Attributes:
        waited: seconds spent waiting for the loader since the start.
    """

    def __init__(
        self,
        local: LocalBatches,
        sharding: jax.sharding.Sharding,
        value_range: tuple[float, float],
        names: tuple[str, ...] = ("image", "label"),
    ):
        """Transfers nothing before the first batch is requested.

        Args:
            local: the batches to transfer.
            sharding: splits dimension 0 of a batch.
            value_range: what 0 and 255 become on the devices: the last op of the preprocessing.
            names: the arrays to transfer, `image` among them.
        """
        self.local, self.sharding, self.value_range, self.names = local, sharding, value_range, names
        self.waited = 0.0
        self.queue: collections.deque[dict[str, jax.Array]] = collections.deque()
        self.end: Exception | None = None
        self._stop = weakref.finalize(self, local.close)

    def __next__(self) -> dict[str, jax.Array]:
        """Returns the next batch of global arrays [batch, ...]; its images are float32.

        Raises:
            UserError: an image is unreadable, or a signal has ended a worker process.
        """
        while self.end is None and len(self.queue) <= TRANSFERRED_AHEAD:
            began = time.monotonic()
            try:
                arrays = next(self.local)
                self.waited += time.monotonic() - began
                wanted = {name: arrays[name] for name in self.names}
                self.queue.append(assemble_global(wanted, self.local.rows, self.local.batch, self.sharding))
            except Exception as end:
                self.end = end
                self._stop()
        if self.end is not None and not self.queue:
            raise self.end
        ready = self.queue.popleft()
        return ready | {"image": scale_levels(ready["image"], self.value_range)}

    @property
    def failure(self) -> Exception | None:
        """The error of the loader, perhaps for a batch that was not requested yet; None: it has not failed."""
        return None if isinstance(self.end, StopIteration) else self.end

    @property
    def ready(self) -> int:
        """The number of batches that are transferred, or being transferred, and were not returned yet."""
        return len(self.queue)

    @property
    def replaced(self) -> int:
        """The number of unreadable images that this process has met so far, also in prefetched batches."""
        return len(self.local.replaced)

    @property
    def faults(self) -> dict[int, str]:
        """Index of each unreadable image that this process has met so far -> why it is unreadable."""
        return self.local.replaced

    def close(self) -> None:
        """Stops reading; no batch follows."""
        self.end = self.end or StopIteration()
        self.queue.clear()
        self._stop()


def assemble_global(
    local: dict[str, np.ndarray], rows: RowNumbers, batch: int, sharding: jax.sharding.Sharding
) -> dict[str, jax.Array]:
    """Assembles global arrays from the rows of this process, without communication.

    Args:
        local: arrays [rows, ...].
        rows: as returned by `local_rows`.
        batch: rows of the global batch.
        sharding: the sharding of dimension 0, for arrays of any rank.

    Returns:
        The arrays [batch, ...].
    """

    def assemble(array: np.ndarray) -> jax.Array:
        def shard(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(batch)
            first = int(np.searchsorted(rows, start))
            return array[first : first + stop - start]

        return jax.make_array_from_callback((batch, *array.shape[1:]), sharding, shard)

    return {name: assemble(array) for name, array in local.items()}


@functools.partial(jax.jit, static_argnums=1)
def scale_levels(images: UInt8[Array, "..."], value_range: tuple[float, float]) -> Float32[Array, "..."]:
    """Maps 0 to `low` and 255 to `high`, by one multiplication and one addition of float32.

    The result differs from that of `preprocess.value_range` by roundings of float32. They cannot be made equal: some
    compilers fuse the two operations and round once, others round twice.
    """
    low, high = value_range
    return images.astype(jnp.float32) * ((high - low) / 255) + low


def choose_workers(asked: int | str, cores: int) -> int:
    """Returns the number of worker processes; 0: threads.

    Args:
        asked: the setting `data.workers`. With `auto`, there are two workers fewer than cores, which leaves two cores
            to this process, or threads if there are at most `FEW_CORES` cores.
        cores: number of cores that this process may use.
    """
    if asked == "auto":
        return 0 if cores <= FEW_CORES else cores - 2
    return int(asked)


def start_without_signals(call: Callable[[], None]) -> threading.Thread:
    """Starts a thread that calls `call` with SIGINT and SIGTERM blocked, and returns it.

    The process does not wait for its end. Processes that the thread starts have these signals blocked, too. Otherwise a
    signal to the whole job could end them before they reach `set_up_worker`.
    """

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        call()

    resource_tracker.ensure_running()  # its start unblocks the signals of the thread that starts it
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def set_up_worker() -> None:
    """Sets up this process if it is a worker process; does nothing in the main process.

    A worker ignores SIGINT and SIGTERM, which are sent to all processes of a job, and ends with the main process. It
    keeps the memory that one image has used for the next image.
    """
    if not multiprocessing.current_process().daemon:
        return
    keep_freed_memory()
    with contextlib.suppress(ValueError):  # not in the main thread
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def worker_exit_errors(workers: int) -> Iterator[None]:
    """Explains that a signal has ended one of the `workers` worker processes.

    Raises:
        UserError: in place of grain's error; it names the signal and says what to do.
    """
    try:
        yield
    except RuntimeError as error:
        match = re.match(r"Worker process was terminated unexpectedly with exit code -(\d+)", str(error))
        if not match:
            raise
        number = signal.Signals(int(match[1]))
        cause = ", as the kernel's out-of-memory killer does (see `dmesg`)" if number == signal.SIGKILL else ""
        fewer = f"less than {workers}, or to 0" if workers > 1 else "0"
        raise UserError(
            f"a worker process of the loader was ended by {number.name}{cause}; set --config.data.workers to {fewer} "
            "for threads instead of processes."
        ) from error
