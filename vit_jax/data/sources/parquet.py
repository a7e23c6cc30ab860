"""Parquet files with a column of images and a column of labels, as `datasets` and the Hugging Face hub have them.

An image is a struct of `bytes` and `path`, or bytes. A label is a whole number or the name of a class, or in
multi-label data a list of these. The columns are found by the description that the library `datasets` leaves in the
files: the only column of type Image, and the only one of type ClassLabel, whose class names are used; all files must
state the same names in the same order. Otherwise they are the columns `image` and `label`. `,image=COLUMN` and
`,label=COLUMN` after the pattern name other columns, and `,classes=FILE` the classes in the order of their labels.
Without that file, the classes of a column of names are the sorted names in the split train. The EXIF orientation is not
applied.
"""

import collections
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from vit_jax import UserError, user_errors
from vit_jax.data import shards
from vit_jax.data.sources.file_pattern import FoundFile, files_of_splits, find_files, read_options
from vit_jax.data.sources.sharded import OpenShard, ShardedSplits, read_labelled
from vit_jax.data.sources.source import ClassNames, Source, SourceConfig, compose
from vit_jax.data.sources.splits import resolve_name, select_examples, split_names
from vit_jax.storage import cache, filesystem

OPTIONS = ("image", "label", "classes")
CLASSES_A_ROW = 0.9  # with more, the column is not one of classes
ADVICE = "write the names of the classes into a file, one a line, and ,classes=FILE after the data source"


