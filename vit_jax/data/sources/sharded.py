"""Whole splits whose examples lie in shards, one after the other."""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping

from vit_jax.data import shards
from vit_jax.data.sources.source import ShardRun, stamp_files, stamp_versions


class ShardedSplits:
    """The shards of some splits.

    Attributes:
        shards: split -> its shards in order.
        counts: split -> number of its examples.
    """

    def __init__(self, listed: Mapping[str, tuple[shards.Shard, ...]]):
        """Takes the shards of each split in order."""
        self.shards = dict(listed)
        lengths = {split: [shard.records for shard in of_split] for split, of_split in listed.items()}
        self.counts = {split: sum(numbers) for split, numbers in lengths.items()}
        self._starts = {split: [0, *itertools.accumulate(numbers[:-1])] for split, numbers in lengths.items()}

    def locate(self, split: str, index: int) -> tuple[shards.Shard, int]:
        """Returns the shard that contains example `index` of a split, and the number of its record there."""
        number = bisect.bisect_right(self._starts[split], index) - 1
        return self.shards[split][number], index - self._starts[split][number]

    def runs(self, parts: Iterable[tuple[str, range]]) -> Iterator[ShardRun]:
        """Yields the shards that contain these rows of splits, each with how many of the rows."""
        for split, rows in parts:
            for shard, start in zip(self.shards[split], self._starts[split], strict=True):
                contained = min(rows.stop, start + shard.records) - max(rows.start, start)
                if contained > 0:
                    yield ShardRun(shard.path, contained, *shard[1:])

    def stamp(self, split: str) -> str:
        """Returns a short text that changes when shards of a split are replaced."""
        listed = [shard.version for shard in self.shards[split]]
        if all(version and version.is_known for version in listed):  # else a request for each
            return stamp_versions(version.text for version in listed if version)
        return stamp_files(shard.path for shard in self.shards[split])


def open_run(run: ShardRun) -> None:
    """Opens a shard to be streamed; raises UserError if it is damaged, does not fit, or its store does not give it."""
    shards.streamed_reader(shards.Shard(run.path, *run[2:]), waits=False)
