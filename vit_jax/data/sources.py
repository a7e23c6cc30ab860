"""Where examples come from: scikit-learn's digits, prepared TFDS data, image folders, and synthetic images.

A source is indexed like a list and gives `{"image": RGB uint8 [height, width, 3], "label": int}`. All of them pickle,
so that worker processes can read them.
"""

import dataclasses
import hashlib
import os
import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from vit_jax import UserError, choose, files
from vit_jax.data import images, splits
from vit_jax.data.folder import Folder, encoded

__all__ = ["Source", "absolute", "encoded", "open_source"]

absolute = files.absolute


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
    """

    name: str
    parts: tuple[tuple[str, range], ...]
    read: Callable[[str, int], tuple[images.RGB | images.Encoded, int]]
    num_classes: int
    class_names: tuple[str, ...] | None = None
    digest: str = ""

    def __len__(self) -> int:
        """Returns the number of examples."""
        return sum(len(rows) for _, rows in self.parts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns `{"image": RGB uint8, "label": int}`.

        Raises:
            DecodeError: the image is unreadable.
        """
        image, label = self.read(*splits.locate(self.parts, int(index)))
        image = image.decode() if isinstance(image, images.Encoded) else image
        return {"image": image, "label": label}

    @property
    def fingerprint(self) -> str:
        """A short text that differs when data set, version, split, count, files or class names differ."""
        identity = repr((self.name, self.parts, len(self), self.num_classes, self.class_names, self.digest))
        return hashlib.sha256(identity.encode()).hexdigest()[:16]


def open_source(config: ConfigDict, split: str) -> Source:
    """Opens a split (`train[:98%]+test`) of the data that the config names.

    Args:
        config: the whole config; `data.source` is `digits`, `tfds:NAME`, `folder:PATH` or `synthetic`.
        split: as TFDS writes it; see `splits`.

    Raises:
        UserError: the source is unknown or absent, or has no such split.
    """
    kind, _, name = config.data.source.partition(":")
    opener = OPENERS[choose("data source", kind, OPENERS)]
    if (kind in ("tfds", "folder")) != bool(name):
        example = {"tfds": "tfds:cifar10", "folder": "folder:/path/to/images"}
        hint = f"write {example[kind]}" if kind in example else f"write {kind} alone"
        raise UserError(f"cannot read the data source {config.data.source!r}; {hint}")
    return opener(config, name, split)


def open_digits(config: ConfigDict, name: str, split: str) -> Source:
    """Opens scikit-learn's 1,797 handwritten digits: 8 x 8 pixels, grey repeated to RGB, 10 classes.

    The data has no test split of its own. `test` is a fifth of each class, drawn once with a fixed seed; `train` is the
    rest. A pixel is `round(value * 255 / 16)`.
    """
    digits = Digits()
    counts = {split: len(labels) for split, (_, labels) in digits.splits.items()}
    return Source("digits", tuple(splits.select(split, counts)), digits.read, 10, tuple("0123456789"))


class Digits:
    """The digits in memory."""

    def __init__(self):
        """Loads and divides them."""
        from sklearn.datasets import load_digits

        values, labels = load_digits(return_X_y=True)
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


def open_folder(config: ConfigDict, name: str, split: str) -> Source:
    """Opens image files in folders; see `folder.Folder`. EXIF orientation is applied."""
    folder = Folder(name, splits.names(split))
    parts = tuple(splits.select(split, folder.counts))
    return Source("folder", parts, folder.read, len(folder.class_names), folder.class_names, folder.digest)


def open_synthetic(config: ConfigDict, name: str, split: str) -> Source:
    """Opens random images of `config.resolution`: noise around a colour that tells the class.

    Any split exists. That of training has `data.num_examples` examples, any other at most 1,000 of them.

    Raises:
        UserError: `data.num_classes` or `data.num_examples` is unset.
    """
    num_classes, count = config.data.num_classes, config.data.num_examples
    if not num_classes or not count:
        raise UserError("the data source synthetic needs --config.data.num_classes and --config.data.num_examples")
    splits.parse(split)
    count = count if split == config.data.split else min(count, 1000)
    synthetic = Synthetic(config.resolution, num_classes)
    return Source(f"synthetic {config.resolution}", ((split, range(count)),), synthetic.read, num_classes)


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


