"""Parquet files with a column of images and a column of labels, as `datasets` and the Hugging Face hub have them.

An image is a struct of `bytes` and `path`, or bytes. A label is a whole number, or in multi-label data a list of whole
numbers. The columns are found by the description that the library `datasets` leaves in the files: the only column of
type Image, and the only one of type ClassLabel, whose class names are used; all files must state the same names in the
same order. Otherwise they are the columns `image` and `label`. `,image=COLUMN` and `,label=COLUMN` after the pattern
name other columns. The EXIF orientation is not applied.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from vit_jax import UserError
from vit_jax.data import shards
from vit_jax.data.sources.file_pattern import FoundFile, files_of_splits, find_files, read_options
from vit_jax.data.sources.sharded import OpenShard, ShardedSplits, read_labelled
from vit_jax.data.sources.source import Source, SourceConfig
from vit_jax.data.sources.splits import resolve_name, select_examples, split_names
from vit_jax.storage import filesystem

OPTIONS = ("image", "label")


def open_parquet(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens Parquet files; `name` is a pattern with options. The end of each file of the split is read.

    Raises:
        UserError: a file, a split or a column is missing, a file is damaged, or the number of classes is not known.
    """
    pattern, options = read_options(name, OPTIONS)
    files_by_split = find_parquet(pattern)
    existing = {one: resolve_name(one, files_by_split, f"split of {pattern}") for one in split_names(split)}
    footers = read_footers([file for whole in existing.values() for file in files_by_split[whole]])
    first = next(iter(footers))
    image, label, class_names = choose_columns(footers[first], options)
    chosen = {"image": image} | ({"label": label} if source_config.reads_labels else {})
    for path, footer in footers.items():
        check_columns(footer, chosen, path)
    if source_config.reads_labels:
        check_classes(footers, label)
    num_classes = len(class_names) if class_names else source_config.num_classes
    if num_classes is None:
        raise UserError(
            f"the number of classes of {pattern} is not known, since its files do not describe the column "
            f"{label}; set --config.data.num_classes"
        )
    listed = {
        one: tuple(
            shards.Shard(file.path, footers[file.path].rows, file.size, file.version, "parquet")
            for file in files_by_split[whole]
        )
        for one, whole in existing.items()
    }
    splits = ShardedSplits(listed)
    read_record = partial(read_row, image=image, label=chosen.get("label"))
    parts = tuple(select_examples(split, splits.counts))
    named = "path" in footers[first].columns[image]
    return Source(
        name="parquet",
        parts=parts,
        read_example=partial(read_labelled, splits, read_record, num_classes, source_config.max_labels),
        num_classes=num_classes,
        class_names=class_names,
        digest=repr((image, label, source_config.max_labels)),
        max_labels=source_config.max_labels,
        file_stamp=splits.file_stamp,
        read_name=partial(read_path, splits, image) if named else None,
        split_names=tuple(files_by_split),
        shards=splits.select(parts),
    )


