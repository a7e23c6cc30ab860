"""The order of an evaluation: each of R readers goes once through its own range of the examples, in their order.

The examples are cut into R equal ranges, one for each reader. Row r of batch n is row k = r mod (batch / R) of reader
j = r // (batch / R). It is example n * batch / R + k of the j-th range. So a host, whose rows belong to a few readers,
needs only the shards of their ranges. R depends on the batch size and on the shards, but not on the hosts and their
disks, so a batch contains the same examples on any of them. Examples that are not in shards form a single range.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from vit_jax.data.shard_order import EpochOrder, ShardUses
from vit_jax.data.sources import Source

MAX_READERS = 64
MAX_BYTES = 20e9  # of the shards that one host would hold, which are up to three of each reader
PADDING = -1


class EvalOrder(EpochOrder):
    """Position in an evaluation, n * batch + row -> index of the example, or PADDING.

    Attributes:
        batch: rows of a global batch.
        readers: the number of readers, R.
        epochs: 1.
        batches: the number of batches.
    """

    epochs = 1

    def __init__(self, shard_lengths: Sequence[int], batch: int, readers: int):
        """Takes the number of examples in each shard, in the order of the source, and R, which divides the batch."""
        self.batch, self.readers = batch, readers
        self._ends = np.cumsum(np.array(shard_lengths, np.int64))
        self._cuts: Int64[np.ndarray, " cuts"] = int(self._ends[-1]) * np.arange(readers + 1) // readers
        self._rows = batch // readers  # of a reader in a batch
        self.batches = -(-int(np.diff(self._cuts).max()) // self._rows)

    def __len__(self) -> int:
        """Returns the number of positions."""
        return self.batches * self.batch

    def __getitem__(self, position: int) -> int:
        """Returns the index of the example at a position, or PADDING if there is none."""
        number, row = divmod(position, self.batch)
        reader, k = divmod(row, self._rows)
        index = int(self._cuts[reader]) + number * self._rows + k
        return index if index < self._cuts[reader + 1] else PADDING

    def indices(self, number: int) -> Int64[np.ndarray, " batch"]:
        """Returns the indices of the examples in global batch `number`, with PADDING in rows that have no example."""
        along = self._cuts[:-1, None] + number * self._rows + np.arange(self._rows)
        return np.where(along < self._cuts[1:, None], along, PADDING).ravel()

    def uses(self, epoch: int, reader: int) -> ShardUses:
        """Returns which shards a reader needs in which batches."""
        start, stop = self._cuts[reader : reader + 2]
        starts = np.concatenate([[0], self._ends[:-1]])
        shards = np.flatnonzero((self._ends > start) & (starts < stop) & (self._ends > starts))
        first, last = np.maximum(starts[shards], start), np.minimum(self._ends[shards], stop) - 1
        return ShardUses(shards, (first - start) // self._rows, (last - start) // self._rows)


def choose_eval_order(source: Source, batch: int) -> EvalOrder:
    """Returns the order in which an evaluation reads a source in batches of `batch` rows."""
    if source.shards is None:
        return EvalOrder([len(source)], batch, 1)
    most = min(MAX_READERS, len(source.shards.runs), MAX_BYTES / (3 * max(run.size or 1 for run in source.shards.runs)))
    readers = max(2**power for power in range(7) if power == 0 or (2**power <= most and batch % 2**power == 0))
    return EvalOrder(source.shards.examples, batch, readers)
