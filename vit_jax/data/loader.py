"""Loading of batches: global batch n is a function of (seed, n), whichever processes read its rows.

The data is shuffled first, then batched; then each process reads the rows that its devices hold. So the batch that the
processes assemble depends neither on their number nor on their worker processes, and the position in the data is one
integer.
"""

import collections
import contextlib
import itertools
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import grain
import jax
import numpy as np
from absl import flags

from vit_jax import UserError, format_rounded_up
from vit_jax.data.batch_memory import BatchMemory, MemoryClosed
from vit_jax.data.eval_order import EvalOrder
from vit_jax.data.example_reader import ExampleReader, ExampleSource
from vit_jax.data.mixed_order import MixedOrder, TrainStream
from vit_jax.data.preprocess import Preprocessor
from vit_jax.data.repeated_order import RepeatedOrder
from vit_jax.data.row_groups import RowGroups, Rows, count_groups, use_one_opencv_thread
from vit_jax.data.shard_fetcher import ShardFetcher
from vit_jax.data.shuffled_order import shuffle_epochs
from vit_jax.data.sources import Mixture
from vit_jax.data.workers import start_without_signals, worker_exit_errors
from vit_jax.machine import count_cores

MAX_THREADS = 32  # more would only wait for the interpreter's lock
CLOSE_WAIT = 5.0  # seconds; a read that takes longer, such as one from a slow store, ends in the background


def local_rows(sharding: jax.sharding.Sharding, batch: int) -> Rows:
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


