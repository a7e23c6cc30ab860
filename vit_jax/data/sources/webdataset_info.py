"""`_info.json` beside the tar files of a WebDataset: it states their lengths, and timm publishes it with its data sets.

Its field `splits` is split -> an object. Such an object contains `filenames` (relative to the folder), `shard_lengths`
(the number of samples of each file) and optionally `alt_label` (the field of a sample's json that has the label). Other
optional fields, which only vit_jax has, are `num_classes`, `class_names` (in the order of the labels) and `max_labels`
(the most labels of an image in multi-label data).
"""

import collections
import glob
from collections.abc import Mapping
from typing import NamedTuple

from vit_jax import UserError
from vit_jax.json_text import to_json
from vit_jax.storage import filesystem, read_json

INFO_NAME = "_info.json"


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


def read_info(folder: str) -> WebDatasetInfo | None:
    """Reads the `_info.json` of a folder, local or remote; returns None if there is none.

    Raises:
        UserError: it is damaged, or a field is missing or wrong.
    """
    path = filesystem.join_path(folder, INFO_NAME)
    if not filesystem.expand_pattern(glob.escape(path)):
        return None
    fields = read_json(path)
    if not isinstance(fields, dict) or not isinstance(fields.get("splits"), dict):
        raise UserError(f"cannot read {path}: it must be a JSON object whose field splits is an object")
    splits = {split: read_lengths(of_split, f"splits.{split}", path) for split, of_split in fields["splits"].items()}
    listed = collections.Counter(name for of_split in fields["splits"].values() for name in of_split["filenames"])
    if repeated := [name for name, count in listed.items() if count > 1]:
        raise UserError(f"cannot read {path}: the file {repeated[0]} is listed twice")
    num_classes, max_labels, names = (fields.get(name) for name in ("num_classes", "max_labels", "class_names"))
    for name, number in (("num_classes", num_classes), ("max_labels", max_labels)):
        if number is not None and not is_count(number):
            raise UserError(f"cannot read {path}: {name} must be a whole number")
    if names is not None and not (isinstance(names, list) and len(names) == num_classes):
        raise UserError(f"cannot read {path}: class_names must be a list of num_classes names")
    labels = {split: of_split["alt_label"] for split, of_split in fields["splits"].items() if of_split.get("alt_label")}
    return WebDatasetInfo(splits, labels, num_classes, tuple(map(str, names)) if names else None, max_labels)


def read_lengths(of_split: object, field: str, path: str) -> dict[str, int]:
    """Returns name of a file -> number of its samples.

    Args:
        of_split: the entry of a split.
        field: the place of the entry in the `_info.json`, for messages.
        path: the path of the `_info.json`, for messages.

    Raises:
        UserError: the entry has another form.
    """
    stated = of_split if isinstance(of_split, dict) else {}
    names, lengths = stated.get("filenames"), stated.get("shard_lengths")
    if (
        not (isinstance(names, list) and isinstance(lengths, list) and len(names) == len(lengths))
        or not all(isinstance(name, str) for name in names)
        or not all(map(is_count, lengths))
    ):
        wanted = "the lists filenames and shard_lengths, with one length for each file"
        raise UserError(f"cannot read {path}: {field} must have {wanted}")
    if (total := stated.get("num_samples", sum(lengths))) != sum(lengths):
        raise UserError(
            f"cannot read {path}: {field} states num_samples {total}, but its shard_lengths sum to {sum(lengths)}; "
            "count the samples again"
        )
    return dict(zip(names, lengths, strict=True))


def is_count(value: object) -> bool:
    """Returns whether a value is 0, 1, 2, ... (`true` is not)."""
    return type(value) is int and value >= 0


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