def open_hub(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens the Parquet files of a data set on the Hugging Face hub; `name` is //datasets/OWNER/NAME with options.

    Raises:
        UserError: as `open_parquet`, or the name has another form.
    """
    return open_parquet(source_config, hub_pattern(name), split)


def list_hub_splits(source_config: SourceConfig, name: str) -> list[str]:
    """Returns the names of the splits of a data set on the hub; raises as `open_hub`."""
    return list_parquet_splits(source_config, hub_pattern(name))


def hub_pattern(name: str) -> str:
    """Returns the pattern of the files of a data set on the hub; raises UserError if its name has another form."""
    if not re.match("//datasets/[^/]+/[^/]", name):
        raise UserError(f"cannot read the data source hf:{name}; write hf://datasets/OWNER/NAME")
    return f"hf:{name}"


def list_parquet_splits(source_config: SourceConfig, name: str) -> list[str]:
    """Returns the names of the splits of Parquet files; raises as `find_parquet`."""
    return list(find_parquet(read_options(name, OPTIONS)[0]))


def find_parquet(pattern: str) -> Mapping[str, list[FoundFile]]:
    """Returns split -> its files; raises UserError if there are no files, or if a split lies in several folders."""
    splits = files_of_splits(find_files(pattern, ".parquet"))
    for split, files in splits.items():
        folders = sorted({file.path.rpartition("/")[0] for file in files})
        if len(folders) > 1:
            names = ", ".join(folder.rpartition("/")[2] for folder in folders)
            raise UserError(f"the split {split} of {pattern} lies in several folders; name one of them: {names}")
    return splits


def read_footers(files: Sequence[FoundFile]) -> dict[str, shards.Footer]:
    """Returns path of a file -> what its end states; raises UserError if a file is damaged."""
    with ThreadPoolExecutor(filesystem.CONCURRENT_REQUESTS) as pool:
        footers = pool.map(lambda file: shards.read_footer(file.path, file.size), files)
        return dict(zip((file.path for file in files), footers, strict=True))


def choose_columns(footer: shards.Footer, options: Mapping[str, str]) -> tuple[str, str, tuple[str, ...] | None]:
    """Returns the column of images, the column of labels, and the class names, or None if the file does not state them.

    Args:
        footer: the footer of a file.
        options: `image` or `label` -> the column that the user names for it.
    """
    described = describe_features(footer)
    chosen = {}
    for role, kind in (("image", "Image"), ("label", "ClassLabel")):
        fitting = [name for name, feature in described.items() if class_label(feature).get("_type") == kind]
        chosen[role] = options.get(role) or (fitting[0] if len(fitting) == 1 else role)
    return chosen["image"], chosen["label"], list_class_names(footer, chosen["label"])


def list_class_names(footer: shards.Footer, label: str) -> tuple[str, ...] | None:
    """Returns the class names that a file states for its column `label`, or None if it states none."""
    names = class_label(describe_features(footer).get(label, {})).get("names")
    return tuple(map(str, names)) if names else None


def check_classes(footers: Mapping[str, shards.Footer], label: str) -> None:
    """Raises UserError if two files, path -> footer, name the classes of the column `label` in different orders."""
    stated = {path: names for path, footer in footers.items() if (names := list_class_names(footer, label))}
    first = next(iter(stated), "")
    for path, names in stated.items():
        if names == stated[first]:
            continue
        pairs = enumerate(itertools.zip_longest(stated[first], names))
        number, (own, other) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
        raise UserError(
            f"the label {number} is {own!r} in {first}, but {other!r} in {path}; all files of a data set must state "
            "the same class names in the same order, so write the files again"
        )


def check_columns(footer: shards.Footer, chosen: Mapping[str, str], path: str) -> None:
    """Raises UserError if the file `path` lacks a column; `chosen` is `image` or `label` -> name of its column."""
    for role, name in chosen.items():
        if name not in footer.columns:
            raise UserError(
                f"{path} has no column {name}, only {', '.join(footer.columns)}; write the column of the {role}s after "
                f"the data source, as ,{role}=COLUMN"
            )


def describe_features(footer: shards.Footer) -> Mapping[str, object]:
    """Returns name of a column -> the description that `datasets` has left of it; empty if there is no description."""
    try:
        described = json.loads(footer.facts[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return {}
    return described if isinstance(described, dict) else {}


def class_label(feature: object) -> Mapping[str, Any]:
    """Returns the description of the values of a column or, if these are lists, of the elements of the lists."""
    if isinstance(feature, list):
        return class_label(feature[0]) if feature else {}
    if not isinstance(feature, dict):
        return {}
    return class_label(feature["feature"]) if "feature" in feature else feature


def read_path(
    splits: ShardedSplits, image: str, split: str, index: int, open_shard: OpenShard = shards.cached_reader
) -> str:
    """Returns the path that is stored with the image of example `index` of a split, or else `<split>/<index>`."""
    shard, row = splits.locate(split, index)
    reader = open_shard(shard)
    assert isinstance(reader, shards.ParquetFile)
    [stored] = reader.read(row, [f"{image}.path"]).values()
    return (stored and stored["path"]) or f"{split}/{index}"  # a row may have no image at all


def read_row(
    reader: shards.ParquetFile, row: int, name: str, image: str, label: str | None
) -> tuple[bytes, list[int] | None]:
    """Returns the encoded image and the labels of a row.

    Args:
        reader: the reader of the file.
        row: the number of the row in the file.
        name: the name of the row in messages.
        image: the column of images.
        label: the column of labels; None: the labels are None.

    Raises:
        ValueError: the row has no image, or is damaged.
        UserError: the row has no label, or a label that is no whole number.
    """
    values = reader.read(row, (image, label) if label else (image,))
    stored = values[image].get("bytes") if isinstance(values[image], dict) else values[image]
    if not isinstance(stored, bytes):
        raise ValueError(f"its column {image} contains no bytes of an image")
    if not label:
        return stored, None
    labels = values[label] if isinstance(values[label], list) else [values[label]]
    if not all(type(one) is int for one in labels):
        value_text = f"{values[label]!r:.60}"
        raise UserError(f"the column {label} of {name} must be a whole number, or a list of these, not {value_text}")
    return stored, labels
