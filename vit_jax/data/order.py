"""The orders in which examples are read: position -> index of the example.

Row r of global batch n has the position n * batch + r. An order is a pure function of the position and of what it was
made from. So the position in the data is one integer, batches do not depend on hosts and workers, and a run resumes
exactly. `order_choice` makes the order of a run.

| order | of |
|---|---|
| `ShuffledOrder` | training: each epoch is a shuffle of all examples |
| `MixedOrder` | training on a mixture: the parts are drawn in proportion to their weights |
| `BalancedOrder` | training with other shares of the classes than they have of the examples |
| `RepeatedOrder` | training with repeated augmentation, on top of one of these two |
| `StreamOrder` | training on shards that no disk holds: a few of them are shuffled at a time |
| `MixedStreamOrder` | the same of a mixture |
| `BalancedStreamOrder` | the same with other shares of the classes |
| `EvalOrder` | an evaluation: every example once |
"""

import abc
import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import grain
import numpy as np
from jaxtyping import Float64, Int, Int64

from vit_jax.data.sources import Mixture

PerExample: TypeAlias = Int[np.ndarray, " examples"]
PerSlot: TypeAlias = Int64[np.ndarray, " slots"]
PerShard: TypeAlias = Int64[np.ndarray, " shards"]
PerReader: TypeAlias = Int64[np.ndarray, " readers"]
MAX_POSITIONS = 2**52  # of a run
PADDING = -1  # in place of an index, in the rows of an evaluation that have no example


class Order(abc.ABC):
    """Position -> index of an example. Can be pickled; threads may share it.

    Attributes:
        count: the number of examples of the source.
        seed: the seed of the order, and of random operations on its examples; 0 to 2**32 - 1.
    """

    count: int
    seed: int

    @abc.abstractmethod
    def __getitem__(self, position: int) -> int:
        """Returns the index of the example at a position."""

    def __len__(self) -> int:
        """Returns the number of positions; the epochs of training do not end, so more than any run has."""
        return MAX_POSITIONS

    def neighbour(self, index: int, distance: int) -> int:
        """Returns the example `distance` places after example `index`, which is read if those before are unreadable."""
        return (index + distance) % self.count

    def dataset(self) -> grain.MapDataset[int]:
        """Returns the order as a dataset, whose random operations depend on the seed and the position."""
        return grain.MapDataset.source(self).seed(self.seed)


class ShuffledOrder(Order):
    """All examples in each epoch, which is shuffled by itself."""

    def __init__(self, count: int, seed: int):
        """Takes the number of examples and the seed of the order."""
        self.count, self.seed = count, seed
        self._shuffled = grain.MapDataset.range(count).seed(seed).shuffle().repeat(None)

    def __getitem__(self, position: int) -> int:
        """Returns the index of the example at a position."""
        return self._shuffled[position]

    def dataset(self) -> grain.MapDataset[int]:
        """Returns the shuffled dataset itself: the seeds of operations depend on what is before them."""
        return self._shuffled


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


class MixedOrder(Order):
    """The parts of a mixture drawn in turn, in proportion to their weights; each is shuffled in epochs of its own."""

    def __init__(self, mixture: Mixture, seed: int, labels: PerExample | None = None, balance: float = 0.0):
        """Takes a mixture, the seed of its order and, if the classes of each part are balanced, what does that.

        See `ClassDraws` on `labels`, those of all examples, and `balance`.
        """
        self.count, self.seed = sum(mixture.lengths), seed
        self.draws, self.starts = ProportionalDraws(mixture.weights), mixture.starts
        self.parts: list[Order] = []
        for part, (start, length) in enumerate(zip(mixture.starts, mixture.lengths, strict=True)):
            own = (seed + part) % 2**32
            if labels is None:
                self.parts.append(ShuffledOrder(length, own))
            else:
                self.parts.append(BalancedOrder(ClassDraws(labels[start : start + length], balance, own)))

    def __getitem__(self, position: int) -> int:
        """Returns the index of the example at a position."""
        part, number = self.draws.draw(position)
        return self.starts[part] + self.parts[part][number]


