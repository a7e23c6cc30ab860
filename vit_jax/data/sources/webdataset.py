"""WebDataset: images and labels in tar files, `KEY.jpg` with `KEY.cls` or `KEY.json`.

The image of a sample is its first member with the extension of an image. The label is the number in its member `cls`
or, without such a member, the field `label` of its member `json`: a number or, in multi-label data, a list of numbers.
After the pattern, `,label=FIELD` names a field of the json to read instead of these, and `,image=EXTENSION` the member
of the image. The EXIF orientation is not applied.

`_info.json` beside the tar files states their lengths; timm publishes it with its data sets. Its field `splits` is
split -> an object. Such an object contains `filenames` (relative to the folder), `shard_lengths` (the number of samples
of each file) and optionally `alt_label` (the field of a sample's json that has the label). Other optional fields, which
only vit_jax has, are `num_classes`, `class_names` (in the order of the labels) and `max_labels` (the most labels of an
image in multi-label data).
"""

import collections
import glob
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from vit_jax import UserError
from vit_jax.data import shards
from vit_jax.data.images import IMAGE_SUFFIXES
from vit_jax.data.sources.file_pattern import FoundFile, files_of_splits, find_files, find_folder, read_options
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
from vit_jax.data.sources.splits import resolve_name, select_examples, split_names
from vit_jax.json_text import to_json
from vit_jax.storage import filesystem, read_json

INFO_NAME = "_info.json"
INFO_FIELDS = {
    "splits": "an object of objects",
    "num_classes": "null or a whole number",
    "class_names": "null or a list",
    "max_labels": "null or a whole number",
}
SPLIT_FIELDS = {"filenames": "a list of strings", "shard_lengths": "a list of whole numbers"}
OPTIONS = ("label", "image")
COPIES = 4  # remote files that are copied at once to be counted


class WebDatasetInfo(NamedTuple):
    """The facts about the tar files in a folder that are known without opening them.

    Attributes:
        splits: split -> name of a file -> number of its samples; in order.
        label_fields: split -> the field of a sample's json that has the label, for the splits that state one.
        num_classes: the labels are 0 to num_classes - 1; None: not stated.
        class_names: the names of the classes in the order of the labels, or None.
        max_labels: the most labels of an image in multi-label data, or None.
    """

    splits: Mapping[str, Mapping[str, int]]
    label_fields: Mapping[str, str]
    num_classes: int | None
    class_names: tuple[str, ...] | None
    max_labels: int | None


class TarSet(NamedTuple):
    """The tar files that a pattern matches.

    Attributes:
        splits: split -> its files, in order.
        lengths: name of a file -> number of its samples, for the files that `_info.json` lists.
        info: what the `_info.json` beside the files states, or None if there is none.
        folder: the folder in which the `_info.json` lies, if there is one.
        notes: a line for the user if the `_info.json` does not name all files of the folder.
    """

    splits: Mapping[str, list[FoundFile]]
    lengths: Mapping[str, int]
    info: WebDatasetInfo | None
    folder: str
    notes: tuple[str, ...] = ()


def find_tars(pattern: str) -> TarSet:
    """Lists tar files without opening them.

    Args:
        pattern: as `find_files` takes it. If it is a folder with an `_info.json`, only the files that this names are
            listed, in its order.

    Raises:
        UserError: there are no files, a file that is named is missing, or the `_info.json` is unreadable.
    """
    folder, rest = find_folder(pattern, ".tar")
    info, files = read_info(folder), find_files(pattern, ".tar")
    if info is None:
        return TarSet(files_of_splits(files), {}, None, folder)
    by_name = {file.name: file for file in files}
    notes: list[str] = []
    if not rest:
        named = [name for of_split in info.splits.values() for name in of_split]
        if missing := [name for name in named if name not in by_name]:
            raise UserError(f"{folder} lacks {len(missing)} files that its {INFO_NAME} names, such as {missing[0]}")
        if others := sorted(by_name.keys() - set(named)):
            unnamed = f"{len(others)} tar files that its {INFO_NAME} does not name, such as {others[0]}"
            notes.append(f"{folder} has {unnamed}; they are not read")
        files = [by_name[name] for name in named]
    lengths = {name: length for of_split in info.splits.values() for name, length in of_split.items()}
    stated = {name: split for split, of_split in info.splits.items() for name in of_split}
    return TarSet(files_of_splits(files, stated), lengths, info, folder, tuple(notes))


