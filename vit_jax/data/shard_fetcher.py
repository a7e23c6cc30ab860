"""Copies of the shards that a host streams: made ahead of their use, and given back behind it."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Int64

from vit_jax import UserError
from vit_jax.data.sources import Shards
from vit_jax.data.stream_order import StreamOrder
from vit_jax.storage import filesystem

AHEAD = 4  # batches that the loader reads ahead
CONCURRENT = 4  # shards that are copied at once


class ShardWindow:
    """The shards that some rows need around a batch. Can be pickled.

    Attributes:
        order: of the examples.
        readers: those of the rows.
    """

    def __init__(self, order: StreamOrder, shards: Shards, rows: Int64[np.ndarray, " rows"]):
        """Takes what decides it: the order of the examples, the shards in which they lie, and the rows of a batch."""
        self.order, self._shards, self._newest = order, shards, -1
        self.readers = np.unique(rows // (order.batch // order.readers)).tolist()

    def numbers(self, batch: int) -> list[int]:
        """Returns the shards needed from one batch before a batch to AHEAD after it, and the next one of each reader.

        What is needed first comes first.
        """
        needed: dict[int, int] = {}
        before = max(batch - 1, 0)
        for reader in self.readers:
            epoch = self.order.epochs_of(before).start
            while True:
                shards, firsts, lasts = self.order.uses(epoch, reader)
                count = int(np.searchsorted(firsts, batch + AHEAD, side="right")) + 1
                for shard, first, last in zip(shards[:count].tolist(), firsts.tolist(), lasts.tolist(), strict=False):
                    if last >= before:
                        needed[shard] = min(first, needed.get(shard, first))
                if count <= len(shards):
                    break
                epoch += 1
        return sorted(needed, key=lambda shard: needed[shard])

    def paths(self, batch: int) -> list[str]:
        """Returns the paths of these shards, each once."""
        return list(dict.fromkeys(self._shards.runs[shard].path for shard in self.numbers(batch)))

    def close_others(self, batch: int) -> None:
        """Closes the other shards in this process, which reads a batch."""
        if batch > self._newest:
            self._newest = batch
            self._shards.close(self.paths(batch))


class ShardFetcher:
    """Keeps copies of the remote shards around a batch, made by threads; what fails is tried again by who reads."""

    def __init__(self, window: ShardWindow, start: int):
        """Begins to copy the shards around the first batch."""
        self._window, self._batch, self._closed = window, start, False
        self._changed = threading.Condition()
        self._held: dict[str, Callable[[], None]] = {}  # path -> gives the copy back
        threading.Thread(target=self._run, daemon=True).start()

    def advance(self, batch: int) -> None:
        """States which batch is read now; the batches before are not read again."""
        with self._changed:
            self._batch = batch
            self._changed.notify()

    def close(self) -> None:
        """Gives all copies back, once those that are being made are there."""
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
                    self._keep(list(filter(filesystem.is_remote, self._window.paths(done))), pool)
        except Exception:
            logging.getLogger(__name__).warning("shards are no longer copied ahead of their use", exc_info=True)
        finally:
            self._give_back(list(self._held))

    def _keep(self, paths: list[str], pool: ThreadPoolExecutor) -> None:
        """Gives back what is not among some paths, and copies what is missing of them."""
        self._give_back([path for path in self._held if path not in paths])
        missing = [path for path in paths if path not in self._held]
        for path, give_back in zip(missing, pool.map(self._borrow, missing), strict=True):
            if give_back:
                self._held[path] = give_back

    def _borrow(self, path: str) -> Callable[[], None] | None:
        try:
            return None if self._closed else filesystem.borrow_copy(path)[1]
        except UserError:  # a reader says so when it needs the shard
            return None

    def _give_back(self, paths: list[str]) -> None:
        for path in paths:
            self._held.pop(path)()
