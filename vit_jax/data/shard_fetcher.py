"""Opens the shards that a process streams before they are needed, and closes them afterwards."""

import contextlib
import itertools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Int64

from vit_jax import UserError
from vit_jax.data.order import ShardOrder
from vit_jax.data.shards import close_streamed, streamed_reader
from vit_jax.data.sources import Shards

# Batches whose shards are copied before the loader, which reads ahead itself, begins to read them. It is the same on
# every host, since the disk that it needs decides how many readers an order has.
COPIED_AHEAD = 4
CONCURRENT = 4  # shards that are copied at once


class ShardFetcher:
    """Keeps the shards open that the rows of a process need around the current batch.

    It can be pickled, to send a copy to each worker process.

    Attributes:
        order: the order of the examples.
        readers: the numbers of the readers that read the rows.
    """

    def __init__(self, order: ShardOrder, shards: Shards, rows: Int64[np.ndarray, " rows"]):
        """Takes the order of the examples, the shards in which they lie, and the rows of a batch that are read."""
        self.order = order
        self._runs = shards.runs
        self.readers = np.unique(rows // (order.batch // order.readers)).tolist()
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a worker process needs."""
        return {"order": self.order, "readers": self.readers, "_runs": self._runs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Sets up a fetcher that has not begun to fetch."""
        vars(self).update(state)
        self._batch, self._closed = -1, False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def numbers(self, batch: int) -> list[int]:
        """Returns the numbers of the shards needed from `batch - 1` to `batch + COPIED_AHEAD`, and the next ones.

        The next ones are, of each reader (in a mixture, of each of its parts), the shard that is needed after these.
        The shard that is needed first comes first.
        """
        needed: dict[int, int] = {}
        before = max(batch - 1, 0)
        for reader in self.readers:
            for shard, first in self.order.needed(reader, before, batch + COPIED_AHEAD).items():
                needed[shard] = min(first, needed.get(shard, first))
        return sorted(needed, key=lambda shard: needed[shard])

    def advance(self, batch: int) -> None:
        """Tells the fetcher that this process begins to read a batch.

        Threads may still read rows of earlier batches. If their shard is closed already, they open it again.
        """
        with self._changed:
            self._batch = max(batch, self._batch)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shard fetcher", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the fetching; all shards are closed once those that are being opened are open."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        done = -1
        try:
            with ThreadPoolExecutor(CONCURRENT) as pool:
                while not self._closed:
                    with self._changed:
                        while self._batch == done and not self._closed:
                            self._changed.wait()
                        done = self._batch
                    numbers = self.numbers(done)
                    close_streamed([self._runs[number].path for number in numbers], id(self))
                    list(pool.map(self._open, numbers, itertools.repeat(done)))
        except Exception as error:
            # Libraries fail in their own words in a copy that nobody needs, or that goes on as the process ends.
            if not self._closed and "shutdown" not in str(error):
                logging.getLogger(__name__).warning(
                    "shards can no longer be copied ahead, only when they are needed, so steps may wait; the cause:",
                    exc_info=True,
                )
        finally:
            close_streamed((), id(self))

    def _open(self, number: int, batch: int) -> None:
        with contextlib.suppress(UserError):  # the reader of the shard tries again and reports it
            if not self._closed and self._batch == batch:  # else others may be more urgent, and this one not needed
                streamed_reader(self._runs[number], may_wait=False)
