"""Images in folders: `{train,val,test}/<class>/*` or `<class>/*`."""

import collections
import hashlib
import os
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax import UserError, choose, files
from vit_jax.data.images import SUFFIXES, Encoded, Header, read_header, read_image

SPLITS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}  # folder -> split


class Folder:
    """Labelled image files of some splits of a folder.

    A class is a folder's name, labels follow the sorted names of `train`, hidden files are ignored. With `<class>/*`
    directly below the root, everything is `train`. A split's order is fixed but mixed (by a hash of each file's
    relative path), so that a slice such as `train[:90%]` is not a slice of the classes, and stays nearly the same when
    files are added.

    Attributes:
        counts: number of files of each split read.
        class_names: sorted.
        digest: of the relative paths and labels, in order.
    """

    def __init__(self, root: str, splits: list[str]):
        """Lists the files.

        Args:
            root: the folder, local or remote.
            splits: what to list: train, validation (or val), test.

        Raises:
            UserError: the folder is missing, empty or laid out in another way.
        """
        names = Names(root)
        self.root = names.root
        found = split_folders(names)
        splits = list(map(whole, splits))
        for name in splits:
            choose(f"split of the folder {self.root}", name, found)
        # Labels are those of training, also where only another split is read.
        self.class_names = tuple(names.subfolders(found.get("train", found[splits[0]])))
        listed = {name: self.list_split(found[name], names) for name in splits}
        self.files = {name: files for name, (files, _) in listed.items()}
        self.labels = {name: labels for name, (_, labels) in listed.items()}
        self.counts = {name: len(files) for name, files in self.files.items()}
        if "validation" in self.counts:
            self.counts["val"] = self.counts["validation"]
        digest = hashlib.sha256()
        for name in splits:
            digest.update(self.files[name].tobytes() + self.labels[name].tobytes())
        self.digest = digest.hexdigest()

    def list_split(self, folder: str, names: "Names") -> tuple[np.ndarray, np.ndarray]:
        """Returns the files (bytes, relative to the root) and the labels of a split, in their mixed order."""
        present = set(names.subfolders(folder))
        if unknown := sorted(present - set(self.class_names)):
            raise UserError(f"{os.path.join(self.root, folder)} has classes that train has not: {listing(unknown)}")
        paths, labels, missing = [], [], []
        for label, name in enumerate(self.class_names):
            relative = f"{folder}/{name}".lstrip("/")
            images = names.images_in(relative) if name in present else []
            paths += [os.fsencode(f"{relative}/{image}") for image in images]
            labels += [label] * len(images)
            missing += [] if images else [name]
        if not paths or (missing and SPLITS.get(folder, "train") == "train"):
            raise UserError(
                f"no images ({' '.join(SUFFIXES)}) lie in these classes of {os.path.join(self.root, folder)}: "
                f"{listing(missing)}"
            )
        order = np.argsort([hashlib.sha256(path).digest() for path in paths])
        return np.array(paths)[order], np.array(labels, np.int32)[order]

    def read(self, split: str, index: int) -> tuple[Encoded, int]:
        """Returns (image, label) number `index` of a split.

        Raises:
            DecodeError: the file is unreadable.
            UserError: its store does not answer.
        """
        return read_image(self.path(split, index)), self.label(split, index)

    def headers(self) -> Callable[[str, int], Header] | None:
        """Returns (split, index) -> what the file's header says; None: the folder is remote."""
        return None if files.is_remote(self.root) else self.header

    def header(self, split: str, index: int) -> Header:
        """Returns what the header of file `index` of a split says.

        Raises:
            DecodeError: see `images.read_header`.
        """
        return read_header(self.path(split, index))

    def label(self, split: str, index: int) -> int:
        """Returns the label of file `index` of a split."""
        return int(self.labels[whole(split)][index])

    def stamp(self, split: str, rows: Sequence[int]) -> str:
        """Returns a short text that differs when sizes or times of these files do; of remote files it is empty.

        It is no part of the digest: a copy of the folder trains as the folder does.
        """
        if files.is_remote(self.root):
            return ""
        digest = hashlib.sha256()
        for path in (self.path(split, index) for index in rows):
            try:
                status = os.stat(path)
                digest.update(b"%d %d\n" % (status.st_size, status.st_mtime_ns))
            except OSError:  # whoever reads it says so
                digest.update(b"none\n")
        return digest.hexdigest()[:16]

    def path(self, split: str, index: int) -> str:
        """Returns the path of file `index` of a split."""
        return os.path.join(self.root, os.fsdecode(bytes(self.files[whole(split)][index])))


