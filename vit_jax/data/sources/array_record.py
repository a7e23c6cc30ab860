"""EncodedImage images in ArrayRecord shards: one label each, or any number of them.

The format, which `python -m vit_jax.pack` writes and other programs may:

* Shards are named `SPLIT-00000-of-00016.array_record` and lie in one folder. A split is its shards in order.
* A record is a serialised tf.train.Example. Its feature `image` is one JPEG, PNG, WebP, GIF, BMP, TIFF or PPM file
  (bytes; upright: EXIF orientation is not applied), its feature `label` an int64 list: one label, or in multi-label
  data any number.
* `info.json` beside the shards holds
    version: 1
    name: of the data set
    num_classes: the labels are 0 to num_classes - 1
    class_names: in the order of the labels, or null
    max_labels: the most different labels that an image has in multi-label data; null: each image has exactly one
    splits: split -> [{"name": of the shard's file, "records": its number, "bytes": size of the file}, ...]; where
      images were left out, also "left_out": [{"index": in the split packed, "error": what is wrong}, ...],
      where image files were packed, also "files": what differs when their sizes or times do
    made_from: what was packed: "source" as in config.data.source, "fingerprints" of its splits, and the settings

  Without it, the shards are opened at once and counted, and the config states `num_classes` and `max_labels`.
* A reader wants shards of many records each, written with `group_size:1`: records are read one by one.
"""

import bisect
import hashlib
import itertools
import json
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int32

from vit_jax import UserError
from vit_jax.data import shards
from vit_jax.data.images import DecodeError, EncodedImage
from vit_jax.data.sources.splits import resolve


class ArrayRecords:
    """Labelled images in the shards of some splits.

    It pickles without its open files, and threads may share it.

    Attributes:
        name: of the data set, if there is an info.json.
        counts: number of records of each split read.
        num_classes: as info.json or the config says.
        class_names: or None.
        max_labels: of an image in multi-label data, or None.
        digest: of what was packed and how, but neither of how many shards nor of where they lie.
    """

    def __init__(self, pattern: str, splits: list[str], num_classes: int | None, max_labels: int | None):
        """Lists the shards.

        Args:
            pattern: a folder, or a path of shards with `*`, `?` and `[...]`.
            splits: those to read.
            num_classes: used where there is no info.json.
            max_labels: likewise.

        Raises:
            UserError: a split or a shard is missing, damaged or of the wrong size, or `num_classes` is not known.
        """
        found = shards.find(pattern)
        there = {split: resolve(split, found.files, f"split of the records {pattern}") for split in splits}
        if not found.info and num_classes is None:
            raise UserError(
                f"the number of classes of {pattern} is not known, since no {shards.INFO} lies beside the shards: "
                "set --config.data.num_classes (and, if an image may have several labels, --config.data.max_labels)"
            )
        info = found.info or {"name": "", "num_classes": num_classes, "class_names": None, "max_labels": max_labels}
        self.name, self.num_classes, self.max_labels = info["name"], info["num_classes"], info["max_labels"]
        self.class_names = tuple(info["class_names"]) if info["class_names"] else None
        self.shards = {split: shards.of_split(found, name) for split, name in there.items()}
        counts = {split: [shard.records for shard in listed] for split, listed in self.shards.items()}
        self.starts = {split: [0, *itertools.accumulate(numbers[:-1])] for split, numbers in counts.items()}
        self.counts = {split: sum(numbers) for split, numbers in counts.items()}
        identity = json.dumps([content(found), counts if not found.info else None, self.max_labels], sort_keys=True)
        self.digest = hashlib.sha256(identity.encode()).hexdigest()

    def read(self, split: str, index: int) -> tuple[EncodedImage, int | Int32[np.ndarray, " max_labels"]]:
        """Returns (image, label) number `index` of a split.

        In multi-label data the label is an array [max_labels]: each label once, then -1.

        Raises:
            DecodeError: the record is damaged.
            UserError: the shard is, or its labels are none of the classes.
        """
        number = self.shard_number(split, index)
        shard, row = self.shards[split][number], index - self.starts[split][number]
        name = f"record {row} of {shard.path}"
        try:
            image, labels = shards.read(shard, row)
        except ValueError as error:
            raise DecodeError(f"cannot read {name}: {error}") from error
        return EncodedImage(image, name), self.check(labels, name)

    def shard_number(self, split: str, index: int) -> int:
        """Returns which of a split's shards example `index` lies in."""
        return bisect.bisect_right(self.starts[split], index) - 1

    def require_room(self, parts: Iterable[tuple[str, range]]) -> None:
        """Raises UserError if the remote shards in which some rows of splits lie do not fit into the cache."""
        ends = [(name, self.shard_number(name, rows[0]), self.shard_number(name, rows[-1])) for name, rows in parts]
        shards.require_room(shard for name, first, last in ends for shard in self.shards[name][first : last + 1])

    def check(self, labels: list[int], name: str) -> int | Int32[np.ndarray, " max_labels"]:
        """Returns the labels of a record as `read` does, or raises UserError."""
        if wrong := [label for label in labels if not 0 <= label < self.num_classes]:
            raise UserError(f"{name} has the label {wrong[0]}, but there are {self.num_classes} classes")
        if self.max_labels is None:
            if len(labels) != 1:
                raise UserError(
                    f"{name} has {len(labels)} labels, but one is expected; multi-label data needs max_labels in "
                    f"{shards.INFO} or --config.data.max_labels"
                )
            return labels[0]
        labels = list(dict.fromkeys(labels))
        if len(labels) > self.max_labels:
            raise UserError(f"{name} has {len(labels)} labels, but max_labels is {self.max_labels}")
        return np.array(labels + [-1] * (self.max_labels - len(labels)), np.int32)


def list_record_splits(pattern: str) -> list[str]:
    """Returns the names of the splits whose shards a pattern names."""
    return list(shards.find(pattern).files)


def content(found: shards.Found) -> dict | None:
    """Returns what info.json says of the images and labels, or None without one."""
    if not found.info:
        return None
    made_from = {key: value for key, value in found.info["made_from"].items() if key != "source"}
    splits = {
        split: [
            sum(shard["records"] for shard in listed),
            [image["index"] for shard in listed for image in shard.get("left_out", [])],
        ]
        for split, listed in found.info["splits"].items()
    }
    return {"made_from": made_from, "splits": splits, "class_names": found.info["class_names"]}
