"""The labels of all records of a split in one file, `SPLIT-labels.npy` beside the shards and their manifest.

The array is int32 [records] or, in multi-label data, [records, max_labels] with each label once, padded with -1. The
manifest states the number of images of each class, so that this file is read only where positions are needed.
"""

import io

import numpy as np
from jaxtyping import Int32

from vit_jax import UserError
from vit_jax.data.shards.manifest import ShardEntry
from vit_jax.data.shards.readers import Shard, cached_reader
from vit_jax.data.shards.tf_example import parse_example
from vit_jax.storage import atomic_write, filesystem


def label_file(split: str) -> str:
    """Returns the name of the file with the labels of a split."""
    return f"{split}-labels.npy"


def write_label_index(
    folder: str, split: str, entries: tuple[ShardEntry, ...], num_classes: int, max_labels: int | None
) -> tuple[int, ...]:
    """Reads the labels of all records of a split and writes them into its file.

    Args:
        folder: the local folder of the shards.
        split: the name of the split.
        entries: its shards, in order.
        num_classes: the number of classes.
        max_labels: the most labels of an image in multi-label data; None: every image has one.

    Returns:
        The number of images of each class; an image with several labels counts for each.

    Raises:
        UserError: a shard is damaged.
    """
    labels: np.ndarray = np.full((sum(entry.records for entry in entries), max_labels or 1), -1, np.int32)
    number = 0
    for entry in entries:
        reader = cached_reader(Shard(f"{folder}/{entry.name}", entry.records, entry.size))
        for row in range(entry.records):
            own = list(dict.fromkeys(parse_example(reader.read(row))[1] or ()))
            labels[number, : len(own)] = own
            number += 1
    with atomic_write(f"{folder}/{label_file(split)}") as temporary, open(temporary, "wb") as file:
        np.save(file, labels if max_labels else labels[:, 0])
    return tuple(np.bincount(labels[labels >= 0], minlength=num_classes).tolist())


def read_label_index(folder: str, split: str, records: int) -> Int32[np.ndarray, " n *max_labels"]:
    """Returns the labels of a split, local or remote.

    Raises:
        UserError: the file is missing or damaged, or has another number of records.
    """
    path = filesystem.join_path(folder, label_file(split))
    try:
        labels = np.load(io.BytesIO(filesystem.read_bytes(path)), allow_pickle=False)
        whole = labels.dtype == np.int32 and len(labels) == records
    except (ValueError, EOFError):
        whole = False
    if not whole:
        raise UserError(
            f"cannot read {path}: it does not have the labels of {records:,} images; repeat python -m vit_jax.pack "
            "with --index-labels"
        )
    return labels
