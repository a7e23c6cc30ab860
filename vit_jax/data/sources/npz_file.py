"""Images and labels in one .npz file: arrays `<split>_images`, `<split>_labels` and perhaps `class_names`."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from vit_jax import NPZ_ERRORS, UserError, user_errors
from vit_jax.data.sources.source import Source, SourceConfig
from vit_jax.data.sources.splits import resolve_name, select_examples, split_names
from vit_jax.storage import filesystem

IMAGES, LABELS, CLASSES = "_images", "_labels", "class_names"


class NpzFile:
    """The images of some splits of a file, in memory, and the labels of all its splits.

    Attributes:
        images: split, under the name that the caller gave -> its images, RGB uint8 [n, height, width, 3].
        labels: split, under its name in the file -> its labels [n]; of all splits of the file; empty if not read.
        class_names: the names of the classes in the order of the labels, or None if the file has none.
        num_classes: the number of class names; without names, the largest label of any split + 1.
        digest: a hash of the names and contents of the splits that were read.
    """

    def __init__(self, path: str, splits: list[str], reads_labels: bool = True):
        """Reads the splits, which need no labels where `reads_labels` is False.

        Raises:
            UserError: the file cannot be read, lacks a split, or has arrays of another form.
        """
        with user_errors(f"cannot read {path}", *NPZ_ERRORS), open_arrays(path) as arrays:
            existing = find_splits(arrays, path)
            self.labels = {split: read_labels(arrays, split, path) for split in existing if reads_labels}
            self.class_names = read_class_names(arrays, path)
            largest = max((int(labels.max()) for labels in self.labels.values() if len(labels)), default=-1)
            self.num_classes = len(self.class_names) if self.class_names else largest + 1
            if largest >= self.num_classes:
                few = f"{path} has the label {largest}, but only {self.num_classes} names in {CLASSES}"
                raise UserError(f"{few}, which are those of the labels 0 to {self.num_classes - 1}.")
            names = {split: resolve_name(split, existing, f"split of {path}") for split in splits}
            self.images = {split: read_images(arrays, name, path) for split, name in names.items()}
        for split, name in names.items() if reads_labels else ():
            if len(self.images[split]) != len(self.labels[name]):
                numbers = f"{len(self.images[split]):,} {name}{IMAGES}, but {len(self.labels[name]):,} {name}{LABELS}"
                raise UserError(f"{path} has {numbers}.")
        self.names = names
        digest = hashlib.sha256()
        for split, name in sorted(names.items()):
            digest.update(repr((name, self.images[split].shape)).encode())
            digest.update(np.ascontiguousarray(self.images[split]))
            if reads_labels:
                digest.update(self.labels[name].astype(np.int64).tobytes())
        self.digest = digest.hexdigest()

    def read_example(self, split: str, index: int) -> tuple[UInt8[np.ndarray, "height width 3"], int]:
        """Returns (image, label) number `index` of a split."""
        return self.images[split][index], self.read_label(split, index)

    def split_labels(self, split: str) -> Int[np.ndarray, " n"]:
        """Returns the labels of all images of a split."""
        return self.labels[self.names[split]]

    def read_label(self, split: str, index: int) -> int:
        """Returns the label of an image, -1 if labels were not read."""
        return int(self.labels[self.names[split]][index]) if self.labels else -1


def open_npz(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens an .npz file, local or remote; its arrays are read into memory.

    Raises:
        UserError: see `NpzFile`.
    """
    file = NpzFile(name, split_names(split), source_config.reads_labels)
    counts = {one: len(images) for one, images in file.images.items()}
    return Source(
        name=f"npz:{os.path.basename(name)}",
        parts=tuple(select_examples(split, counts)),
        sizes=counts,
        read_example=file.read_example,
        num_classes=file.num_classes,
        class_names=file.class_names,
        digest=file.digest,
        read_label=file.read_label,
        split_labels=file.split_labels if source_config.reads_labels else None,
        split_names=tuple(file.labels),
    )


def list_npz_splits(source_config: SourceConfig, name: str) -> list[str]:
    """Returns the names of the splits of an .npz file."""
    with user_errors(f"cannot read {name}", *NPZ_ERRORS), open_arrays(name) as arrays:
        return find_splits(arrays, name)


def open_arrays(path: str) -> Any:
    """Returns the arrays of a file, each read when it is asked for.

    Raises:
        UserError: it is not an .npz file.
    """
    arrays = np.load(filesystem.local_copy(path), allow_pickle=False)
    if isinstance(arrays, np.ndarray):
        raise UserError(f"{path} is one array, not an .npz file.")
    return arrays


def find_splits(arrays: Mapping[str, Any], path: str) -> list[str]:
    """Returns the names of the splits of a file, sorted.

    Raises:
        UserError: there are no splits.
    """
    splits = sorted(name.removesuffix(IMAGES) for name in arrays if name.endswith(IMAGES))
    if not splits:
        raise UserError(f"{path} has no images: a split is two arrays, such as train{IMAGES} and train{LABELS}.")
    return splits


def read_labels(arrays: Mapping[str, Any], split: str, path: str) -> np.ndarray:
    """Returns the labels of a split.

    Raises:
        UserError: there are no labels, or they are not whole numbers [n] of 0 or more, or -1 for an image without one.
    """
    if split + LABELS not in arrays:
        raise UserError(f"{path} has {split}{IMAGES}, but no {split}{LABELS}.")
    labels = arrays[split + LABELS]
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or labels.min(initial=0) < -1:
        kind = f"{labels.dtype} {list(labels.shape)}"
        raise UserError(f"{split}{LABELS} of {path} must be whole numbers [n] of -1 (no label) or more, not {kind}.")
    return labels


def read_class_names(arrays: Mapping[str, Any], path: str) -> tuple[str, ...] | None:
    """Returns the names of the classes, or None if there are none; raises UserError if they are not [classes]."""
    if CLASSES not in arrays:
        return None
    names = arrays[CLASSES]
    if names.ndim != 1:
        raise UserError(f"{CLASSES} of {path} must be names [classes], not {names.dtype} {list(names.shape)}.")
    return tuple(map(str, names.tolist()))


def read_images(arrays: Mapping[str, Any], split: str, path: str) -> UInt8[np.ndarray, "n height width 3"]:
    """Returns the images of a split; raises UserError if they are not uint8 [n, height, width, 3]."""
    images = arrays[split + IMAGES]
    if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8:
        kind = f"{images.dtype} {list(images.shape)}"
        raise UserError(f"{split}{IMAGES} of {path} must be uint8 [n, height, width, 3], not {kind}.")
    return images