class ClassDraws:
    """How often an epoch draws each example if the shares of the classes are balanced.

    Of the N draws of an epoch of N examples, a class of n examples has a share in proportion to n^(1 - balance): with 0
    its share of the examples, with 1 as many as each other class. The numbers of draws are rounded down, and the
    classes with the largest remainders have one more, so that they add up to N. The draws of a class go through its
    examples in one random order, over and over, through all epochs. So no example of it is drawn more than once more
    often than another.

    Attributes:
        count: the number of examples, N.
        seed: the seed of the order.
    """

    def __init__(self, labels: PerExample, balance: float, seed: int):
        """Takes the label of each example, the power of balancing from 0 to 1, and the seed."""
        self.count, self.seed = len(labels), seed
        shuffled = np.argsort(np.random.PCG64(seed).random_raw(self.count), kind="stable")
        _, classes = np.unique(labels[shuffled], return_inverse=True)
        self._members: PerExample = shuffled[np.argsort(classes, kind="stable")]  # class after class
        self._sizes = np.bincount(classes)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._draws = apportion(self._sizes ** (1.0 - balance), self.count)
        self._ends = np.cumsum(self._draws)

    def example(self, epoch: int, slot: int) -> int:
        """Returns the example of a slot of an epoch; the slots of an epoch, 0 to N - 1, are ordered by class."""
        own = int(np.searchsorted(self._ends, slot, side="right"))
        draws = int(self._draws[own])
        number = epoch * draws + slot - (int(self._ends[own]) - draws)
        return int(self._members[self._starts[own] + number % int(self._sizes[own])])

    def copies(self, epoch: int) -> PerExample:
        """Returns how often an epoch draws each example."""
        sizes: PerExample = np.repeat(self._sizes, self._sizes)
        draws: PerExample = np.repeat(self._draws, self._sizes)
        places = np.arange(self.count) - np.repeat(self._starts, self._sizes)  # of the examples in their classes
        copies: PerExample = np.empty(self.count, np.int64)
        copies[self._members] = draws // sizes + ((places - epoch * draws) % sizes < draws % sizes)
        return copies


def apportion(weights: Float64[np.ndarray, " parts"], total: int) -> Int64[np.ndarray, " parts"]:
    """Returns whole numbers in the proportions of the weights that add up to `total`, by the largest remainders."""
    exact = weights * (total / weights.sum())
    numbers = np.floor(exact + 1e-9).astype(np.int64)
    first = np.argsort(numbers - exact, kind="stable")[: total - int(numbers.sum())]
    numbers[first] += 1
    return numbers


