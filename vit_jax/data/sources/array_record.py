"""Encoded images in ArrayRecord shards, with one label each or any number of them.

The format, which `python -m vit_jax.pack` and other programs can write:

* Shards are named `SPLIT-00000-of-00016.array_record` and lie in one folder. A split consists of its shards in order.
* A record is a serialised tf.train.Example. Its feature `image` is one JPEG, PNG, WebP, GIF, BMP, TIFF or PPM file
  (bytes). The image must be upright, since its EXIF orientation is not applied. The pixels of a PPM file are used
  without a copy. The feature `label` is an int64 list: one label, or, in multi-label data, any number of labels. For
  regression it is a float list.
* `info.json` beside the shards contains
    version: 1
    name: the name of the data set
    num_classes: the labels are 0 to num_classes - 1
    class_names: the names of the classes in the order of the labels, or null
    max_labels: the most different labels of an image in multi-label data; null: each image has exactly one label
    has_numbers: true for regression: an image has num_classes numbers, whose names are class_names; else absent
    splits: split -> [{"name": file name of a shard, "records": number of its records, "bytes": size of its file}, ...];
      if images were left out, also "left_out": [{"index": in the packed split, "error": why it is unreadable}, ...] or
      "duplicates": [{"index": in the packed split, "split" and "image": the image that it resembles, "distance": in
      bits}, ...];
      if image files were packed, also "files": a text that changes with their sizes or times
    label_counts: split -> [number of images of each class]; `SPLIT-labels.npy` beside it then has the label of each
      record; absent: the labels were not counted; for regression the lists are empty
    made_from: what was packed: "source" as in config.data.source, "fingerprints" of its splits, and the settings

  `python -m vit_jax.describe array_record:FOLDER --num-classes=N` writes `info.json` for shards that lack it. Without
  `info.json`, all shards are counted at each start, and the config states `num_classes` and `max_labels`. Remote shards
  are copied before they are counted, and the cache must hold them all.
* Shards should have many records each, written with `group_size:1`, since records are read one by one.
"""

import glob
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64, Shaped

from vit_jax import UserError, first_names, user_errors
from vit_jax.data import shards
from vit_jax.data.images import EncodedImage
from vit_jax.data.sources.file_pattern import FoundFile
from vit_jax.data.sources.sharded import (
    Description,
    OpenShard,
    ShardedSplits,
    check_example,
    count_splits,
    list_shards,
    read_labelled,
)
from vit_jax.data.sources.source import Source, SourceConfig
from vit_jax.data.sources.splits import Rows, resolve_name, select_examples, split_names, take_rows
from vit_jax.storage import cache, filesystem

FIRST_PIECE, MAX_PIECE = 2**18, 2**23  # bytes of a remote shard that are read at a time, from its end


class ShardSet(NamedTuple):
    """The shards that a pattern matches.

    Attributes:
        manifest: what the info.json beside the shards states, or None if there is none.
        splits: split -> file name of a shard -> the file, without the size of a local one.
        folder: the folder in which the info.json lies, if there is one.
        pattern: the pattern of the paths of the shards, also if a folder was named.
    """

    manifest: shards.Manifest | None
    splits: dict[str, dict[str, FoundFile]]
    folder: str
    pattern: str


