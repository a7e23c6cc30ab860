"""Encoded images in ArrayRecord shards, with one label each or any number of them.

The format, which `python -m vit_jax.pack` and other programs can write:

* Shards are named `SPLIT-00000-of-00016.array_record` and lie in one folder. A split consists of its shards in order.
* A record is a serialised tf.train.Example. Its feature `image` is one JPEG, PNG, WebP, GIF, BMP, TIFF or PPM file
  (bytes; upright, since the EXIF orientation is not applied; the pixels of a PPM file are used where they lie). Its
  feature `label` is an int64 list: one label, or, in multi-label data, any number.
* `info.json` beside the shards contains
    version: 1
    name: of the data set
    num_classes: the labels are 0 to num_classes - 1
    class_names: in the order of the labels, or null
    max_labels: the most different labels of an image in multi-label data; null: each image has exactly one
    splits: split -> [{"name": of the shard's file, "records": their number, "bytes": size of the file}, ...]; if
      images were left out, also "left_out": [{"index": in the packed split, "error": why it is unreadable}, ...] or
      "duplicates": [{"index": likewise, "split": and "image": what it is like, "distance": in bits}, ...];
      if image files were packed, also "files": a text that changes with their sizes or times
    made_from: what was packed: "source" as in config.data.source, "fingerprints" of its splits, and the settings

  `python -m vit_jax.describe array_record:FOLDER --num-classes=N` writes `info.json` for shards that lack it. Without
  `info.json`, all shards are counted at each start, and the config states `num_classes` and `max_labels`. Remote shards
  are copied before they are counted, and the cache must hold them all.
* Shards should have many records each, written with `group_size:1`, since records are read one by one.
"""

import hashlib
import json

from vit_jax import UserError
from vit_jax.data import shards
from vit_jax.data.sources.sharded import ShardedExamples, ShardedSplits
from vit_jax.data.sources.source import Source, SourceConfig
from vit_jax.data.sources.splits import resolve_name, select_examples, split_names


class ArrayRecords:
    """What is known of the records of some splits.

    Attributes:
        name: of the data set, empty without an info.json.
        splits: the shards of each split read.
        num_classes: as info.json or the config states.
        class_names: or None.
        max_labels: the most labels of an image in multi-label data, or None.
        shuffled: whether info.json states that the images were packed in a random order.
        digest: identifies what was packed and how. With an info.json it depends neither on the number of shards nor on
            their folder; without one, it is that of the numbers of records of the shards.
    """

    def __init__(self, pattern: str, splits: list[str], num_classes: int | None, max_labels: int | None):
        """Lists the shards.

        Args:
            pattern: a folder, or a path of shards with `*`, `?` and `[...]`.
            splits: those to read.
            num_classes: used if there is no info.json.
            max_labels: used if there is no info.json.

        Raises:
            UserError: a split or a shard is missing, damaged or of the wrong size, or `num_classes` is not known.
        """
        found = shards.find_shards(pattern)
        existing = {split: resolve_name(split, found.paths, f"split of the records {pattern}") for split in splits}
        manifest = found.manifest
        if manifest:
            self.name, self.num_classes, self.max_labels = manifest.name, manifest.num_classes, manifest.max_labels
            self.class_names = manifest.class_names or None
        elif num_classes is not None:
            self.name, self.num_classes, self.max_labels, self.class_names = "", num_classes, max_labels, None
        else:
            raise UserError(
                f"the number of classes of {pattern} is not known, since there is no {shards.MANIFEST_NAME} beside the "
                "shards; set --config.data.num_classes (and, if an image may have several labels, "
                "--config.data.max_labels)"
            )
        self.shuffled = manifest is not None and shards.SHUFFLE in manifest.made_from
        self.splits = ShardedSplits({split: shards.shards_of_split(found, name) for split, name in existing.items()})
        counts = {split: [shard.records for shard in listed] for split, listed in self.splits.shards.items()}
        identity = json.dumps([packed_identity(found), None if manifest else counts, self.max_labels], sort_keys=True)
        self.digest = hashlib.sha256(identity.encode()).hexdigest()


def read_packed(reader: shards.ShardReader, row: int, name: str) -> tuple[bytes, list[int]]:
    """Returns the image and the labels of a record; raises ValueError if it is damaged."""
    return shards.read_record(reader, row)


def open_records(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens ArrayRecord shards; see `ArrayRecords`. The EXIF orientation is not applied, as in published results."""
    records = ArrayRecords(name, split_names(split), source_config.num_classes, source_config.max_labels)
    parts = tuple(select_examples(split, records.splits.counts))
    examples = ShardedExamples(records.splits, read_packed, records.num_classes, records.max_labels, records.shuffled)
    return Source(
        name=f"array_record:{records.name}",
        parts=parts,
        read_example=examples.read_example,
        num_classes=records.num_classes,
        class_names=records.class_names,
        digest=records.digest,
        max_labels=records.max_labels,
        file_stamp=examples.file_stamp,
        shards=examples.source_shards(parts),
    )


def list_record_splits(source_config: SourceConfig, name: str) -> list[str]:
    """Returns the names of the splits whose shards a pattern matches."""
    return list(shards.find_shards(name).paths)


def packed_identity(found: shards.ShardSet) -> dict | None:
    """Returns what info.json states about the images and labels, in JSON values, or None without one."""
    if not (manifest := found.manifest):
        return None
    made_from = {key: value for key, value in manifest.made_from.items() if key != "source"}
    if without := made_from.get("without"):
        made_from["without"] = without | {"splits": sorted(without["splits"].values())}  # however they were written
    splits = {
        split: [
            sum(entry.records for entry in entries),
            [image.index for entry in entries for image in entry.left_out]
            + [image.index for entry in entries for image in entry.duplicates],
        ]
        for split, entries in manifest.splits.items()
    }
    return {"made_from": made_from, "splits": splits, "class_names": manifest.class_names}
