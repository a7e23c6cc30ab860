"""Where examples come from: scikit-learn's digits, prepared TFDS data, image folders, records, and synthetic images.

A source is indexed like a list and gives `{"image": ..., "label": ...}`: the image RGB uint8 [height, width, 3] or not
yet decoded, the label an int, or in multi-label data an array. All of them pickle, so that worker processes can read
them.
"""

import dataclasses
import hashlib
import importlib.util
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int32
from ml_collections import ConfigDict

from vit_jax import UserError, choose
from vit_jax.data import images
from vit_jax.data.sources import folder, splits, tfds
from vit_jax.data.sources.array_record import ArrayRecords, list_record_splits

Label: TypeAlias = int | Int32[np.ndarray, " max_labels"]


@dataclasses.dataclass(frozen=True)
class Source:
    """The examples of a split.

    Attributes:
        name: of the data set, with its version where it has one.
        parts: what the split takes, in order: (name of a whole split, range of its examples).
        read: (whole split, position) -> (image, decoded or not, label).
        num_classes: the labels are 0 to num_classes - 1.
        class_names: in the order of the labels, or None.
        digest: of what the name does not tell, such as the list of files.
        max_labels: of one image in multi-label data, where a label is an array of so many: each class once, then -1;
            None: every image has one.
        stamp: (whole split, positions) -> a short text that differs when the files there changed since, their names
            being the same; None where the digest says what there is.
        label: (whole split, position) -> label, where it is known without reading the image; else None.
        header: (whole split, position) -> what the image's header says, where it lies in a local file of its own; else
            None.
        class_ids: names of the classes, for the fingerprint, where `class_names` are words; else None.
    """

    name: str
    parts: tuple[tuple[str, range], ...]
    read: Callable[[str, int], tuple[images.RGB | images.EncodedImage, Label]]
    num_classes: int
    class_names: tuple[str, ...] | None = None
    digest: str = ""
    max_labels: int | None = None
    stamp: Callable[[str, Sequence[int]], str] | None = None
    label: Callable[[str, int], Label] | None = None
    header: Callable[[str, int], images.ImageHeader] | None = None
    class_ids: tuple[str, ...] | None = None

    def __len__(self) -> int:
        """Returns the number of examples."""
        return sum(len(rows) for _, rows in self.parts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns `{"image": RGB or EncodedImage, "label": int or array}`.

        Raises:
            DecodeError: the file is unreadable.
        """
        image, label = self.read(*splits.locate(self.parts, int(index)))
        return {"image": image, "label": label}

    def read_image_header(self, index: int) -> images.ImageHeader:
        """Returns what the header of the image says, where `header` is given.

        Raises:
            DecodeError: the file is unreadable.
        """
        assert self.header
        return self.header(*splits.locate(self.parts, index))

    def overlaps(self, other: "Source") -> bool:
        """Returns whether two splits of the same data share examples."""
        return any(
            splits.whole(name) == splits.whole(same) and max(rows.start, others.start) < min(rows.stop, others.stop)
            for name, rows in self.parts
            for same, others in other.parts
        )

    @property
    def fingerprint(self) -> str:
        """A short text that differs when data set, version, split, count, files or class names differ."""
        names = self.class_ids or self.class_names
        identity = repr((self.name, self.parts, len(self), self.num_classes, names, self.digest))
        return hashlib.sha256(identity.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """Where examples come from.

    Attributes:
        source: `digits`, `tfds:NAME`, `folder:PATH`, `array_record:PATTERN` or `synthetic`.
        data_dir: where TFDS data lies.
        num_classes: of shards without info.json, and of synthetic images.
        max_labels: of shards without info.json.
        num_examples: synthetic images of the split `train_split`.
        train_split: as a config names it.
        resolution: of synthetic images.
    """

    source: str
    data_dir: str | None = None
    num_classes: int | None = None
    max_labels: int | None = None
    num_examples: int | None = None
    train_split: str | None = None
    resolution: int | None = None


def open_source(config: ConfigDict, split: str) -> Source:
    """Opens a split of the data that the config names; see `open_split`."""
    origin = SourceConfig(
        source=config.data.source,
        data_dir=config.data.data_dir,
        num_classes=config.data.num_classes,
        max_labels=config.data.max_labels,
        num_examples=config.data.num_examples,
        train_split=config.data.split,
        resolution=config.resolution,
    )
    return open_split(origin, split)


def open_split(origin: SourceConfig, split: str) -> Source:
    """Opens a split (`train[:98%]+test`), written as TFDS does; see `splits`.

    Raises:
        UserError: the source is unknown or absent, or has no such split.
    """
    kind, name = parse_source(origin.source)
    return OPENERS[kind](origin, name, split)


def split_names(origin: SourceConfig, asked: Sequence[str] = ()) -> list[str]:
    """Returns the names of the whole splits that are asked for, or of all.

    Raises:
        UserError: the source is unknown or absent, has any split one likes, or not one that is asked for.
    """
    kind, name = parse_source(origin.source)
    there = LISTERS[choose("data source that has a list of splits", kind, LISTERS)](origin, name)
    return [splits.resolve(split, there) for split in asked] or there


def parse_source(source: str) -> tuple[str, str]:
    """Returns kind and name of a data source, or raises UserError."""
    kind, _, name = source.partition(":")
    choose("data source", kind, OPENERS)
    if (kind in EXAMPLES) != bool(name):
        hint = f"write {kind}:{EXAMPLES[kind]}" if kind in EXAMPLES else f"write {kind} alone"
        raise UserError(f"cannot read the data source {source!r}; {hint}")
    return kind, name


def open_digits(origin: SourceConfig, name: str, split: str) -> Source:
    """Opens scikit-learn's 1,797 handwritten digits: 8 x 8 pixels, grey repeated to RGB, 10 classes.

    The data has no test split of its own. `test` is a fifth of each class, drawn once with a fixed seed; `train` is the
    rest. A pixel is `round(value * 255 / 16)`.
    """
    digits = Digits()
    counts = {split: len(labels) for split, (_, labels) in digits.splits.items()}
    return Source("digits", tuple(splits.select_examples(split, counts)), digits.read, 10, tuple("0123456789"))


class Digits:
    """The digits in memory."""

    def __init__(self):
        """Loads and divides them."""
        # Its file alone: to import scikit-learn takes longer than a small training run.
        package = importlib.util.find_spec("sklearn")
        assert package and package.submodule_search_locations
        [folder] = package.submodule_search_locations
        table = np.loadtxt(f"{folder}/datasets/data/digits.csv.gz", np.int64, delimiter=",")
        values, labels = table[:, :-1], table[:, -1]
        pixels = np.rint(values.reshape(-1, 8, 8, 1) * 255 / 16).astype(np.uint8).repeat(3, axis=3)
        random = np.random.RandomState(0)  # its stream is frozen, that of a Generator is not
        by_class = [random.permutation(np.flatnonzero(labels == label)) for label in range(10)]
        held_out = np.isin(np.arange(len(labels)), np.concatenate([rows[: round(len(rows) / 5)] for rows in by_class]))
        self.splits = {
            "train": (pixels[~held_out], labels[~held_out]),
            "test": (pixels[held_out], labels[held_out]),
        }

    def read(self, split: str, index: int) -> tuple[images.RGB, int]:
        """Returns (image, label) number `index` of a split."""
        pixels, labels = self.splits[split]
        return pixels[index], int(labels[index])


def open_folder(origin: SourceConfig, name: str, split: str) -> Source:
    """Opens image files in folders; see `folder.ImageFolder`. EXIF orientation is applied."""
    opened = folder.ImageFolder(name, splits.names(split))
    details: dict[str, Any] = {"stamp": opened.stamp, "label": opened.label, "header": opened.headers()}
    return Source(
        name="folder",
        parts=tuple(splits.select_examples(split, opened.counts)),
        read=opened.read,
        num_classes=len(opened.class_names),
        class_names=opened.words,
        class_ids=opened.class_names,
        digest=opened.digest,
        **details,
    )


def open_records(origin: SourceConfig, name: str, split: str) -> Source:
    """Opens ArrayRecord shards; see `records`. EXIF orientation is not applied, as published."""
    records = ArrayRecords(name, splits.names(split), origin.num_classes, origin.max_labels)
    parts = tuple(splits.select_examples(split, records.counts))
    records.require_room(parts)
    title = f"array_record:{records.name}"
    details = records.num_classes, records.class_names, records.digest, records.max_labels
    return Source(title, parts, records.read, *details)


def open_synthetic(origin: SourceConfig, name: str, split: str) -> Source:
    """Opens random images of one size: noise around a colour that tells the class.

    Any split exists. That of training has `num_examples`, any other at most 1,000 of them.

    Raises:
        UserError: `num_classes` or `num_examples` is unset.
    """
    num_classes, count, resolution = origin.num_classes, origin.num_examples, origin.resolution
    if not num_classes or not count or not resolution:
        raise UserError("the data source synthetic needs --config.data.num_classes and --config.data.num_examples")
    splits.parse(split)
    count = count if split == origin.train_split else min(count, 1000)
    synthetic = Synthetic(resolution, num_classes)
    return Source(f"synthetic {resolution}", ((split, range(count)),), synthetic.read, num_classes)


class Synthetic:
    """Images computed from their number."""

    def __init__(self, resolution: int, num_classes: int):
        """Makes the noise that all images are cut from."""
        self.resolution, self.num_classes = resolution, num_classes
        random = np.random.RandomState(0)
        self.noise = random.randint(0, 128, (2 * resolution, 2 * resolution, 3), np.uint8)

    def read(self, split: str, index: int) -> tuple[images.RGB, int]:
        """Returns (image, label) number `index` of a split."""
        mixed = zlib.crc32(f"{split} {index}".encode())
        label = mixed % self.num_classes
        top, left = (mixed >> 8) % self.resolution, (mixed >> 20) % self.resolution
        colour = np.frombuffer(zlib.crc32(b"%d" % label).to_bytes(4, "little"), np.uint8)[:3] >> 1
        return self.noise[top : top + self.resolution, left : left + self.resolution] + colour, label


def open_tfds(origin: SourceConfig, name: str, split: str) -> Source:
    """Opens data that TFDS has prepared as ArrayRecord, without TensorFlow; `data_dir` says where it lies.

    EXIF orientation is not applied, as published.

    Raises:
        UserError: it is not there, in another format, or has no image and label.
    """
    builder = tfds.find(name, origin.data_dir)
    info, label = builder.info, builder.info.features["label"]
    parts = tuple(splits.select_examples(split, {name: info.splits[name].num_examples for name in info.splits}))
    data = tfds.open_splits(builder, [part for part, _ in parts])
    names = tuple(label.names) if label.names else None
    return Source(f"tfds:{data.name}", parts, data.read, label.num_classes, names)


OPENERS: dict[str, Callable[[SourceConfig, str, str], Source]] = {
    "array_record": open_records,
    "digits": open_digits,
    "folder": open_folder,
    "synthetic": open_synthetic,
    "tfds": open_tfds,
}
LISTERS: dict[str, Callable[[SourceConfig, str], list[str]]] = {
    "array_record": lambda origin, name: list_record_splits(name),
    "digits": lambda origin, name: ["train", "test"],
    "folder": lambda origin, name: folder.list_folder_splits(name),
    "tfds": lambda origin, name: list(tfds.find(name, origin.data_dir).info.splits),
}
EXAMPLES = {"array_record": "/path/to/shards", "folder": "/path/to/images", "tfds": "cifar10"}  # kinds with a name