def find_shards(pattern: str) -> ShardSet:
    """Lists shards without opening them.

    Args:
        pattern: a folder, or a path of shards with `*`, `?` and `[...]`; local or remote.

    Raises:
        UserError: there are no shards, a name contains no split, two shards have the same name, or the manifest is
            unreadable.
    """
    pattern = pattern if filesystem.is_remote(pattern) else os.path.expanduser(pattern)
    is_folder = os.path.isdir(pattern) or not (re.search(r"[*?[]", pattern) or pattern.endswith(".array_record"))
    folder = pattern if is_folder else os.path.dirname(pattern)
    manifest = shards.read_manifest(os.path.join(folder, shards.MANIFEST_NAME))
    splits: dict[str, dict[str, FoundFile]] = {split: {} for split in manifest.splits} if is_folder and manifest else {}
    pattern = os.path.join(glob.escape(folder), "*.array_record") if is_folder else pattern
    for path, version in filesystem.expand_pattern(pattern).items():
        name = path.rpartition("/")[2]
        match = shards.SHARD_NAME.fullmatch(name)
        if not match:
            raise UserError(f"cannot read {path}: the name of a shard must be like {shards.file_name('train', 0, 16)}")
        files = splits.setdefault(match["split"], {})
        if name in files:
            raise UserError(f"two shards have the same name: {files[name].path} and {path}")
        files[name] = FoundFile(path, name, version and version.size, version)
    if not any(splits.values()):
        if is_folder and not filesystem.is_remote(folder) and not os.path.isdir(folder):
            raise UserError(
                f"{folder} does not exist; make it with python -m vit_jax.pack, or name another folder: "
                "--config.data.source=array_record:FOLDER; to run without data, use --config.data.source=synthetic"
            )
        raise UserError(
            f"there are no files {pattern}; shards have names like {shards.file_name('train', 0, 16)}; "
            "set --config.data.source=array_record:FOLDER to their folder"
        )
    return ShardSet(manifest, splits, folder, pattern)


def shards_of_split(shard_set: ShardSet, split: str) -> tuple[shards.Shard, ...]:
    """Returns the shards of a split in order.

    With a manifest, no shard is opened; the sizes of local shards are compared with those that it states. Without a
    manifest, all shards are opened to count their records, and remote shards are copied into the cache first.

    Raises:
        UserError: a shard is missing, truncated or unexpected, or the shards to copy do not fit into the cache.
    """
    files, manifest = shard_set.splits[split], shard_set.manifest
    if manifest and split not in manifest.splits:
        unlisted = f"{shards.MANIFEST_NAME} does not list the split {split} of {next(iter(files.values())).path}"
        raise UserError(f"{unlisted}; move the shards of this split to another folder")
    if not manifest:
        in_order = [files[name] for name in names_in_order(split, files)]
        return list_shards(
            split, in_order, {}, shards.MANIFEST_NAME, f"array_record:{shard_set.folder}", "array_record"
        )
    entries = manifest.splits[split]
    check_names(split, files, [entry.name for entry in entries])
    listed = tuple(
        shards.Shard(files[entry.name].path, entry.records, entry.size, files[entry.name].version) for entry in entries
    )
    for shard in listed:
        if not filesystem.is_remote(shard.path):
            shards.check_file_size(shard.path, shard.size)
    return listed


def names_in_order(split: str, names: Collection[str]) -> list[str]:
    """Returns the names of the shards of a split in order; each name states how many shards there are.

    Raises:
        UserError: a shard is missing.
    """
    totals = sorted({int(match["total"]) for match in map(shards.SHARD_NAME.fullmatch, names) if match})
    expected = [shards.file_name(split, number, total) for total in totals for number in range(total)]
    check_names(split, names, expected)
    return expected


def check_names(split: str, names: Collection[str], expected: Collection[str]) -> None:
    """Raises UserError if the shards of a split do not have the expected names."""
    missing, unexpected = set(expected) - set(names), set(names) - set(expected)
    for wrong, what, advice in (
        (missing, "missing", "copy or pack them again"),
        (unexpected, "unexpected", "move them to another folder"),
    ):
        if wrong:
            first = first_names(sorted(wrong))
            raise UserError(f"split {split} must have {len(expected)} shards; {len(wrong)} {what}: {first}; {advice}")


def read_packed(reader: shards.ShardReader, row: int, name: str, reads_labels: bool) -> tuple[bytes, list[int] | None]:
    """Returns the image and the labels, or None, of a record; raises ValueError if it is damaged."""
    return shards.parse_example(reader.read(row), reads_labels)