class BalancedOrder(Order):
    """The draws of `ClassDraws`, shuffled in each epoch."""

    def __init__(self, draws: ClassDraws):
        """Takes how often each example is drawn."""
        self.count, self.seed, self.draws = draws.count, draws.seed, draws
        self._slots = ShuffledOrder(draws.count, draws.seed)

    def __getitem__(self, position: int) -> int:
        """Returns the index of the example at a position."""
        return self.draws.example(position // self.count, self._slots[position])


class RepeatedOrder(Order):
    """Repeated augmentation: a batch has each of its images several times, each copy augmented anew.

    A batch has k = ceil(batch / repeats) different images: row r has image r mod k (Hoffer et al., arXiv 1901.09335).
    So copies lie on different devices, as in DeiT's sampler, and MixUp, which mixes neighbours, never mixes two copies
    of an image. If `repeats` does not divide the batch, its last images have one copy less. As in DeiT, the rows that
    a run reads are counted as its examples: an epoch of N rows has N / repeats different images.
    """

    def __init__(self, order: Order, batch: int, repeats: int):
        """Takes the order of the images, the rows of a global batch and the copies of each image."""
        self.count, self.seed = order.count, order.seed
        self.order, self.batch = order, batch
        self.images = -(-batch // repeats)  # of a batch

    def __getitem__(self, position: int) -> int:
        """Returns the index of the example at a position."""
        number, row = divmod(position, self.batch)
        return self.order[number * self.images + row % self.images]


class ShardUses(NamedTuple):
    """The times at which a reader needs its shards of an epoch.

    Attributes:
        shards: the numbers of the shards, in the order in which they are first needed.
        first: the batch in which each shard is first needed.
        last: the batch in which each shard is last needed.
    """

    shards: PerShard
    first: PerShard
    last: PerShard


class ShardOrder(Order):
    """An order of examples in shards, read by R readers that go through different shards.

    Of each batch, reader j reads the batch / R rows from row j * batch / R on. So a host, whose rows belong to a few
    readers, needs only their shards.

    Attributes:
        batch: rows of a global batch.
        readers: the number of readers, R, which divides the batch.
    """

    batch: int
    readers: int

    @abc.abstractmethod
    def needed(self, reader: int, begin: int, end: int) -> dict[int, int]:
        """Returns the shards that a reader needs from batch `begin` to batch `end` (inclusive), and the next one.

        In a mixture, the next one of each part. The result is number of a shard -> the batch in which it is first
        needed, in a mixture approximately.
        """


def needed_shards(epochs: Iterable[ShardUses], begin: int, end: int) -> dict[int, int]:
    """Returns the result of `ShardOrder.needed`, given the uses of shards in an epoch after the other."""
    needed: dict[int, int] = {}
    for shards, firsts, lasts in epochs:
        count = int(np.searchsorted(firsts, end, side="right")) + 1
        here = np.flatnonzero(lasts[:count] >= begin)
        for shard, first in zip(shards[here].tolist(), firsts[here].tolist(), strict=True):
            needed.setdefault(shard, first)
        if count <= len(shards):
            break
    return needed


class _Pass(NamedTuple):
    """The examples that a reader reads in an epoch, in their order.

    Attributes:
        epoch: the number of the epoch.
        examples: number of the reader's slot in the epoch -> index of the example.
        uses: which shards the reader needs, and in which batches.
    """

    epoch: int
    examples: PerSlot
    uses: ShardUses


class StreamOrder(ShardOrder):
    """The streamed order: each of R readers goes through its own shards, and shuffles a few of them at a time.

    Row r of batch n is row k = r mod (batch / R) of reader j = r // (batch / R). The slot of the row in the run is
    q = n * batch + k * R + j, and its epoch is q // examples. In each epoch the shards are permuted and laid end to
    end. This line of examples is cut into R ranges, one for each reader, with as many examples as the reader has slots
    in the epoch. So an epoch contains each example once. A batch may contain the end of one epoch and the beginning of
    the next.

    Within its range, a reader reads each example of the i-th shard at a random time, uniform in [i, i + window). So at
    any time it needs `window` shards at most, and one more ahead. Times are drawn from (seed, epoch, reader).
    """

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
        """Returns the index of the example at a position."""
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

    def needed(self, reader: int, begin: int, end: int) -> dict[int, int]:
        """Returns the shards that a reader needs from batch `begin` to `end`, and the next one, see `ShardOrder`."""
        first_epoch = begin * self.batch // self.count
        return needed_shards((self.uses(epoch, reader) for epoch in itertools.count(first_epoch)), begin, end)

    def uses(self, epoch: int, reader: int) -> ShardUses:
        """Returns which shards a reader needs in an epoch, and in which batches."""
        return self._pass(epoch, reader).uses

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
        offsets: PerReader = (np.arange(self.readers) - epoch * self.count) % self.readers  # first slot of each reader
        counts: PerReader = (self.count - 1 - offsets) // self.readers + 1
        start, first, count = int(counts[:reader].sum()), int(offsets[reader]), int(counts[reader])
        line = np.argsort(_draw_uniform(len(self.lengths), self.seed, epoch), kind="stable")  # shards, end to end
        lengths, starts = self._lengths(epoch)
        ends = np.cumsum(lengths[line])
        places = np.arange(start, start + count)
        along: PerSlot = np.searchsorted(ends, places, side="right")  # number along the line of each example's shard
        shards = line[along]
        examples = self._examples(epoch, starts[shards] + places - (ends[along] - lengths[shards]))
        times = along + self.window * _draw_uniform(count, self.seed, epoch, reader)
        order = np.argsort(times, kind="stable")
        batches: PerSlot = (epoch * self.count + first + np.arange(count) * self.readers) // self.batch
        used = line[along[0] : along[-1] + 1]
        return _Pass(epoch, examples[order], _uses(used, along[order] - along[0], batches))

    def _lengths(self, epoch: int) -> tuple[PerShard, PerShard]:
        """Returns the number of slots of each shard in an epoch, and the first of them if shards are laid in order."""
        return self.lengths, self.starts

    def _examples(self, epoch: int, slots: PerSlot) -> PerSlot:
        """Returns the examples of slots of an epoch, which are numbered shard after shard."""
        return slots


class BalancedStreamOrder(StreamOrder):
    """The streamed order in which an epoch has each example as often as `ClassDraws` draws it.

    The copies of an example are slots of its shard, so that all of them are read within `window` shards.
    """

    def __init__(self, draws: ClassDraws, shard_lengths: Sequence[int], batch: int, readers: int, window: int):
        """Takes how often each example is drawn; the other arguments are those of `StreamOrder`."""
        super().__init__(shard_lengths, batch, readers, window, draws.seed)
        self.draws = draws
        self._slots: dict[int, tuple[int, PerExample]] = {}  # parity -> epoch, the example of each of its slots

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a worker process needs; it draws the rest itself."""
        return super().__getstate__() | {"_slots": {}}

    def _slots_of(self, epoch: int) -> PerExample:
        known, slots = self._slots.get(epoch % 2, (-1, None))
        if slots is None or known != epoch:
            slots = np.repeat(np.arange(self.count), self.draws.copies(epoch))
            self._slots[epoch % 2] = epoch, slots
        return slots

    def _lengths(self, epoch: int) -> tuple[PerShard, PerShard]:
        slots = self._slots_of(epoch)
        starts = np.searchsorted(slots, self.starts, side="left")
        return np.diff(starts, append=len(slots)), starts

    def _examples(self, epoch: int, slots: PerSlot) -> PerSlot:
        return self._slots_of(epoch)[slots]


def _draw_uniform(count: int, *key: int) -> Float64[np.ndarray, " count"]:
    """Returns random numbers in [0, 1), made from the generator's raw bits, which later versions of NumPy keep."""
    return (np.random.PCG64(key).random_raw(count) >> np.uint64(11)) * 2.0**-53


def _uses(shards: PerShard, numbers: PerSlot, batches: PerSlot) -> ShardUses:
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


class MixedStreamOrder(ShardOrder):
    """The streamed order of a mixture: each part is streamed in an order of its own.

    Every reader draws the parts in turn, as `ProportionalDraws` has them. Readers begin at different places of that
    cycle, so that the proportions hold within a batch too. Of each part, a reader reads its own stream.
    """

    def __init__(
        self,
        mixture: Mixture,
        shard_lengths: Sequence[int],
        batch: int,
        readers: int,
        window: int,
        seed: int,
        labels: PerExample | None = None,
        balance: float = 0.0,
    ):
        """Takes a mixture whose examples lie in shards; other arguments as for `StreamOrder` and `MixedOrder`."""
        self.count, self.seed = sum(mixture.lengths), seed
        self.draws, self.starts = ProportionalDraws(mixture.weights), mixture.starts
        self.batch, self.readers = batch, readers
        self.rows = batch // readers  # of a reader in a batch
        runs = mixture.runs(shard_lengths)
        self.first_shards = [own.start for own in runs]
        self.parts: list[StreamOrder] = []
        for part, (own, start, length) in enumerate(zip(runs, mixture.starts, mixture.lengths, strict=True)):
            lengths, of_part = shard_lengths[own.start : own.stop], (seed + part) % 2**32
            if labels is None:
                self.parts.append(StreamOrder(lengths, readers, readers, window, of_part))
            else:
                draws = ClassDraws(labels[start : start + length], balance, of_part)
                self.parts.append(BalancedStreamOrder(draws, lengths, readers, readers, window))
        self.offsets = [reader * sum(mixture.weights) // readers for reader in range(readers)]

    def __getitem__(self, position: int) -> int:
        """Returns the index of the example at a position."""
        number, row = divmod(position, self.batch)
        reader, k = divmod(row, self.rows)
        offset = self.offsets[reader]
        part, drawn = self.draws.draw(offset + number * self.rows + k)
        before = self.draws.counts(offset)[part]
        return self.starts[part] + self.parts[part][(drawn - before) * self.readers + reader]

    def neighbour(self, index: int, distance: int) -> int:
        """Returns the example of the same part `distance` places after example `index`; see `StreamOrder.neighbour`."""
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.starts[part] + self.parts[part].neighbour(index - self.starts[part], distance)

    def needed(self, reader: int, begin: int, end: int) -> dict[int, int]:
        """Returns the shards that a reader needs from batch `begin` to `end`, and the next ones, see `ShardOrder`."""
        offset, needed = self.offsets[reader], dict[int, int]()
        before, first, last = (
            self.draws.counts(images) for images in (offset, offset + begin * self.rows, offset + (end + 1) * self.rows)
        )
        for part, order in enumerate(self.parts):
            start, every = first[part] - before[part], sum(self.draws.weights) / self.draws.weights[part]
            for shard, drawn in order.needed(reader, start, last[part] - before[part]).items():
                needed[self.first_shards[part] + shard] = begin + int((drawn - start) * every / self.rows)
        return needed


class EvalOrder(ShardOrder):
    """The order of an evaluation: each of R readers goes once through its own range of the examples, in their order.

    The examples are cut into R equal ranges, one for each reader. Row r of batch n is row k = r mod (batch / R) of
    reader j = r // (batch / R). It is example n * batch / R + k of the j-th range. R depends on the batch size and on
    the shards, but not on the hosts and their disks, so a batch contains the same examples on any of them.

    Attributes:
        batches: the number of batches.
    """

    seed = 0

    def __init__(self, shard_lengths: Sequence[int], batch: int, readers: int):
        """Takes the number of examples in each shard, in the order of the source, and R, which divides the batch."""
        self.batch, self.readers = batch, readers
        self._ends = np.cumsum(np.array(shard_lengths, np.int64))
        self.count = int(self._ends[-1])
        self._cuts: Int64[np.ndarray, " cuts"] = self.count * np.arange(readers + 1) // readers
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

    def needed(self, reader: int, begin: int, end: int) -> dict[int, int]:
        """Returns the shards that a reader needs from batch `begin` to `end`, and the next one, see `ShardOrder`."""
        return needed_shards([self.uses(reader)], begin, end)

    def uses(self, reader: int) -> ShardUses:
        """Returns which shards a reader needs, and in which batches."""
        start, stop = self._cuts[reader : reader + 2]
        starts = np.concatenate([[0], self._ends[:-1]])
        shards = np.flatnonzero((self._ends > start) & (starts < stop) & (self._ends > starts))
        first, last = np.maximum(starts[shards], start), np.minimum(self._ends[shards], stop) - 1
        return ShardUses(shards, (first - start) // self._rows, (last - start) // self._rows)
