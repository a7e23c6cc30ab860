"""The interface of orders of examples in shards: they state when a reader needs which shards."""

import abc
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

MAX_POSITIONS = 2**52  # positions, and epochs


class Endless:
    """An order of training, whose epochs do not end."""

    def __len__(self) -> int:
        """Returns a number larger than any run has positions."""
        return MAX_POSITIONS


class ShardUses(NamedTuple):
    """The times at which a reader needs its shards of an epoch.

    Attributes:
        shards: the numbers of the shards, in the order in which they are first needed.
        first: the batch in which each shard is first needed.
        last: the batch in which each shard is last needed.
    """

    shards: Int64[np.ndarray, " shards"]
    first: Int64[np.ndarray, " shards"]
    last: Int64[np.ndarray, " shards"]


class ShardOrder(abc.ABC):
    """Position, n * batch + row -> index of an example.

    Of each batch, reader j of R reads the batch / R rows from row j * batch / R on.

    Attributes:
        batch: rows of a global batch.
        readers: the number of readers, R, which divides the batch.
    """

    batch: int
    readers: int

    @abc.abstractmethod
    def needed(self, reader: int, begin: int, end: int) -> dict[int, int]:
        """Returns the shards that a reader needs from batch `begin` to batch `end` (inclusive), and the next one.

        The result is number of a shard -> the batch in which it is first needed, exactly or approximately.
        """


class EpochOrder(ShardOrder):
    """The order of a single source, in epochs.

    Attributes:
        epochs: the number of epochs.
    """

    epochs: int

    def first_epoch(self, batch: int) -> int:
        """Returns the first epoch of which a batch contains examples: here 0, for an order with a single epoch."""
        return 0

    @abc.abstractmethod
    def uses(self, epoch: int, reader: int) -> ShardUses:
        """Returns which shards a reader needs in an epoch, and in which batches."""

    def needed(self, reader: int, begin: int, end: int) -> dict[int, int]:
        """Returns the shards that a reader needs from batch `begin` to `end`, and the next one, see `ShardOrder`."""
        needed: dict[int, int] = {}
        for epoch in range(self.first_epoch(begin), self.epochs):
            shards, firsts, lasts = self.uses(epoch, reader)
            count = int(np.searchsorted(firsts, end, side="right")) + 1
            here = np.flatnonzero(lasts[:count] >= begin)
            for shard, first in zip(shards[here].tolist(), firsts[here].tolist(), strict=True):
                needed.setdefault(shard, first)
            if count <= len(shards):
                break
        return needed
