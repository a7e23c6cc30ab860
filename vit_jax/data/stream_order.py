"""The streamed order: each of R readers goes through its own shards, and shuffles a few of them at a time.

Row r of batch n is row k = r mod (batch / R) of reader j = r // (batch / R). The slot of the row in the run is
q = n * batch + k * R + j, and its epoch is q // examples. In each epoch the shards are permuted and laid end to end.
This line of examples is cut into R ranges, one for each reader, with as many examples as the reader has slots in the
epoch. So an epoch contains each example once. A batch may contain the end of one epoch and the beginning of the next.
Batch n depends only on n and on the arguments of `StreamOrder`.

Within its range, a reader reads each example of the i-th shard at a random time, uniform in [i, i + window). So at any
time it needs `window` shards at most, and one more ahead. Times are drawn from (seed, epoch, reader).
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64, Int64

from vit_jax.data.shard_order import MAX_POSITIONS, Endless, EpochOrder, ShardUses

Slots: TypeAlias = Int64[np.ndarray, " slots"]


class _Pass(NamedTuple):
    """The examples that a reader reads in an epoch, in their order.

    Attributes:
        epoch: the number of the epoch.
        examples: number of the reader's slot in the epoch -> index of the example.
        uses: which shards the reader needs, and in which batches.
    """

    epoch: int
    examples: Slots
    uses: ShardUses


class StreamOrder(Endless, EpochOrder):
    """Position in the run, n * batch + row -> index of the example. Can be pickled; threads may share it."""

    epochs = MAX_POSITIONS

    def __init__(self, shard_lengths: Sequence[int], batch: int, readers: int, window: int, seed: int):
        """Takes what decides the order.

        Args:
            shard_lengths: examples in each shard, in the order of the source.
            batch: rows of a global batch, a multiple of `readers`.
            readers: number of streams that a batch takes rows from, the same number of each.
            window: shards that a reader shuffles at a time.
            seed: the seed of the order.
        """
        self.lengths = np.array(shard_lengths, np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.count = int(self.lengths.sum())
        self.batch, self.readers, self.window, self.seed = batch, readers, window, seed
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a worker process needs; it draws the passes itself."""
        return vars(self) | {"_passes": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Sets up the copy of a worker process."""
        vars(self).update(state, _lock=threading.Lock())

    def __getitem__(self, position: int) -> int:
        """Returns the index of an example."""
        number, row = divmod(position, self.batch)
        reader, k = divmod(row, self.batch // self.readers)
        slot = number * self.batch + k * self.readers + reader
        epoch = slot // self.count
        return int(self._pass(epoch, reader).examples[(slot - epoch * self.count) // self.readers])

    def shard_of(self, index: int) -> int:
        """Returns the number of the shard that contains an example."""
        return int(np.searchsorted(self.starts, index, side="right")) - 1

    def neighbour(self, index: int, distance: int) -> int:
        """Returns the example `distance` places after example `index`, in an order of all examples.

        The order begins with the other examples of its shard, where the first follows the last one. Those of the shards
        behind it come next, since all examples of a shard may be unreadable.
        """
        shard = self.shard_of(index)
        start, length = int(self.starts[shard]), int(self.lengths[shard])
        if distance < length:
            return start + (index - start + distance) % length
        return (start + distance) % self.count

    def uses(self, epoch: int, reader: int) -> ShardUses:
        """Returns which shards a reader needs in an epoch, and in which batches."""
        return self._pass(epoch, reader).uses

    def first_epoch(self, batch: int) -> int:
        """Returns the first epoch of which a batch contains examples."""
        return batch * self.batch // self.count

    def _pass(self, epoch: int, reader: int) -> _Pass:
        """Returns the pass of a reader over its range in an epoch.

        For each reader, the pass of the last even epoch and the pass of the last odd epoch are kept.
        """
        with self._lock:
            reader_pass = self._passes.get((epoch % 2, reader))
            if reader_pass is None or reader_pass.epoch != epoch:
                reader_pass = self._passes[epoch % 2, reader] = self._draw(epoch, reader)
            return reader_pass

    def _draw(self, epoch: int, reader: int) -> _Pass:
        offsets: Slots = (np.arange(self.readers) - epoch * self.count) % self.readers  # first slot of each reader
        counts: Slots = (self.count - 1 - offsets) // self.readers + 1
        start, first, count = int(counts[:reader].sum()), int(offsets[reader]), int(counts[reader])
        line = np.argsort(_draw_uniform(len(self.lengths), self.seed, epoch), kind="stable")  # shards, end to end
        ends = np.cumsum(self.lengths[line])
        places = np.arange(start, start + count)
        along: Slots = np.searchsorted(ends, places, side="right")  # number along the line of the shard of each example
        shards = line[along]
        examples: Slots = self.starts[shards] + places - (ends[along] - self.lengths[shards])
        times = along + self.window * _draw_uniform(count, self.seed, epoch, reader)
        order = np.argsort(times, kind="stable")
        batches: Slots = (epoch * self.count + first + np.arange(count) * self.readers) // self.batch
        used = line[along[0] : along[-1] + 1]
        return _Pass(epoch, examples[order], _uses(used, along[order] - along[0], batches))


def _draw_uniform(count: int, *key: int) -> Float64[np.ndarray, " count"]:
    """Returns random numbers in [0, 1), made from the generator's raw bits, which later versions of NumPy keep."""
    return (np.random.PCG64(key).random_raw(count) >> np.uint64(11)) * 2.0**-53


def _uses(shards: Int64[np.ndarray, " shards"], numbers: Slots, batches: Slots) -> ShardUses:
    """Returns the uses of shards by a reader.

    Args:
        shards: the numbers of the shards.
        numbers: for each slot of the reader, the index in `shards` of the shard that it reads.
        batches: for each slot of the reader, its batch.
    """
    first, last = np.full(len(shards), -1), np.full(len(shards), -1)
    last[numbers] = np.arange(len(numbers))
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    order = np.argsort(first)[np.sum(first < 0) :]  # without empty shards
    return ShardUses(shards[order], batches[first[order]], batches[last[order]])