def read_numbered(
    splits: ShardedSplits, count: int, split: str, index: int, open_shard: OpenShard = shards.cached_reader
) -> tuple[EncodedImage, Float32[np.ndarray, " targets"]]:
    """Returns (image, its `count` numbers) number `index` of a split; raises as `read_labelled`."""

    def read_record(reader: shards.ShardReader, row: int, name: str) -> tuple[bytes, list[float]]:
        return shards.parse_numbers(reader.read(row))

    (image, numbers), name = splits.read(split, index, open_shard, read_record)
    if len(numbers) != count:
        raise UserError(f"{name} has {len(numbers)} numbers, but {count} are expected")
    return EncodedImage(image, name), np.array(numbers, np.float32)


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
    shard_set = find_shards(name)
    existing = {one: resolve_name(one, shard_set.splits, f"split of the records {name}") for one in split_names(split)}
    manifest = shard_set.manifest
    if manifest is None:
        if source_config.num_classes is None:
            raise UserError(
                f"the number of classes of {name} is not known, since there is no {shards.MANIFEST_NAME} beside the "
                "shards; set --config.data.num_classes (and, if an image may have several labels, "
                "--config.data.max_labels)"
            )
        manifest = shards.Manifest("", source_config.num_classes, max_labels=source_config.max_labels)
    splits = ShardedSplits({one: shards_of_split(shard_set, whole) for one, whole in existing.items()})
    counts = {one: [shard.records for shard in listed] for one, listed in splits.shards.items()}
    identity = [packed_identity(shard_set), None if shard_set.manifest else counts, manifest.max_labels]
    parts = tuple(select_examples(split, splits.counts))
    index = LabelIndex(shard_set.folder, existing, splits.counts, manifest)
    read_record = partial(read_packed, reads_labels=source_config.reads_labels)
    read_example = partial(read_labelled, splits, read_record, manifest.num_classes, manifest.max_labels)
    if manifest.has_numbers:
        read_example = partial(read_numbered, splits, manifest.num_classes)
    return Source(
        name=f"array_record:{manifest.name}",
        parts=parts,
        sizes=splits.counts,
        read_example=read_example,
        num_classes=manifest.num_classes,
        class_names=manifest.class_names or None,
        digest=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        max_labels=manifest.max_labels,
        has_numbers=manifest.has_numbers,
        file_stamp=splits.file_stamp,
        split_labels=index.split_labels if index.is_complete else None,
        split_counts=index.split_counts if index.is_complete else None,
        shards=splits.select(parts, shards.SHUFFLE in manifest.made_from),
    )