def assemble_global(
    local: dict[str, np.ndarray], rows: Rows, batch: int, sharding: jax.sharding.Sharding
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


class Receiver:
    """Waits for the groups of one batch after another, in a thread of its own.

    The thread that trains would have to wait for the interpreter's lock for each group.

    Attributes:
        received: a queue of at most one element: the next batch, or the exception that ended the reading.
    """

    def __init__(
        self,
        iterator: grain.DatasetIterator,
        row_groups: RowGroups,
        start: int,
        workers: int,
        fetcher: ShardFetcher | None,
    ):
        """Takes an iterator over `row_groups` from batch `start` on, the number of workers, and a fetcher to close."""
        self.received = queue.Queue[dict[str, np.ndarray] | BaseException](1)
        self._iterator, self._row_groups, self._start = iterator, row_groups, start
        self._workers, self._fetcher = workers, fetcher
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, unless it runs already."""
        if self._thread is None:
            self._thread = start_without_signals(self._run)

    def stop(self) -> None:
        """Ends the reading; waits up to `CLOSE_WAIT` seconds until the iterator and its processes are closed."""
        self._stopped = True
        if self._thread is not threading.current_thread():  # where the garbage collector may call this
            with contextlib.suppress(queue.Empty):
                self.received.get_nowait()  # the thread may be about to put one more
        self._row_groups.memory.close()  # ends the reading, and so the thread
        if self._fetcher:
            self._fetcher.close()
        if self._thread is None:
            self._iterator.close()  # grain's iterators print errors if they outlive their module
        elif self._thread is not threading.current_thread():
            self._thread.join(CLOSE_WAIT)

    def _run(self) -> None:
        """Puts one batch after another into `received`, until `stop` is called or the reading ends or fails."""
        try:
            for number in itertools.count(self._start):
                if self._stopped:
                    break
                with worker_exit_errors(self._workers):
                    for _ in self._row_groups.groups:
                        next(self._iterator)
                self.received.put(self._row_groups.memory.take(number))
        except MemoryClosed:
            pass
        except BaseException as error:
            self.received.put(error)
        finally:
            self._iterator.close()  # by the thread that reads: closed by another, grain's `next` may wait for ever
            with contextlib.suppress(queue.Full):
                self.received.put_nowait(StopIteration())  # for a thread that waits for a batch


class LocalBatches(Iterator[dict[str, np.ndarray]]):
    """Iterates over the rows of this process of one global batch after another.

    Attributes:
        replaced: the indices of the unreadable examples met so far.
    """

    def __init__(
        self,
        examples: grain.MapDataset,
        reader: ExampleReader,
        *,
        batch: int,
        rows: Rows,
        start: int,
        workers: int,
        max_bad: float = 0.0,
        fetcher: ShardFetcher | None = None,
    ):
        """Begins to read ahead, in threads or in worker processes.

        Args:
            examples: position in the run -> the row that `reader` returns for the example there.
            reader: reads the examples.
            batch: rows of the global batch.
            rows: the rows of a global batch that this process reads.
            start: number of the first batch.
            workers: number of worker processes; 0: threads of this process read.
            max_bad: the largest fraction of the examples that may be replaced.
            fetcher: opens the shards from which the examples are streamed; None: they are not streamed.
        """
        self.replaced: set[int] = set()
        self.source, self.max_bad = reader.source, max_bad
        groups = count_groups(len(rows))
        threads = min(count_cores(), MAX_THREADS)
        ahead = max(2 * groups, 2 * workers or threads)  # groups
        memory = BatchMemory(
            reader.blank, len(rows), start=start, prefetch=math.ceil(ahead / groups), shared=workers > 0
        )
        row_groups = RowGroups(examples, batch, rows, memory, fetcher.advance if fetcher else None)
        dataset = grain.MapDataset.source(row_groups)[start * groups :]
        if workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # grain passes its flags to the workers, even outside of an absl app
            options = grain.MultiprocessingOptions(workers, per_worker_buffer_size=math.ceil(ahead / workers))
            iterable = dataset.to_iter_dataset(grain.ReadOptions(0, 0)).mp_prefetch(options)
        else:
            use_one_opencv_thread()
            iterable = dataset.to_iter_dataset(grain.ReadOptions(threads, ahead))
        self._receiver = Receiver(iter(iterable), row_groups, start, workers, fetcher)
        self._end: BaseException | None = None  # after which no batch follows
        self._stop = weakref.finalize(self, self._receiver.stop)

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns `image` uint8 [rows, height, width, 3], `label` int32 [rows] or [rows, labels] and `mask` float32
        [rows].

        Raises:
            UserError: an image is unreadable, or too many are; or a signal has ended a worker process.
        """
        if self._end is None:
            self._receiver.start()
        batch = self._end or self._receiver.received.get()
        if isinstance(batch, BaseException):
            self._end = batch
            raise batch
        faults = dict(zip(batch.pop("bad").tolist(), batch.pop("fault").tolist(), strict=True))
        for index in sorted(faults.keys() - self.replaced - {-1}):
            self.replaced.add(index)
            self._report_replaced(faults[index].decode(errors="ignore"))
        return batch

    def _report_replaced(self, fault: str) -> None:
        """Logs that an example was replaced, or raises UserError if too many were."""
        met, count = len(self.replaced), len(self.source)
        allowed = math.floor(self.max_bad * count * (1 + 1e-12))  # 0.29 of 100 is 29
        if met > allowed:
            raise UserError(
                f"{fault}; {met} of {count:,} images are unreadable so far, more than the "
                f"{allowed} that --config.data.max_bad={self.max_bad:g} allows; repair them, "
                f"or set --config.data.max_bad={format_rounded_up(met / count, 2)}"
            )
        logging.getLogger(__name__).warning("%s; it is replaced by the next readable image", fault)

    def close(self) -> None:
        """Stops the threads or processes."""
        self._end = self._end or StopIteration()
        self._stop()


def local_train_batches(
    source: ExampleSource,
    preprocess: Preprocessor,
    *,
    batch: int,
    rows: Rows,
    seed: int,
    start: int = 0,
    workers: int = 0,
    on_bad: str = "fail",
    max_bad: float = 0.0,
    fetcher: ShardFetcher[TrainStream] | None = None,
    mixture: Mixture | None = None,
    repeats: int = 1,
) -> LocalBatches:
    """Iterates without end over shuffled batches; each epoch has its own order, batches straddle epochs.

    Args:
        source: the source of the examples.
        preprocess: applied to each image; its randomness is a function of (seed, position of the example in the run).
        batch: rows of the global batch.
        rows: the rows of a global batch that this process reads.
        seed: the seed of the order and of the preprocessing; 0 to 2**32 - 1.
        start: number of the first batch: `start=n` continues after n batches.
        workers: number of processes that read and decode; 0: threads of this process.
        on_bad: what to do with an unreadable image: `fail`, or `replace` it by the next readable example.
        max_bad: the largest fraction of the examples that may be replaced.
        fetcher: opens the shards from which the examples are streamed, and has their order; None: all examples are
            shuffled.
        mixture: how to draw from the parts of the source, if it is a mixture; else None.
        repeats: copies of each image in a batch, see `RepeatedOrder`; 1 if the examples are streamed.
    """
    stream = fetcher.order if fetcher else None
    order = stream or (MixedOrder(mixture, seed) if mixture else None)
    indices = grain.MapDataset.source(order).seed(seed) if order else shuffle_epochs(len(source), seed)
    if repeats > 1:
        indices = grain.MapDataset.source(RepeatedOrder(indices, batch, repeats)).seed(seed)
    reader = ExampleReader(source, preprocess, on_bad, stream)
    return LocalBatches(
        indices.random_map(reader),
        reader,
        batch=batch,
        rows=rows,
        start=start,
        workers=workers,
        max_bad=max_bad,
        fetcher=fetcher,
    )


def local_eval_batches(
    source: ExampleSource,
    preprocess: Preprocessor,
    *,
    order: EvalOrder,
    rows: Rows,
    workers: int = 0,
    fetcher: ShardFetcher[EvalOrder] | None = None,
) -> LocalBatches:
    """Iterates once over the examples in an order; `mask` is 0 for the zeros that pad a batch.

    If the examples lie in shards, the `fetcher` opens them in this order.
    """
    reader = ExampleReader(source, preprocess, "raise")
    examples = grain.MapDataset.source(order).seed(0).random_map(reader)
    return LocalBatches(examples, reader, batch=order.batch, rows=rows, start=0, workers=workers, fetcher=fetcher)


class DevicePrefetcher(Iterator[dict[str, jax.Array]]):
    """Iterates over batches on the devices; transfers the next `depth` while the current one is in use.

    Transfers are asynchronous, so this needs no thread of its own. An error of the loader is raised only when its batch
    is requested. Until then it is the `failure`, so that the caller can prepare for it.

    Attributes:
        waited: seconds spent waiting for the loader since the start.
    """

    def __init__(
        self,
        local: LocalBatches,
        put: Callable[[dict[str, np.ndarray]], dict[str, jax.Array]],
        finish: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = lambda batch: batch,
        depth: int = 2,
    ):
        """Transfers nothing before the first batch is requested.

        Args:
            local: the batches to transfer.
            put: begins to transfer a batch.
            finish: applied to a batch on the devices when it is requested.
            depth: number of batches to keep transferred in advance.
        """
        self.local, self.put, self.finish, self.depth = local, put, finish, depth
        self.waited = 0.0
        self.queue: collections.deque = collections.deque()
        self.end: Exception | None = None

    def __next__(self) -> dict[str, jax.Array]:
        """Returns the next batch of global arrays.

        Raises:
            UserError: an image is unreadable, or a signal has ended a worker process.
        """
        while self.end is None and len(self.queue) <= self.depth:
            began = time.monotonic()
            try:
                batch = next(self.local)
                self.waited += time.monotonic() - began
                self.queue.append(self.put(batch))
            except Exception as end:
                self.end = end
                self.local.close()
        if self.end is not None and not self.queue:
            raise self.end
        return self.finish(self.queue.popleft())

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

    def close(self) -> None:
        """Stops reading; no batch follows."""
        self.end = self.end or StopIteration()
        self.queue.clear()
        self.local.close()
