"""Whole splits whose examples lie in shards, one after the other.

Where a file beside the shards states their numbers of records, they are not opened before they are read. A format with
such a file has a function that writes it for shards of another program, and returns a `Description`.
"""

import bisect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Int32

from vit_jax import UserError, user_errors
from vit_jax.data import shards
from vit_jax.data.images import DecodeError, EncodedImage
from vit_jax.data.sources.file_pattern import FoundFile
from vit_jax.data.sources.source import Shards, check_range, stamp_files, stamp_versions
from vit_jax.storage import cache, filesystem

OpenShard: TypeAlias = Callable[[shards.Shard], Any]  # returns the reader of a shard
FileT = TypeVar("FileT")


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

    def read(
        self, split: str, index: int, open_shard: OpenShard, read_record: Callable[[Any, int, str], Any]
    ) -> tuple[Any, str]:
        """Returns the result of `read_record(reader, row, name)` for the record of an example, and that `name`.

        Args:
            split: the whole split of the example.
            index: the index of the example in the split.
            open_shard: returns the reader of a shard.
            read_record: reads record `row` of a shard; `name` is for messages.

        Raises:
            DecodeError: `read_record` has raised ValueError, since the record is damaged.
            UserError: the shard is damaged or missing.
        """
        shard, row = self.locate(split, index)
        name = f"record {row} of {shard.path}"
        try:
            return read_record(open_shard(shard), row, name), name
        except ValueError as error:
            raise DecodeError(f"cannot read {name}: {error}") from error

    def select(self, parts: Iterable[tuple[str, range]], shuffled: bool = False) -> Shards:
        """Returns the shards that contain some examples.

        Args:
            parts: (name of a whole split, range of its examples) of each part, in order.
            shuffled: whether the order of the examples is known to be random.
        """
        shard_counts = []
        for split, rows in parts:
            for shard, start in zip(self.shards[split], self._starts[split], strict=True):
                contained = min(rows.stop, start + shard.records) - max(rows.start, start)
                if contained > 0:
                    shard_counts.append((shard, contained))
        runs, examples = zip(*shard_counts, strict=True)
        return Shards(runs, examples, shuffled)

    def file_stamp(self, split: str, indices: Sequence[int]) -> str:
        """Returns a short text that changes when shards of a split are replaced, whichever examples are asked for."""
        listed = [shard.version for shard in self.shards[split]]
        if all(version and version.is_known for version in listed):  # else the store must be asked about each shard
            return stamp_versions(version.text for version in listed if version)
        return stamp_files(shard.path for shard in self.shards[split])


def list_shards(
    split: str, files: Sequence[FoundFile], lengths: Mapping[str, int], info: str, source: str, format: str
) -> tuple[shards.Shard, ...]:
    """Returns the shards of a split.

    A file whose number of records is not stated is opened to count them; a remote file is copied into the cache first.

    Args:
        split: the name of the split.
        files: its files, in order.
        lengths: name of a file -> number of its records, for the files beside which it is stated.
        info: the name of the file beside the shards that may state the numbers of records.
        source: the data source that is all of the folder, such as `array_record:FOLDER`.
        format: the format of the files, one of `shards.FORMATS`.

    Raises:
        UserError: a file that is opened is damaged, or the files to copy do not fit into the cache.
    """
    size = sum(file.size or 0 for file in files if file.name not in lengths and filesystem.is_remote(file.path))
    if size > cache.max_bytes():
        folder = source.partition(":")[2]
        raise UserError(
            f"the number of records in split {split} of {folder} is not known, since no {info} is beside the shards, "
            f"and the shards ({size / 1e9:.3g} GB) do not fit into the cache ({cache.max_bytes() / 1e9:.3g} GB) to be "
            f"counted; count the records once with python -m vit_jax.describe {source} --num-classes=N"
        )
    return tuple(
        shards.Shard(
            file.path,
            lengths[file.name]
            if file.name in lengths
            else shards.count_records(file.path, file.size, file.version, format),
            file.size,
            file.version,
            format,
        )
        for file in files
    )