def open_parquet(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens Parquet files; `name` is a pattern with options. The end of each file of the split is read.

    Raises:
        UserError: a file, a split or a column is missing, a file is damaged, the number of classes is not known, or see
            `find_class_names`.
    """
    pattern, options = read_options(name, OPTIONS)
    files_by_split = find_parquet(pattern)
    existing = {one: resolve_name(one, files_by_split, f"split of {pattern}") for one in split_names(split)}
    footers = read_footers([file for whole in existing.values() for file in files_by_split[whole]])
    first = next(iter(footers))
    image, label = choose_columns(footers[first], options)
    chosen = {"image": image} | ({"label": label} if source_config.reads_labels else {})
    for path, footer in footers.items():
        check_columns(footer, chosen, path)
    class_names = None
    if source_config.reads_labels:
        class_names = find_class_names(pattern, files_by_split, footers, label, options.get("classes"))
    num_classes = len(class_names) if class_names else source_config.num_classes
    if num_classes is None:
        raise UserError(
            f"the number of classes of {pattern} is not known, since its files do not describe the column "
            f"{label}; set --config.data.num_classes, or {ADVICE}"
        )
    listed = {
        one: tuple(
            shards.Shard(file.path, footers[file.path].rows, file.size, file.version, "parquet")
            for file in files_by_split[whole]
        )
        for one, whole in existing.items()
    }
    splits = ShardedSplits(listed)
    numbers = {compose(name): number for number, name in enumerate(class_names or ())}
    read_record = partial(read_row, image=image, label=chosen.get("label"), numbers=numbers)
    parts = tuple(select_examples(split, splits.counts))
    named = "path" in footers[first].columns[image]
    return Source(
        name="parquet",
        parts=parts,
        sizes=splits.counts,
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


def choose_columns(footer: shards.Footer, options: Mapping[str, str]) -> tuple[str, str]:
    """Returns the column of images and the column of labels.

    Args:
        footer: the footer of a file.
        options: `image` or `label` -> the column that the user names for it.
    """
    described = describe_features(footer)
    chosen = {}
    for role, kind in (("image", "Image"), ("label", "ClassLabel")):
        fitting = [name for name, feature in described.items() if class_label(feature).get("_type") == kind]
        chosen[role] = options.get(role) or (fitting[0] if len(fitting) == 1 else role)
    return chosen["image"], chosen["label"]


def find_class_names(
    pattern: str,
    files_by_split: Mapping[str, Sequence[FoundFile]],
    footers: Mapping[str, shards.Footer],
    label: str,
    classes: str | None,
) -> ClassNames | None:
    """Returns the names of the classes in the order of their labels, or None if nothing states them.

    Args:
        pattern: the pattern of the files, for messages.
        files_by_split: split -> its files.
        footers: path of a file -> its footer, for the files that are read.
        label: the column of labels.
        classes: the path of a file of class names, local or remote; None: there is none.

    Raises:
        UserError: files contradict each other or the file of class names, this is wrong, or see `list_texts`.
    """
    check_classes(footers, label)
    stated = list_class_names(next(iter(footers.values())), label)
    if classes:
        names = read_class_names(classes)
        if stated and len(stated) != len(names):
            raise UserError(f"{classes} names {len(names):,} classes, but the files of {pattern} state {len(stated):,}")
        return names
    if stated or not any(label in footer.texts for footer in footers.values()):
        return stated
    return list_texts(pattern, files_by_split.get("train", next(iter(files_by_split.values()))), label)


def read_class_names(path: str) -> ClassNames:
    """Returns the lines of a local or remote file, each the name of a class, in the order of the labels.

    Raises:
        UserError: the file is missing, is no text, or see `check_names`.
    """
    with user_errors(f"cannot read {path}", UnicodeDecodeError):
        names = tuple(line.strip() for line in filesystem.read_bytes(path).decode("utf-8-sig").rstrip().splitlines())
    check_names(names or [""], path)
    return names


def list_texts(pattern: str, files: Sequence[FoundFile], label: str) -> ClassNames:
    """Returns the sorted names of classes in the column of labels of the files of a split, all of which are read.

    Raises:
        UserError: a file lacks the column, remote files do not fit into the cache, nearly every image has a class of
            its own, or see `check_names`.
    """
    size = sum(file.size or 0 for file in files if filesystem.is_remote(file.path))
    if size > cache.max_bytes():
        raise UserError(
            f"the column {label} of {pattern} holds names of classes, and its files ({size / 1e9:.3g} GB) do not fit "
            f"into the cache ({cache.max_bytes() / 1e9:.3g} GB) to list them; {ADVICE}"
        )
    footers = read_footers(files)
    for path, footer in footers.items():
        check_columns(footer, {"label": label}, path)
    named = [file for file in files if label in footers[file.path].texts]
    with ThreadPoolExecutor(filesystem.CONCURRENT_REQUESTS) as pool:
        found = pool.map(lambda file: shards.read_distinct_texts(file.path, label, file.version), named)
        names = sorted(set(itertools.chain(*found)))
    rows = sum(footer.rows for footer in footers.values())
    if len(names) > CLASSES_A_ROW * rows and rows > 1:
        raise UserError(
            f"the column {label} of {pattern} gives {rows:,} images {len(names):,} classes, such as {names[0]!r:.60}, "
            f"so it is not one of classes; write another after the data source, as ,label=COLUMN, or {ADVICE}"
        )
    check_names(names, f"the column {label} of {pattern}")
    return tuple(names)


def check_names(names: Sequence[str], where: str) -> None:
    """Raises UserError if a class has no name, or the name of another class; `where` says where the names stand."""
    counts = collections.Counter(map(compose, names))
    if wrong := [name for name, count in counts.items() if count > 1 or not name]:
        raise UserError(f"{where} has a class {wrong[0]!r:.60}; each class must have a name of its own")


def list_class_names(footer: shards.Footer, label: str) -> ClassNames | None:
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
    reader: shards.ParquetFile, row: int, name: str, image: str, label: str | None, numbers: Mapping[str, int]
) -> tuple[bytes, list[int] | None]:
    """Returns the encoded image and the labels of a row.

    Args:
        reader: the reader of the file.
        row: the number of the row in the file.
        name: the name of the row in messages.
        image: the column of images.
        label: the column of labels; None: the labels are None.
        numbers: name of a class, composed -> its label; empty if the classes have no names.

    Raises:
        ValueError: the row has no image, or is damaged.
        UserError: the row has no label, or a label that is neither a whole number nor the name of a class.
    """
    values = reader.read(row, (image, label) if label else (image,))
    stored = values[image].get("bytes") if isinstance(values[image], dict) else values[image]
    if not isinstance(stored, bytes):
        raise ValueError(f"its column {image} contains no bytes of an image")
    if not label:
        return stored, None
    found = values[label] if isinstance(values[label], list) else [values[label]]
    named: list[Any] = [numbers.get(compose(one), one) if isinstance(one, str) else one for one in found]
    if not all(type(one) is int for one in named):
        kind = "a whole number, or one of the names of the classes" if numbers else "a whole number"
        value_text = f"{values[label]!r:.60}"
        raise UserError(f"the column {label} of {name} must be {kind}, or a list of these, not {value_text}")
    return stored, named
