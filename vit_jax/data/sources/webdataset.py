"""WebDataset: images and labels in tar files, `KEY.jpg` with `KEY.cls` or `KEY.json`.

The image of a sample is its first member with the extension of an image. The label is the number in its member `cls`
or, without such a member, the field `label` of its member `json`: a number or, in multi-label data, a list of numbers.
After the pattern, `,label=FIELD` names a field of the json to read instead of these, and `,image=EXTENSION` the member
of the image. The EXIF orientation is not applied.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from vit_jax import UserError
from vit_jax.data import shards
from vit_jax.data.images import IMAGE_SUFFIXES
from vit_jax.data.sources.file_pattern import FoundFile, files_of_splits, find_files, find_folder, read_options
from vit_jax.data.sources.sharded import ShardedSplits, read_labelled
from vit_jax.data.sources.source import Source, SourceConfig
from vit_jax.data.sources.splits import resolve_name, select_examples, split_names
from vit_jax.data.sources.webdataset_info import INFO_NAME, WebDatasetInfo, read_info
from vit_jax.storage import filesystem

OPTIONS = ("label", "image")


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
    shards.forget_readers()
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


def list_shards(tar_set: TarSet, split: str) -> tuple[shards.Shard, ...]:
    """Returns the shards of a split.

    A file whose number of samples is not stated is opened to count them; a remote file is copied into the cache first.

    Raises:
        UserError: a file that is opened is damaged, or the files to copy do not fit into the cache.
    """
    listed = tar_set.splits[split]
    unknown = [file for file in listed if file.name not in tar_set.lengths]
    remote = sum(file.size or 0 for file in unknown if filesystem.is_remote(file.path))
    shards.check_count_room(split, tar_set.folder, INFO_NAME, remote, f"webdataset:{tar_set.folder}")
    return tuple(
        shards.Shard(
            file.path,
            tar_set.lengths[file.name]
            if file.name in tar_set.lengths
            else shards.count_records(file.path, file.size, file.version, "tar"),
            file.size,
            file.version,
            "tar",
        )
        for file in listed
    )


def open_webdataset(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens a WebDataset; `name` is a pattern with options.

    Raises:
        UserError: a file or a split is missing, a file is damaged, the number of classes is not known, or the splits
            have their labels in different fields.
    """
    pattern, options = read_options(name, OPTIONS)
    tar_set = find_tars(pattern)
    existing = {one: resolve_name(one, tar_set.splits, f"split of {pattern}") for one in split_names(split)}
    splits = ShardedSplits({one: list_shards(tar_set, whole) for one, whole in existing.items()})
    info = tar_set.info
    num_classes = (info and info.num_classes) or source_config.num_classes
    if num_classes is None:
        raise UserError(
            f"the number of classes of {pattern} is not known; set --config.data.num_classes, or write it into "
            f"{INFO_NAME} beside the files as num_classes"
        )
    field = options.get("label") or choose_label_field(info, list(existing.values()))
    max_labels = (info and info.max_labels) or source_config.max_labels
    extension = options.get("image")
    read_labels = partial(read_sample, field=field, extension=extension)
    read_record = read_labels if source_config.reads_labels else partial(read_unlabelled, extension=extension)
    parts = tuple(select_examples(split, splits.counts))
    return Source(
        name="webdataset",
        parts=parts,
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


def read_key(splits: ShardedSplits, split: str, index: int) -> str:
    """Returns the key of example `index` of a split."""
    shard, row = splits.locate(split, index)
    reader = shards.cached_reader(shard)
    assert isinstance(reader, shards.TarFile)
    return reader.key(row)


def read_sample(
    reader: shards.ShardReader,
    row: int,
    name: str,
    field: str | None,
    extension: str | None,
) -> tuple[bytes, list[int]]:
    """Returns the encoded image and the labels of a sample.

    Args:
        reader: the reader of the tar file.
        row: number of the sample.
        name: the sample's name in messages.
        field: the field of its json that contains the label; None: the label is in its member `cls` or, without such a
            member, in the field `label`.
        extension: the extension of its image; None: its first member with the extension of an image.

    Raises:
        ValueError: the sample has no image, or is damaged.
        UserError: the sample has no label, or a label that is no number.
    """
    key, members = reader.read(row)
    image = find_image(members, extension)
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


def read_unlabelled(reader: shards.ShardReader, row: int, name: str, extension: str | None) -> tuple[bytes, None]:
    """Returns the encoded image of a sample, and no labels; takes and raises what `read_sample` does."""
    return find_image(reader.read(row)[1], extension), None


def find_image(members: Mapping[str, bytes], extension: str | None) -> bytes:
    """Returns the image among the members of a sample; raises ValueError if there is none."""
    wanted = [extension] if extension else [one for one in members if f".{one}" in IMAGE_SUFFIXES]
    if not wanted or wanted[0] not in members:
        raise ValueError(f"its members {', '.join(members)} contain no {extension or 'image'}")
    return members[wanted[0]]


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