def open_webdataset(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens a WebDataset; `name` is a pattern with options.

    Raises:
        UserError: a file or a split is missing, a file is damaged, the number of classes is not known, or the splits
            have their labels in different fields.
    """
    pattern, options = read_options(name, OPTIONS)
    tar_set = find_tars(pattern)
    existing = {one: resolve_name(one, tar_set.splits, f"split of {pattern}") for one in split_names(split)}
    of_folder = f"webdataset:{tar_set.folder}"
    listed = {
        one: list_shards(whole, tar_set.splits[whole], tar_set.lengths, INFO_NAME, of_folder, "tar")
        for one, whole in existing.items()
    }
    splits = ShardedSplits(listed)
    info = tar_set.info
    num_classes = (info and info.num_classes) or source_config.num_classes
    if num_classes is None:
        raise UserError(
            f"the number of classes of {pattern} is not known; set --config.data.num_classes, or write it into "
            f"{INFO_NAME} beside the files as num_classes"
        )
    field = options.get("label") or choose_label_field(info, list(existing.values()))
    max_labels = (info and info.max_labels) or source_config.max_labels
    read_record = partial(
        read_sample, field=field, extension=options.get("image"), reads_labels=source_config.reads_labels
    )
    parts = tuple(select_examples(split, splits.counts))
    return Source(
        name="webdataset",
        parts=parts,
        sizes=splits.counts,
        read_example=partial(read_labelled, splits, read_record, num_classes, max_labels),
        num_classes=num_classes,
        class_names=info.class_names if info else None,
        digest=repr((field, options.get("image"), max_labels)),
        max_labels=max_labels,
        file_stamp=splits.file_stamp,
        read_name=partial(read_key, splits),
        split_names=tuple(tar_set.splits),
        notes=tar_set.notes,
        shards=splits.select(parts),
    )


def choose_label_field(info: WebDatasetInfo | None, existing: Sequence[str]) -> str | None:
    """Returns the field of a sample's json that has the label, as `_info.json` states it for whole splits, or None.

    Raises:
        UserError: two of the splits state different fields.
    """
    stated = {split: info.label_fields[split] for split in existing if split in info.label_fields} if info else {}
    fields = list(dict.fromkeys(stated.values()))
    if len(fields) > 1:
        words = " and ".join(f"{field} for {split}" for split, field in stated.items())
        raise UserError(
            f"{INFO_NAME} states different fields of the labels as alt_label, {words}; name the one to read from all "
            f"splits with ,label={fields[0]} after the source, or read the splits one by one"
        )
    return fields[0] if fields else None


def list_webdataset_splits(source_config: SourceConfig, name: str) -> list[str]:
    """Returns the names of the splits of a WebDataset; raises as `find_tars`."""
    return list(find_tars(read_options(name, OPTIONS)[0]).splits)


def read_key(splits: ShardedSplits, split: str, index: int, open_shard: OpenShard = shards.cached_reader) -> str:
    """Returns the key of example `index` of a split."""
    shard, row = splits.locate(split, index)
    reader = open_shard(shard)
    assert isinstance(reader, shards.TarFile)
    return reader.key(row)


def read_sample(
    reader: shards.ShardReader,
    row: int,
    name: str,
    field: str | None,
    extension: str | None,
    reads_labels: bool = True,
) -> tuple[bytes, list[int] | None]:
    """Returns the encoded image and the labels of a sample.

    Args:
        reader: the reader of the tar file.
        row: number of the sample.
        name: the sample's name in messages.
        field: the field of its json that contains the label; None: the label is in its member `cls` or, without such a
            member, in the field `label`.
        extension: the extension of its image; None: its first member with the extension of an image.
        reads_labels: False: the labels are None, and the sample needs none.

    Raises:
        ValueError: the sample has no image, or is damaged.
        UserError: the sample has no label, or a label that is no number.
    """
    key, members = reader.read(row)
    wanted = [extension] if extension else [one for one in members if f".{one}" in IMAGE_SUFFIXES]
    if not wanted or wanted[0] not in members:
        raise ValueError(f"its members {', '.join(members)} contain no {extension or 'image'}")
    image = members[wanted[0]]
    if not reads_labels:
        return image, None
    if field is None and "cls" in members:
        text = members["cls"].decode(errors="replace").strip()
        value: object = int(text) if text.removeprefix("-").isdecimal() else text
    else:
        value = read_field(members, f"{name} ({key})", field or "label")
    values = value if isinstance(value, list) else [value]
    labels = [one for one in values if type(one) is int]
    if len(labels) < len(values):
        raise UserError(f"the label of {name} ({key}) must be a number, or a list of numbers, not {value!r:.60}")
    return image, labels


def read_field(members: Mapping[str, bytes], name: str, field: str) -> object:
    """Returns a field of the json of a sample, called `name` in messages; raises UserError if it has no such field."""
    try:
        fields = json.loads(members.get("json", b"null"))
    except (ValueError, RecursionError):  # the second: nested thousands of times
        fields = None
    if not isinstance(fields, dict) or field not in fields:
        has = f"its json has the fields {', '.join(fields)}" if isinstance(fields, dict) else "it has no json object"
        raise UserError(
            f"{name} has no label {field}: its members are {', '.join(members)}, and {has}; write the label into the "
            f"field {field} of the member json, or name another field with ,label=FIELD after the source (the member "
            "cls is read where no field is named)"
        )
    return fields[field]


def read_info(folder: str) -> WebDatasetInfo | None:
    """Reads the `_info.json` of a folder, local or remote; returns None if there is none.

    Raises:
        UserError: it is damaged, or a field is missing or wrong.
    """
    path = filesystem.join_path(folder, INFO_NAME)
    if not filesystem.expand_pattern(glob.escape(path)):
        return None
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise UserError(f"cannot read {path}: it must be an object")
    shards.check_fields(INFO_FIELDS, fields, path, optional=("num_classes", "class_names", "max_labels"))
    shards.check_class_names(fields, path)
    lengths: dict[str, dict[str, int]] = {}
    for split, stated in fields["splits"].items():
        shards.check_fields(SPLIT_FIELDS, stated, path, f"splits.{split}.")
        names, counts = stated["filenames"], stated["shard_lengths"]
        if len(names) != len(counts):
            raise UserError(f"cannot read {path}: splits.{split} has {len(names)} filenames, but {len(counts)} lengths")
        if (total := stated.get("num_samples", sum(counts))) != sum(counts):
            raise UserError(
                f"cannot read {path}: splits.{split} states num_samples {total}, but its shard_lengths sum to "
                f"{sum(counts)}; count the samples again"
            )
        lengths[split] = dict(zip(names, counts, strict=True))
    listed = collections.Counter(name for stated in fields["splits"].values() for name in stated["filenames"])
    if repeated := [name for name, count in listed.items() if count > 1]:
        raise UserError(f"cannot read {path}: the file {repeated[0]} is listed twice")
    labels = {split: stated["alt_label"] for split, stated in fields["splits"].items() if stated.get("alt_label")}
    names = fields.get("class_names")
    class_names = tuple(map(str, names)) if names else None
    return WebDatasetInfo(lengths, labels, fields.get("num_classes"), class_names, fields.get("max_labels"))


def write_info(path: str, info: WebDatasetInfo) -> None:
    """Writes an `_info.json`, local or remote, whole or not at all; raises UserError if it cannot be written."""
    splits = {
        split: {
            "name": split,
            "filenames": list(lengths),
            "shard_lengths": list(lengths.values()),
            "num_samples": sum(lengths.values()),
            **({"alt_label": info.label_fields[split]} if split in info.label_fields else {}),
        }
        for split, lengths in info.splits.items()
    }
    stated = {"num_classes": info.num_classes, "class_names": info.class_names, "max_labels": info.max_labels}
    filesystem.write_bytes(path, f"{to_json({'splits': splits} | stated, indent=2)}\n".encode())


def describe_tars(
    name: str, num_classes: int, max_labels: int | None, advance: Callable[[int], None] = lambda count: None
) -> Description:
    """Counts the samples of all tar files in a folder and writes `_info.json` beside them.

    Each file is read from end to end. A remote file is copied into the cache, and the copy is given back afterwards.
    The last sample of each file is checked, and its image is decoded.

    Args:
        name: the folder, local or remote, with options.
        num_classes: the labels are 0 to num_classes - 1.
        max_labels: the most labels of an image in multi-label data, or None.
        advance: called with 1 for each file that was counted.

    Raises:
        UserError: there are no files, one is damaged, a label is missing or out of range, or an `_info.json` exists
            already or cannot be written.
    """
    folder, options = read_options(name, OPTIONS)
    tar_set = find_tars(folder)
    path = filesystem.join_path(tar_set.folder, INFO_NAME)
    if tar_set.folder != filesystem.absolute_path(folder).rstrip("/"):
        raise UserError(f"{INFO_NAME} describes all tar files of a folder; name the folder instead of {folder}")
    if tar_set.info:
        raise UserError(f"{path} exists already; to count again, remove it and repeat the command")

    def count(file: FoundFile) -> shards.ShardEntry:
        local, give_back = filesystem.borrow_copy(file.path, file.version)
        try:
            reader = shards.open_reader(file.path, local, file.size, "tar")
            if records := reader.num_records():
                read = partial(
                    read_sample, reader, records - 1, field=options.get("label"), extension=options.get("image")
                )
                check_example(read, f"record {records - 1} of {file.path}", num_classes, max_labels)
        finally:
            give_back()
        advance(1)
        return shards.ShardEntry(file.name, records, file.size or 0)

    splits = count_splits(tar_set.splits, count, COPIES)
    lengths = {split: {entry.name: entry.records for entry in entries} for split, entries in splits.items()}
    fields = dict.fromkeys(lengths, options["label"]) if "label" in options else {}
    write_info(path, WebDatasetInfo(lengths, fields, num_classes, None, max_labels))
    return Description(path, splits, is_new=True)