def whole(split: str) -> str:
    """Returns the name under which a split is kept: `val` is short for `validation`."""
    return "validation" if split == "val" else split


class Names:
    """What lies in the folders below a root: a local one is read folder by folder, a remote one is listed at once."""

    def __init__(self, root: str):
        """Lists a remote root.

        Raises:
            UserError: there is no such folder, or its store cannot be asked.
        """
        self.root = root if files.is_remote(root) else os.path.expanduser(root)
        self.remote: dict[str, tuple[set[str], list[str]]] | None = None
        if files.is_remote(root):
            self.remote = collections.defaultdict(lambda: (set(), []))
            for path in files.find(root):
                folder, _, name = path.rpartition("/")
                self.remote[folder][1].append(name)
                while folder:
                    folder, _, name = folder.rpartition("/")
                    self.remote[folder][0].add(name)
        if not (self.remote if self.remote is not None else os.path.isdir(self.root)):
            raise UserError(f"there is no folder {files.absolute(root)}")

    def subfolders(self, folder: str) -> list[str]:
        """Returns the sorted names of the folders in a folder, given relative to the root, but for hidden ones."""
        if self.remote is not None:
            return sorted(name for name in self.remote[folder][0] if not name.startswith("."))
        with os.scandir(os.path.join(self.root, folder)) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())

    def images_in(self, folder: str) -> list[str]:
        """Returns the sorted names of the images in a folder, by their suffix, but for hidden ones."""
        if self.remote is not None:
            names = self.remote[folder][1]
        else:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                names = [entry.name for entry in entries]
        return sorted(name for name in names if not name.startswith(".") and name.lower().endswith(SUFFIXES))


def list_splits(root: str) -> list[str]:
    """Returns the names of the splits of a folder; raises UserError as `split_folders` does."""
    return list(split_folders(Names(root)))


def split_folders(names: Names) -> dict[str, str]:
    """Returns split -> folder below the root ('' is the root).

    Raises:
        UserError: neither `{train,val,test}/<class>/*` nor `<class>/*` is there.
    """
    root, folders, images = names.root, names.subfolders(""), names.images_in("")
    splits = [name for name in folders if name in SPLITS]
    others = [name for name in folders if name not in SPLITS]
    wanted = "it must hold either {train,val,test}/<class>/* or <class>/*"
    if images:
        raise UserError(f"images lie directly in {root} ({listing(images)}); {wanted}")
    if not folders:
        raise UserError(f"the folder {root} holds no class folders; {wanted}")
    if splits and others:
        raise UserError(f"the folder {root} mixes splits ({listing(splits)}) with others ({listing(others)}); {wanted}")
    if not splits:
        return {"train": ""}
    if {"val", "validation"} <= set(splits):
        raise UserError(f"the folder {root} holds both val and validation; keep one of them")
    for name in splits:
        if images := names.images_in(name):
            raise UserError(f"images lie directly in {os.path.join(root, name)} ({listing(images)}); {wanted}")
        if not names.subfolders(name):
            raise UserError(f"the folder {os.path.join(root, name)} holds no class folders; {wanted}")
    return {SPLITS[name]: name for name in splits}


def listing(names: list[str]) -> str:
    """Returns the first names for an error message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
