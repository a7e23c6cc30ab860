"""The description of shards that another program wrote: their records, counted once and stated beside them."""

import glob
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from vit_jax import UserError, user_errors
from vit_jax.data.images import EncodedImage
from vit_jax.data.shards import files, tf_example
from vit_jax.data.shards.manifest import MANIFEST_NAME, Manifest, ShardEntry, write_manifest
from vit_jax.data.shards.shard_end import read_shard_end
from vit_jax.data.sources import check_labels
from vit_jax.storage import filesystem


class Description(NamedTuple):
    """What describes the shards in a folder.

    Attributes:
        path: of their info.json.
        splits: split -> its shards in order, as it states them.
        is_new: whether it was written now.
    """

    path: str
    splits: Mapping[str, tuple[ShardEntry, ...]]
    is_new: bool


def describe_shards(
    folder: str, num_classes: int, max_labels: int | None, advance: Callable[[int], None] = lambda count: None
) -> Description:
    """Counts the records of all shards in a folder and writes info.json beside them, unless it is there already.

    Of a remote shard only the end is read. The last record of each shard and an image of each split are checked.

    Args:
        folder: local or remote.
        num_classes: the labels are 0 to num_classes - 1.
        max_labels: the most labels of an image in multi-label data, or None.
        advance: called with 1 for each shard that was counted.

    Raises:
        UserError: there are no shards, one is missing or damaged, a label is out of range, or the info.json there
            states something else or cannot be written.
    """
    found = files.find_shards(folder)
    if found.pattern != filesystem.join_path(glob.escape(found.folder), "*.array_record"):
        raise UserError(f"{MANIFEST_NAME} describes all shards of a folder; name the folder instead of {folder}")
    path = filesystem.join_path(found.folder, MANIFEST_NAME)
    sizes = files.list_sizes(found)
    listed = {
        split: [(name, sizes[by_name[name]] or 0) for name in files.names_in_order(split, by_name)]
        for split, by_name in found.paths.items()
    }
    if found.manifest:
        stated = {split: [(entry.name, entry.size) for entry in of] for split, of in found.manifest.splits.items()}
        if (found.manifest.num_classes, found.manifest.max_labels, stated) != (num_classes, max_labels, listed):
            raise UserError(
                f"{path} states other shards, num_classes or max_labels; remove it, and the same command counts again"
            )
        return Description(path, found.manifest.splits, is_new=False)

    def count(path: str, name: str, size: int) -> ShardEntry:
        records, last = read_shard_end(path, size)
        if last is not None:
            check_record(last, f"record {records - 1} of {path}", num_classes, max_labels)
        advance(1)
        return ShardEntry(name, records, size)

    with ThreadPoolExecutor(filesystem.CONCURRENT_REQUESTS) as pool:
        every = [(found.paths[split][name], name, size) for split, of in listed.items() for name, size in of]
        counted = pool.map(count, *zip(*every, strict=True))  # after an error, those that wait are not begun
        splits = {split: tuple(itertools.islice(counted, len(of))) for split, of in listed.items()}
    name = filesystem.absolute_path(found.folder).rstrip("/").rpartition("/")[2]
    manifest = Manifest(name, num_classes, max_labels=max_labels, splits=splits)
    write_manifest(path, manifest)
    return Description(path, splits, is_new=True)


def check_record(record: bytes, name: str, num_classes: int, max_labels: int | None) -> None:
    """Raises UserError if a record of this name is not an image with labels of these classes."""
    with user_errors(f"cannot read {name}", ValueError):
        image, labels = tf_example.parse_example(record)
    check_labels(labels, name, num_classes, max_labels)
    EncodedImage(image, name).decode()
