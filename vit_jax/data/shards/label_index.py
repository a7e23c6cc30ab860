"""The labels of all records of a split in one file, `SPLIT-labels.npy` beside the shards and their manifest.

The array is int32 [records] or, in multi-label data, [records, max_labels] with each label once, padded with -1; the
numbers of regression are float32 [records, targets]. The manifest states the number of images of each class, so that
this file is read only where positions are needed.
"""

import io

import numpy as np
from jaxtyping import Shaped

from vit_jax import UserError
from vit_jax.data.shards.manifest import ShardEntry
from vit_jax.data.shards.readers import Shard, cached_reader
from vit_jax.data.shards.tf_example import parse_example, parse_numbers
from vit_jax.storage import atomic_write, filesystem


def label_file(split: str) -> str:
    """Returns the name of the file with the labels of a split."""
    return f"{split}-labels.npy"


def write_label_index(
    folder: str,
    split: str,
    entries: tuple[ShardEntry, ...],
    num_classes: int,
    max_labels: int | None,
    has_numbers: bool = False,
) -> tuple[int, ...]:
    """Reads the labels of all records of a split and writes them into its file.

    Args:
        folder: the local folder of the shards.
        split: the name of the split.
        entries: its shards, in order.
        num_classes: the number of classes.
        max_labels: the most labels of an image in multi-label data; None: every image has one.
        has_numbers: whether an image has `num_classes` numbers instead.

    Returns:
        The number of images of each class; an image with several labels counts for each. Empty for numbers.

    Raises:
        UserError: a shard is damaged.
    """
    width, dtype = (num_classes, np.float32) if has_numbers else (max_labels or 1, np.int32)
    labels: np.ndarray = np.full((sum(entry.records for entry in entries), width), -1, dtype)
    number = 0
    for entry in entries:
        reader = cached_reader(Shard(f"{folder}/{entry.name}", entry.records, entry.size))
        for row in range(entry.records):
            record = reader.read(row)
            own = parse_numbers(record)[1] if has_numbers else list(dict.fromkeys(parse_example(record)[1] or ()))
            labels[number, : len(own)] = own
            number += 1
    with atomic_write(f"{folder}/{label_file(split)}") as temporary, open(temporary, "wb") as file:
        np.save(file, labels if max_labels or has_numbers else labels[:, 0])
    if has_numbers:
        return ()
    return tuple(np.bincount(labels[labels >= 0], minlength=num_classes).tolist())


def read_label_index(
    folder: str, split: str, records: int, has_numbers: bool = False
) -> Shaped[np.ndarray, " n *labels"]:
    """Returns the labels of a split, local or remote.

    Raises:
        UserError: the file is missing or damaged, or has another number of records.
    """
    path = filesystem.join_path(folder, label_file(split))
    try:
        labels = np.load(io.BytesIO(filesystem.read_bytes(path)), allow_pickle=False)
        whole = labels.dtype == (np.float32 if has_numbers else np.int32) and len(labels) == records
    except (ValueError, EOFError):
        whole = False
    if not whole:
        raise UserError(
            f"cannot read {path}: it does not have the labels of {records:,} images; repeat python -m vit_jax.pack "
            "with --index-labels"
        )
    return labels
