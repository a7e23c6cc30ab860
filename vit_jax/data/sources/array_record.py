"""Encoded images in ArrayRecord shards, with one label each or any number of them.

The format, which `python -m vit_jax.pack` and other programs can write:

* Shards are named `SPLIT-00000-of-00016.array_record` and lie in one folder. A split consists of its shards in order.
* A record is a serialised tf.train.Example. Its feature `image` is one JPEG, PNG, WebP, GIF, BMP, TIFF or PPM file
  (bytes). The image must be upright, since its EXIF orientation is not applied. The pixels of a PPM file are used
  without a copy. The feature `label` is an int64 list: one label, or, in multi-label data, any number of labels.
* `info.json` beside the shards contains
    version: 1
    name: the name of the data set
    num_classes: the labels are 0 to num_classes - 1
    class_names: the names of the classes in the order of the labels, or null
    max_labels: the most different labels of an image in multi-label data; null: each image has exactly one label
    splits: split -> [{"name": file name of a shard, "records": number of its records, "bytes": size of its file}, ...];
      if images were left out, also "left_out": [{"index": in the packed split, "error": why it is unreadable}, ...] or
      "duplicates": [{"index": in the packed split, "split" and "image": the image that it resembles, "distance": in
      bits}, ...];
      if image files were packed, also "files": a text that changes with their sizes or times
    made_from: what was packed: "source" as in config.data.source, "fingerprints" of its splits, and the settings

  `python -m vit_jax.describe array_record:FOLDER --num-classes=N` writes `info.json` for shards that lack it. Without
  `info.json`, all shards are counted at each start, and the config states `num_classes` and `max_labels`. Remote shards
  are copied before they are counted, and the cache must hold them all.
* Shards should have many records each, written with `group_size:1`, since records are read one by one.
"""

import hashlib
import json
from functools import partial

from vit_jax import UserError
from vit_jax.data import shards
from vit_jax.data.sources.sharded import ShardedSplits, read_labelled
from vit_jax.data.sources.source import Source, SourceConfig
from vit_jax.data.sources.splits import resolve_name, select_examples, split_names


def read_packed(reader: shards.ShardReader, row: int, name: str, reads_labels: bool) -> tuple[bytes, list[int] | None]:
    """Returns the image and the labels, or None, of a record; raises ValueError if it is damaged."""
    return shards.read_record(reader, row) if reads_labels else (shards.read_image(reader, row), None)


def open_records(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens ArrayRecord shards. The EXIF orientation is not applied, as in published results.

    The digest of the source identifies what was packed and how. With an info.json, it depends neither on the number of
    shards nor on their folder. Without one, it is computed from the numbers of records of the shards.

    Args:
        source_config: its `num_classes` and `max_labels` are used if there is no info.json.
        name: a folder, or a path of shards with `*`, `?` and `[...]`.
        split: the split as written, such as `train[:98%]+test`.

    Raises:
        UserError: a split or a shard is missing, damaged or of the wrong size, or the number of classes is not known.
    """
    shard_set = shards.find_shards(name)
    existing = {one: resolve_name(one, shard_set.paths, f"split of the records {name}") for one in split_names(split)}
    manifest = shard_set.manifest
    if manifest is None:
        if source_config.num_classes is None:
            raise UserError(
                f"the number of classes of {name} is not known, since there is no {shards.MANIFEST_NAME} beside the "
                "shards; set --config.data.num_classes (and, if an image may have several labels, "
                "--config.data.max_labels)"
            )
        manifest = shards.Manifest("", source_config.num_classes, max_labels=source_config.max_labels)
    splits = ShardedSplits({one: shards.shards_of_split(shard_set, whole) for one, whole in existing.items()})
    counts = {one: [shard.records for shard in listed] for one, listed in splits.shards.items()}
    identity = [packed_identity(shard_set), None if shard_set.manifest else counts, manifest.max_labels]
    parts = tuple(select_examples(split, splits.counts))
    read_record = partial(read_packed, reads_labels=source_config.reads_labels)
    return Source(
        name=f"array_record:{manifest.name}",
        parts=parts,
        read_example=partial(read_labelled, splits, read_record, manifest.num_classes, manifest.max_labels),
        num_classes=manifest.num_classes,
        class_names=manifest.class_names or None,
        digest=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        max_labels=manifest.max_labels,
        file_stamp=splits.file_stamp,
        shards=splits.select(parts, shards.SHUFFLE in manifest.made_from),
    )


def list_record_splits(source_config: SourceConfig, name: str) -> list[str]:
    """Returns the names of the splits whose shards a pattern matches."""
    return list(shards.find_shards(name).paths)


def packed_identity(shard_set: shards.ShardSet) -> dict | None:
    """Returns, as JSON values, what info.json states about the images and labels; None if there is no info.json."""
    if not (manifest := shard_set.manifest):
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
