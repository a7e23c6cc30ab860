"""The manifest of a set of shards, `info.json`; `sources.array_record` documents its fields."""

import dataclasses
import glob
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from vit_jax import UserError
from vit_jax.storage import filesystem, read_json

MANIFEST_NAME = "info.json"
SHUFFLE = "shuffle"  # the seed in `made_from`, where the images were packed in a random order
VERSION = 1


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """An unreadable image that a shard lacks.

    Attributes:
        index: the index of the image in the split that was packed.
        error: why it is unreadable.
    """

    index: int
    error: str


@dataclasses.dataclass(frozen=True)
class Duplicate:
    """An image that a shard lacks because it is a near-duplicate of an image of another split.

    Attributes:
        index: the index of the image in the split that was packed.
        split: the other split, as written on the command line.
        image: the name of the other image, see `Source.example_name`.
        distance: the distance between the perceptual hashes of the two images, in bits, rounded up.
    """

    index: int
    split: str
    image: str
    distance: int


@dataclasses.dataclass(frozen=True)
class ShardEntry:
    """The entry of a shard in the manifest.

    Attributes:
        name: the name of its file.
        records: the number of its records.
        size: the size of its file in bytes.
        file_stamp: a text that changes when the packed image files change; empty if no image files were packed.
        left_out: the unreadable images that it lacks.
        duplicates: the near-duplicates of images of other splits that it lacks.
    """

    name: str
    records: int
    size: int
    file_stamp: str = ""
    left_out: tuple[LeftOut, ...] = ()
    duplicates: tuple[Duplicate, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object of the entry."""
        entry: dict[str, Any] = {"name": self.name, "records": self.records, "bytes": self.size}
        entry |= {"files": self.file_stamp} if self.file_stamp else {}
        entry |= {"left_out": list(map(dataclasses.asdict, self.left_out))} if self.left_out else {}
        return entry | ({"duplicates": list(map(dataclasses.asdict, self.duplicates))} if self.duplicates else {})

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "ShardEntry":
        """Returns the entry of a JSON object."""
        left_out = tuple(LeftOut(image["index"], image["error"]) for image in entry.get("left_out", []))
        duplicates = tuple(Duplicate(**image) for image in entry.get("duplicates", []))
        return cls(entry["name"], entry["records"], entry["bytes"], entry.get("files", ""), left_out, duplicates)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The facts about a set of shards that are known without opening them.

    Attributes:
        name: the name of the data set.
        num_classes: the labels are 0 to num_classes - 1; or how many numbers an image has.
        class_names: the names of the classes in the order of the labels, or of the numbers; or None.
        max_labels: the most labels of an image in multi-label data, or None.
        has_numbers: whether a label is a list of numbers, the targets of regression.
        made_from: what was packed, and the settings; empty if another program made the shards.
        splits: split -> the entries of its shards, in order.
        label_counts: split -> the number of images of each class; empty: they were not counted, and there are no files
            of labels (`label_index`).
    """

    name: str
    num_classes: int
    class_names: tuple[str, ...] | None = None
    max_labels: int | None = None
    has_numbers: bool = False
    made_from: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    splits: Mapping[str, tuple[ShardEntry, ...]] = dataclasses.field(default_factory=dict)
    label_counts: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object of the manifest."""
        counted = {split: list(counts) for split, counts in self.label_counts.items()}
        return (
            ({"label_counts": counted} if counted else {})
            | ({"has_numbers": True} if self.has_numbers else {})
            | {
                "version": VERSION,
                "name": self.name,
                "num_classes": self.num_classes,
                "class_names": None if self.class_names is None else list(self.class_names),
                "max_labels": self.max_labels,
                "made_from": dict(self.made_from),
                "splits": {split: [entry.to_json() for entry in entries] for split, entries in self.splits.items()},
            }
        )

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Manifest":
        """Returns the manifest of a JSON object, which `check_manifest` must accept."""
        names = fields.get("class_names")
        return cls(
            name=fields["name"],
            num_classes=fields["num_classes"],
            class_names=None if names is None else tuple(names),
            max_labels=fields.get("max_labels"),
            has_numbers=fields.get("has_numbers", False),
            made_from=fields.get("made_from", {}),
            splits={split: tuple(map(ShardEntry.from_json, listed)) for split, listed in fields["splits"].items()},
            label_counts={split: tuple(counts) for split, counts in fields.get("label_counts", {}).items()},
        )


def read_manifest(path: str) -> Manifest | None:
    """Reads an info.json; returns None if there is none.

    Raises:
        UserError: the file is damaged, of another version, or a field is missing or wrong.
    """
    if not filesystem.expand_pattern(glob.escape(path)):
        return None
    fields = read_json(path)
    if not isinstance(fields, dict) or "version" not in fields:
        raise UserError(f"cannot read {path}: it must be an object with a version")
    if fields["version"] != VERSION:
        other = f"{path} has version {fields['version']}, but this vit_jax reads version {VERSION}"
        raise UserError(f"{other}; use the vit_jax that wrote it, or pack the data again")
    check_manifest(fields, path)
    return Manifest.from_json(fields)


def write_manifest(path: str, manifest: Manifest) -> None:
    """Writes an info.json, local or remote, whole or not at all; raises UserError if it cannot be written."""
    filesystem.write_bytes(path, f"{json.dumps(manifest.to_json(), indent=2)}\n".encode())


def is_whole(value: Any) -> bool:
    """Returns whether a value is 0, 1, 2, ... (`true` and 10.0 are not)."""
    return type(value) is int and value >= 0


def is_list(value: Any, of: type) -> bool:
    """Returns whether a value is a list whose elements all have the type `of`."""
    return isinstance(value, list) and all(isinstance(one, of) for one in value)


# What a value must be, in words -> function that returns whether it is.
KINDS: dict[str, Callable[[Any], bool]] = {
    "true or false": lambda value: isinstance(value, bool),
    "a string": lambda value: isinstance(value, str),
    "a whole number": is_whole,
    "a whole number above 0": lambda value: is_whole(value) and value > 0,
    "an object": lambda value: isinstance(value, dict),
    "a list of objects": lambda value: is_list(value, dict),
    "a list of strings": lambda value: is_list(value, str),
    "a list of whole numbers": lambda value: isinstance(value, list) and all(map(is_whole, value)),
    "an object of objects": lambda value: isinstance(value, dict) and is_list([*value.values()], dict),
    "an object of lists of shards": lambda value: (
        isinstance(value, dict) and all(is_list(listed, dict) for listed in value.values())
    ),
    "an object of lists of whole numbers": lambda value: (
        isinstance(value, dict) and all(isinstance(of, list) and all(map(is_whole, of)) for of in value.values())
    ),
    "null or a list": lambda value: value is None or isinstance(value, list),
    "null or a list of strings": lambda value: value is None or is_list(value, str),
    "null or a whole number": lambda value: value is None or is_whole(value),
    "null or a whole number above 0": lambda value: value is None or (is_whole(value) and value > 0),
}
Fields = dict[str, str]  # name of a field -> what its value must be, a key of `KINDS`
MANIFEST_FIELDS: Fields = {
    "name": "a string",
    "num_classes": "a whole number above 0",
    "class_names": "null or a list of strings",
    "max_labels": "null or a whole number above 0",
    "has_numbers": "true or false",
    "made_from": "an object",
    "splits": "an object of lists of shards",
    "label_counts": "an object of lists of whole numbers",
}
SHARD_FIELDS: Fields = {
    "name": "a string",
    "records": "a whole number",
    "bytes": "a whole number",
    "files": "a string",
    "left_out": "a list of objects",
    "duplicates": "a list of objects",
}
LEFT_OUT_FIELDS: Fields = {"index": "a whole number", "error": "a string"}
DUPLICATE_FIELDS: Fields = {
    "index": "a whole number",
    "split": "a string",
    "image": "a string",
    "distance": "a whole number",
}
OPTIONAL = ("class_names", "max_labels", "has_numbers", "made_from", "label_counts", "files", "left_out", "duplicates")


def check_manifest(fields: Mapping[str, Any], path: str) -> None:
    """Raises UserError if a field of an `info.json` is missing or wrong; the message names the first such field."""
    check_fields(MANIFEST_FIELDS, fields, path)
    check_class_names(fields, path)
    for split, listed in fields["splits"].items():
        for number, shard in enumerate(listed):
            where = f"splits.{split}[{number}]."
            check_fields(SHARD_FIELDS, shard, path, where)
            for key, fields_of_image in (("left_out", LEFT_OUT_FIELDS), ("duplicates", DUPLICATE_FIELDS)):
                for image, values in enumerate(shard.get(key, [])):
                    check_fields(fields_of_image, values, path, f"{where}{key}[{image}].")


def check_class_names(fields: Mapping[str, Any], path: str) -> None:
    """Raises UserError if the JSON object of the file `path` has another number of class names than of classes."""
    names, num_classes = fields.get("class_names"), fields.get("num_classes")
    if names is not None and len(names) != num_classes:
        raise UserError(f"cannot read {path}: class_names has {len(names)} names, but num_classes is {num_classes}")


def check_fields(
    fields: Fields, values: Mapping[str, Any], path: str, prefix: str = "", optional: Collection[str] = OPTIONAL
) -> None:
    """Raises UserError if a field of a JSON object in a file is missing or wrong.

    Args:
        fields: what the fields must be.
        values: the JSON object.
        path: the path of the file, for messages.
        prefix: the place of the object in the file, which precedes the name of the field in messages.
        optional: the fields that may be missing.
    """
    for field, what in fields.items():
        if field not in values and field not in optional:
            raise UserError(f"cannot read {path}: {prefix}{field} is missing; it must be {what}")
        if field in values and not KINDS[what](values[field]):
            raise UserError(f"cannot read {path}: {prefix}{field} must be {what}, not {json.dumps(values[field]):.60}")