def read_labelled(
    splits: ShardedSplits,
    read_record: Callable[[Any, int, str], tuple[bytes, list[int] | None]],
    num_classes: int,
    max_labels: int | None,
    split: str,
    index: int,
    open_shard: OpenShard = shards.cached_reader,
) -> tuple[EncodedImage, int | Int32[np.ndarray, " max_labels"]]:
    """Returns (image, label) number `index` of a split.

    In multi-label data the label is an array [max_labels]: each label once, padded with -1.

    Args:
        splits: the shards of each split.
        read_record: function of (reader of a shard, row, name of the record for messages) that returns (encoded image,
            labels), and raises ValueError if the record is damaged; labels of None are not read and become -1.
        num_classes: the labels are 0 to num_classes - 1.
        max_labels: the most labels of an image in multi-label data, or None.
        split: the whole split of the example.
        index: the index of the example in the split.
        open_shard: returns the reader of a shard.

    Raises:
        DecodeError: the record is damaged.
        UserError: the shard is damaged, or a label is not one of the classes.
    """
    (image, labels), name = splits.read(split, index, open_shard, read_record)
    return EncodedImage(image, name), -1 if labels is None else check_labels(labels, name, num_classes, max_labels)


def check_labels(
    labels: list[int], name: str, num_classes: int, max_labels: int | None
) -> int | Int32[np.ndarray, " max_labels"]:
    """Checks the labels of a record, called `name` in messages, and returns them in the form of a `source.Label`.

    That is an int, -1 for an image without a label; or, in multi-label data, an array [max_labels] with each label
    once, padded with -1.

    Raises:
        UserError: a label is out of range, or there are too many or too few.
    """
    check_range(labels, num_classes, name)
    if max_labels is None:
        if len(labels) != 1:
            raise UserError(
                f"{name} has {len(labels)} labels, but one is expected; multi-label data needs max_labels in "
                f"{shards.MANIFEST_NAME} or --config.data.max_labels"
            )
        return labels[0]
    if -1 in labels:
        raise UserError(f"{name} has the label -1; several labels an image are a list, which is empty for no class")
    labels = list(dict.fromkeys(labels))
    if len(labels) > max_labels:
        raise UserError(f"{name} has {len(labels)} labels, but max_labels is {max_labels}")
    return np.array(labels + [-1] * (max_labels - len(labels)), np.int32)


class Description(NamedTuple):
    """The description of the shards in a folder.

    Attributes:
        path: the path of the file beside the shards that states their numbers of records.
        splits: split -> the entries of its shards, in order.
        is_new: whether that file was written now; False: it was there already.
    """

    path: str
    splits: Mapping[str, tuple[shards.ShardEntry, ...]]
    is_new: bool


def count_splits(
    splits: Mapping[str, Sequence[FileT]], count: Callable[[FileT], shards.ShardEntry], threads: int
) -> dict[str, tuple[shards.ShardEntry, ...]]:
    """Returns split -> the entries of its shards, in order; `threads` shards are counted at once."""
    with ThreadPoolExecutor(threads) as pool:
        counted = pool.map(count, itertools.chain(*splits.values()))  # after an error, no further shard is begun
        return {split: tuple(itertools.islice(counted, len(files))) for split, files in splits.items()}


def check_example(
    read: Callable[[str], tuple[bytes, list[int] | None]], name: str, num_classes: int, max_labels: int | None
) -> None:
    """Checks that a record has a readable image and labels below `num_classes`, at most `max_labels` of them.

    Args:
        read: returns the encoded image and the labels of the record `name`; raises ValueError if it is damaged.
        name: the record in words, for the message.
        num_classes: the number of classes.
        max_labels: the most labels of an image; None: an image has one label.

    Raises:
        UserError: it has not.
    """
    with user_errors(f"cannot read {name}", ValueError):
        image, labels = read(name)
    check_labels(labels or [], name, num_classes, max_labels)
    EncodedImage(image, name).decode()
