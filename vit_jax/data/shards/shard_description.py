"""Description of shards that another program wrote: their records are counted once and stated in a file beside them."""

import glob
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from vit_jax import UserError, user_errors
from vit_jax.data.images import EncodedImage
from vit_jax.data.shards import files, tf_example
from vit_jax.data.shards.shard_end import read_shard_end
from vit_jax.data.shards.shard_manifest import MANIFEST_NAME, Manifest, ShardEntry, write_manifest
from vit_jax.data.sources import check_labels
from vit_jax.storage import filesystem


class Description(NamedTuple):
    """The description of the shards in a folder.

    Attributes:
        path: the path of the info.json (of a WebDataset: `_info.json`) beside the shards.
        splits: split -> the entries of its shards, in order.
        is_new: whether that file was written now; False: it was there already.
    """

    path: str
    splits: Mapping[str, tuple[ShardEntry, ...]]
    is_new: bool


def describe_shards(
    folder: str, num_classes: int, max_labels: int | None, advance: Callable[[int], None] = lambda count: None
) -> Description:
    """Counts the records of all shards in a folder and writes info.json beside them, unless it is there already.

    Of a remote shard only the end is read. The last record of each shard is checked, and its image is decoded. An
    info.json that is there already must state the same shards, `num_classes` and `max_labels`.

    Args:
        folder: the folder of the shards, local or remote.
        num_classes: the labels are 0 to num_classes - 1.
        max_labels: the most labels of an image in multi-label data, or None.
        advance: called with 1 for each shard that was counted.

    Raises:
        UserError: there are no shards, one is missing or damaged, a label is out of range, or the info.json states
            something else or cannot be written.
    """
    shard_set = files.find_shards(folder)
    if shard_set.pattern != filesystem.join_path(glob.escape(shard_set.folder), "*.array_record"):
        raise UserError(f"{MANIFEST_NAME} describes all shards of a folder; name the folder instead of {folder}")
    path = filesystem.join_path(shard_set.folder, MANIFEST_NAME)
    sizes = files.list_sizes(shard_set)
    listed = {
        split: [(name, sizes[by_name[name]] or 0) for name in files.names_in_order(split, by_name)]
        for split, by_name in shard_set.paths.items()
    }
    if shard_set.manifest:
        stated = {split: [(entry.name, entry.size) for entry in of] for split, of in shard_set.manifest.splits.items()}
        if (shard_set.manifest.num_classes, shard_set.manifest.max_labels, stated) != (num_classes, max_labels, listed):
            raise UserError(
                f"{path} does not agree with the shards, --num-classes or --max-labels; to count again, remove it and "
                "repeat the command"
            )
        return Description(path, shard_set.manifest.splits, is_new=False)

    def count(path: str, name: str, size: int) -> ShardEntry:
        records, last = read_shard_end(path, size)
        if last is not None:
            check_record(last, f"record {records - 1} of {path}", num_classes, max_labels)
        advance(1)
        return ShardEntry(name, records, size)

    with ThreadPoolExecutor(filesystem.CONCURRENT_REQUESTS) as pool:
        every = [(shard_set.paths[split][name], name, size) for split, of in listed.items() for name, size in of]
        counted = pool.map(count, *zip(*every, strict=True))  # after an error, those that wait are not begun
        splits = {split: tuple(itertools.islice(counted, len(of))) for split, of in listed.items()}
    name = filesystem.absolute_path(shard_set.folder).rstrip("/").rpartition("/")[2]
    manifest = Manifest(name, num_classes, max_labels=max_labels, splits=splits)
    write_manifest(path, manifest)
    return Description(path, splits, is_new=True)


def check_record(record: bytes, name: str, num_classes: int, max_labels: int | None) -> None:
    """Checks that a record has a readable image and labels below `num_classes`, at most `max_labels` of them.

    Args:
        record: the serialised example.
        name: the record in words, for the message.
        num_classes: the number of classes.
        max_labels: the most labels of an image; None: an image has one label.

    Raises:
        UserError: it has not.
    """
    with user_errors(f"cannot read {name}", ValueError):
        image, labels = tf_example.parse_example(record)
    check_labels(labels, name, num_classes, max_labels)
    EncodedImage(image, name).decode()