class LabelIndex:
    """The labels of the records of some splits, where `pack --index-labels` has written them beside the shards.

    Attributes:
        is_complete: whether they are known for all the splits.
    """

    def __init__(self, folder: str, wholes: Mapping[str, str], records: Mapping[str, int], manifest: shards.Manifest):
        """Takes the folder of the shards, the name of each split there, and the number of its records."""
        self._folder, self._wholes, self._records = folder, dict(wholes), dict(records)
        self._num_classes, self._counts = manifest.num_classes, manifest.label_counts
        self._has_numbers = manifest.has_numbers
        self._labels = dict[str, Shaped[np.ndarray, " n *labels"]]()
        self.is_complete = all(whole in manifest.label_counts for whole in wholes.values())

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a worker process needs; it reads no labels here."""
        return vars(self) | {"_labels": {}}

    def split_labels(self, split: str) -> Shaped[np.ndarray, " n *labels"]:
        """Returns the labels of all records of a split; raises UserError if their file is not as it was written."""
        if split not in self._labels:
            place = self._folder, self._wholes[split], self._records[split]
            self._labels[split] = shards.read_label_index(*place, self._has_numbers)
        return self._labels[split]

    def split_counts(self, split: str, rows: Rows) -> Int64[np.ndarray, " classes"]:
        """Returns the number of images of each class in some rows of a split; the labels are read unless it is all."""
        if rows == range(self._records[split]):
            return np.array(self._counts[self._wholes[split]], np.int64)
        labels = take_rows(self.split_labels(split), rows)
        return np.bincount(labels[labels >= 0], minlength=self._num_classes)


def list_record_splits(source_config: SourceConfig, name: str) -> list[str]:
    """Returns the names of the splits whose shards a pattern matches."""
    return list(find_shards(name).splits)


def packed_identity(shard_set: ShardSet) -> dict | None:
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


def describe_records(
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
    shard_set = find_shards(folder)
    manifest_path = filesystem.join_path(shard_set.folder, shards.MANIFEST_NAME)
    if shard_set.pattern != filesystem.join_path(glob.escape(shard_set.folder), "*.array_record"):
        raise UserError(f"{shards.MANIFEST_NAME} describes all shards of a folder; name the folder instead of {folder}")
    listed = {
        split: [
            file if file.version else file._replace(size=os.path.getsize(file.path))
            for file in (files[name] for name in names_in_order(split, files))
        ]
        for split, files in shard_set.splits.items()
    }
    if manifest := shard_set.manifest:
        stated = {split: [(entry.name, entry.size) for entry in of] for split, of in manifest.splits.items()}
        found = {split: [(file.name, file.size or 0) for file in of] for split, of in listed.items()}
        if (manifest.num_classes, manifest.max_labels, stated) != (num_classes, max_labels, found):
            raise UserError(
                f"{manifest_path} does not agree with the shards, --num-classes or --max-labels; to count again, "
                "remove it and repeat the command"
            )
        return Description(manifest_path, manifest.splits, is_new=False)

    def count(file: FoundFile) -> shards.ShardEntry:
        records, last = read_shard_end(file.path, file.size or 0)
        if last is not None:
            record = f"record {records - 1} of {file.path}"
            check_example(lambda _: shards.parse_example(last), record, num_classes, max_labels)
        advance(1)
        return shards.ShardEntry(file.name, records, file.size or 0)

    splits = count_splits(listed, count, filesystem.CONCURRENT_REQUESTS)
    name = filesystem.absolute_path(shard_set.folder).rstrip("/").rpartition("/")[2]
    shards.write_manifest(manifest_path, shards.Manifest(name, num_classes, max_labels=max_labels, splits=splits))
    return Description(manifest_path, splits, is_new=True)


def read_shard_end(path: str, size: int) -> tuple[int, bytes | None]:
    """Returns the number of records of a shard of `size` bytes, and its last record, or None if it has no records.

    Of a remote shard only the end is copied, as many bytes as this takes. ArrayRecord's reader is given a local file of
    `size` bytes, with a hole in place of what was not copied. The reader begins at the end of the file. Where it meets
    the hole, a checksum is wrong, and more bytes are copied.

    ArrayRecord (0.8.6) can open `gs://` itself. It requests the last 1 MiB of a shard, then sends an open-ended request
    for each record. For records of 110 KB, 1.5 to 2.6 MB came each time; 16 threads read 18 records a second at a
    latency of 30 ms. So records are read from whole copies of shards, and are counted in a way that works with every
    store.

    Raises:
        UserError: the shard or its last record is damaged, the store does not give it, or the disk is full.
    """

    def read_end(local: str) -> tuple[int, bytes | None]:
        reader = shards.open_reader(path, local)
        records = reader.num_records()
        with user_errors(f"cannot read record {records - 1} of {path}", ValueError, advice="copy or pack it again"):
            return records, reader.read(records - 1) if records else None

    if not filesystem.is_remote(path):
        return read_end(path)
    with cache.write_errors(), tempfile.NamedTemporaryFile(dir=cache.root()) as local:
        local.truncate(size)
        start, piece = size, FIRST_PIECE
        while True:
            end, start = start, max(start - piece, 0)
            local.seek(start)
            local.write(filesystem.read_range(path, start, end) if size else b"")
            local.flush()
            try:
                return read_end(local.name)
            except UserError:
                if not start:
                    raise
            piece = min(2 * piece, MAX_PIECE)