def open_tfds(config: ConfigDict, name: str, split: str) -> Source:
    """Opens data that TFDS has prepared as ArrayRecord, without TensorFlow; `data.data_dir` says where it lies.

    EXIF orientation is not applied, as published.

    Raises:
        UserError: it is not there, in another format, or has no image and label.
    """
    import tensorflow_datasets as tfds

    where = config.data.data_dir or os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets")
    build = f"tfds build {name} --file_format=array_record --data_dir={where}"
    try:
        if files.is_remote(where):
            builder = tfds.builder_from_directory(files.local_folder(remote_tfds(where, name)))
        else:
            builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=where)
    except tfds.core.DatasetNotFoundError:
        raise UserError(
            f"there is no TFDS dataset {name!r} in {where}; it must lie there as ArrayRecord files whose examples have "
            f"an `image` (encoded) and a `label` (one class); a public one is prepared by `{build}`, where TensorFlow "
            "is installed; --config.data.source=synthetic runs without data"
        ) from None
    info = builder.info
    if tfds.core.FileFormat.ARRAY_RECORD not in info.available_file_formats():
        raise UserError(f"the TFDS dataset {name!r} in {where} is not in ArrayRecord; prepare it with `{build}`")
    if not {"image", "label"} <= set(info.features) or not hasattr(info.features["label"], "num_classes"):
        raise UserError(f"the TFDS dataset {name!r} has no image and class label, but {', '.join(info.features)}")
    parts = tuple(splits.select(split, {name: info.splits[name].num_examples for name in info.splits}))
    # Left encoded: the decoder that TFDS uses without TensorFlow gives other pixels than the published ones.
    skip = {"image": tfds.decode.SkipDecoding()}
    data = {part: builder.as_data_source(split=part, decoders=skip) for part, _ in parts}
    label = info.features["label"]
    names = tuple(label.names) if label.names else None
    return Source(f"tfds:{info.full_name}", parts, Tfds(info.full_name, data).read, label.num_classes, names)


def remote_tfds(where: str, name: str) -> str:
    """Returns the folder of the newest version of a data set, or of the one named, below a remote data directory.

    Args:
        where: the data directory.
        name: of the data set as TFDS writes it: name, name/config, name:version or name/config:version.

    Raises:
        UserError: there are several configurations, or the store cannot be asked.
        DatasetNotFoundError: there is none.
    """
    import tensorflow_datasets as tfds

    path, _, version = name.partition(":")
    top = files.join(where, path)
    infos = [one.split("/") for one in files.find(top) if one.endswith("/dataset_info.json")]
    found = [parts[:-1] for parts in infos if not version or parts[-2] == version]
    if not found:
        raise tfds.core.DatasetNotFoundError(name)
    configs = sorted({"/".join([path, *parts[:-1]]) for parts in found})
    if len(configs) > 1:
        raise UserError(f"{top} holds several configurations; name one of them: {', '.join(configs)}")
    return files.join(top, *max(found, key=lambda parts: [int(number) for number in re.findall(r"\d+", parts[-1])]))


@dataclasses.dataclass(frozen=True)
class Tfds:
    """The data sources of some splits."""

    name: str
    data: dict[str, Any]

    def read(self, split: str, index: int) -> tuple[images.Encoded, int]:
        """Returns (image, label) number `index` of a split."""
        example = self.data[split][index]
        return images.Encoded(example["image"], f"{self.name} {split} {index}"), int(example["label"])


OPENERS: dict[str, Callable[[ConfigDict, str, str], Source]] = {
    "digits": open_digits,
    "folder": open_folder,
    "synthetic": open_synthetic,
    "tfds": open_tfds,
}
