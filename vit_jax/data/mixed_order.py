"""The training orders of a mixture: parts are drawn in turn, in proportion to their weights, each in its own epochs."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from vit_jax.data.shard_order import Endless, ShardOrder
from vit_jax.data.shuffled_order import shuffle_epochs
from vit_jax.data.sources import Mixture
from vit_jax.data.stream_order import StreamOrder


class ProportionalDraws:
    """The sequence of draws from the parts of a mixture: the part that each draw gives.

    Of the first n draws, the first part has its share of n, rounded. The second part has its share of the remaining
    draws, rounded, and so on. So the p-th part has its share of n, with an error of less than p draws.
    """

    def __init__(self, weights: Sequence[int]):
        """Takes whole numbers in the proportions of the shares."""
        self.weights = tuple(weights)

    def counts(self, draws: int) -> list[int]:
        """Returns how many of the first `draws` draws give each part."""
        counts, remaining, rest = [], draws, sum(self.weights)
        for weight in self.weights:
            counts.append((2 * remaining * weight + rest) // (2 * rest))
            remaining, rest = remaining - counts[-1], rest - weight
        return counts

    def draw(self, number: int) -> tuple[int, int]:
        """Returns the part that draw `number` (from 0) gives, and how many draws before it have given the same part."""
        before, after = self.counts(number), self.counts(number + 1)
        part = next(part for part, count in enumerate(before) if after[part] > count)
        return part, before[part]


class MixedOrder(Endless):
    """Position in the run -> index of the example; all examples of a part are shuffled in each of its epochs."""

    def __init__(self, mixture: Mixture, seed: int):
        """Takes a mixture and the seed of its order."""
        self.draws, self.starts = ProportionalDraws(mixture.weights), mixture.starts
        self.parts = [shuffle_epochs(length, (seed + part) % 2**32) for part, length in enumerate(mixture.lengths)]

    def __getitem__(self, position: int) -> int:
        """Returns the index of an example."""
        part, number = self.draws.draw(position)
        return self.starts[part] + self.parts[part][number]


class MixedStreamOrder(Endless, ShardOrder):
    """Position in the run, n * batch + row -> index of the example; each part is streamed in an order of its own.

    Every reader draws the parts in turn, as `ProportionalDraws` has them. Readers begin at different places of that
    cycle, so that the proportions hold within a batch too. Of each part, a reader reads its own stream. Can be pickled;
    threads may share it.
    """

    def __init__(
        self, mixture: Mixture, shard_lengths: Sequence[int], batch: int, readers: int, window: int, seed: int
    ):
        """Takes a mixture whose examples lie in shards; the other arguments are those of `StreamOrder`."""
        self.draws, self.starts = ProportionalDraws(mixture.weights), mixture.starts
        self.batch, self.readers = batch, readers
        self.rows = batch // readers  # of a reader in a batch
        runs = mixture.runs(shard_lengths)
        self.first_shards = [own.start for own in runs]
        self.parts = [
            StreamOrder(shard_lengths[own.start : own.stop], readers, readers, window, (seed + part) % 2**32)
            for part, own in enumerate(runs)
        ]
        self.offsets = [reader * sum(mixture.weights) // readers for reader in range(readers)]

    def __getitem__(self, position: int) -> int:
        """Returns the index of an example."""
        number, row = divmod(position, self.batch)
        reader, k = divmod(row, self.rows)
        offset = self.offsets[reader]
        part, drawn = self.draws.draw(offset + number * self.rows + k)
        before = self.draws.counts(offset)[part]
        return self.starts[part] + self.parts[part][(drawn - before) * self.readers + reader]

    def needed(self, reader: int, begin: int, end: int) -> dict[int, int]:
        """Returns the shards that a reader needs from batch `begin` to batch `end`, and the next shard of each part.

        The result is number of a shard -> about the batch in which it is first needed.
        """
        offset, needed = self.offsets[reader], dict[int, int]()
        before, first, last = (
            self.draws.counts(images) for images in (offset, offset + begin * self.rows, offset + (end + 1) * self.rows)
        )
        for part, order in enumerate(self.parts):
            start, every = first[part] - before[part], sum(self.draws.weights) / self.draws.weights[part]
            for shard, drawn in order.needed(reader, start, last[part] - before[part]).items():
                needed[self.first_shards[part] + shard] = begin + int((drawn - start) * every / self.rows)
        return needed

    def neighbour(self, index: int, distance: int) -> int:
        """Returns the example of the same part `distance` places after example `index`; see `StreamOrder.neighbour`."""
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.starts[part] + self.parts[part].neighbour(index - self.starts[part], distance)


TrainStream: TypeAlias = StreamOrder | MixedStreamOrder
