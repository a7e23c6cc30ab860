"""Images in folders: `{train,val,test}/<class>/*` or `<class>/*`, or flat beside a list of file and class."""

import collections
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax import UserError
from vit_jax.data.images import IMAGE_SUFFIXES, EncodedImage, ImageHeader, read_image, read_image_header
from vit_jax.data.sources import label_files
from vit_jax.data.sources.folder_tree import Names, joined
from vit_jax.data.sources.splits import resolve, whole
from vit_jax.storage import filesystem

SPLITS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}  # folder -> split
WANTED = "it must hold either {train,val,test}/<class>/* or <class>/*"
FLAT = "the labels of a split without class folders are read from a list of file and class, such as {}.csv"
WORDS = ("words.txt", "LOC_synset_mapping.txt")  # what classes are called, as Tiny-ImageNet and ImageNet have it


class ImageFolder:
    """Labelled image files of some splits of a folder.

    A class is a folder's name, labels follow the sorted names of `train`, images in folders within a class are of the
    class, and hidden files are ignored. With `<class>/*` directly below the root, everything is `train`. A split
    without class folders has a list of file and class in it or beside it. A split's order is fixed but mixed (by a hash
    of each file's relative path), so that a slice such as `train[:90%]` is not a slice of the classes, and stays nearly
    the same when files are added.

    Attributes:
        counts: number of files of each split read.
        class_names: sorted.
        words: the same in words, where a file beside the splits has them; else as they are.
        digest: of the relative paths and labels, in order.
    """

    def __init__(self, root: str, splits: list[str]):
        """Lists the files, and logs once what is left out of them.

        Args:
            root: the folder, local or remote.
            splits: what to list: train, validation (or val), test.

        Raises:
            UserError: the folder is missing, empty or laid out in another way.
        """
        names = Names(root)
        self.root = names.root
        found = split_folders(names)
        for name in splits:
            resolve(name, found, f"split of the folder {self.root}")
        splits = list(map(whole, splits))
        # Labels are those of training, also where only another split is read.
        self.class_names = class_names(names, found.get("train", found[splits[0]]))
        texts = [names.text(path) for path in names.beside_splits() if path.rpartition("/")[2] in WORDS]
        self.words = label_files.in_words(self.class_names, texts)
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

    def list_split(self, folder: str, names: Names) -> tuple[np.ndarray, np.ndarray]:
        """Returns the files (bytes, relative to the root) and the labels of a split, in their mixed order."""
        left_out: collections.Counter[str] = collections.Counter()
        if has_class_folders(names, folder, self.class_names):
            classes = self.of_class_folders(folder, names, left_out)
        else:
            classes = of_list(names, folder, left_out)
            known = set(self.class_names)
            # ImageNet's lists say where in the image the class is, too.
            classes = {path: one if one in known else one.partition(" ")[0] for path, one in classes.items()}
            if unknown := sorted(set(classes.values()) - known):
                raise UserError(f"the list of {names.path(folder)} has classes that train has not: {listing(unknown)}")
        if left_out:
            told = ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()))
            tell(f"{names.path(folder)}: {len(classes):,} images are read, left out are {told}.")
        number = {name: label for label, name in enumerate(self.class_names)}
        paths = [os.fsencode(path) for path in classes]
        labels = np.array([number[name] for name in classes.values()], np.int32)
        order = np.argsort([hashlib.sha256(path).digest() for path in paths])
        return np.array(paths)[order], labels[order]

    def of_class_folders(self, folder: str, names: Names, left_out: collections.Counter[str]) -> dict[str, str]:
        """Returns file -> class of a split with class folders, and counts what is left out.

        Raises:
            UserError: there are other classes, no images, or, in train, none of a class.
        """
        place, present = names.path(folder), set(names.subfolders(folder))
        if unknown := sorted(present - set(self.class_names)):
            raise UserError(f"{place} has classes that train has not: {listing(unknown)}; {FLAT.format(place)}")
        classes: dict[str, str] = {}
        missing = []
        for name in self.class_names:
            images = names.images_below(joined(folder, name), left_out) if name in present else []
            classes |= dict.fromkeys(images, name)
            missing += [] if images else [name]
        if not classes or (missing and SPLITS.get(folder, "train") == "train"):
            raise UserError(
                f"no images ({' '.join(IMAGE_SUFFIXES)}) lie in these classes of {place}: {listing(missing)}"
            )
        return classes

    def read(self, split: str, index: int) -> tuple[EncodedImage, int]:
        """Returns (image, label) number `index` of a split.

        Raises:
            DecodeError: the file is unreadable.
            UserError: its store does not answer.
        """
        return read_image(self.path(split, index)), self.label(split, index)

    def headers(self) -> Callable[[str, int], ImageHeader] | None:
        """Returns (split, index) -> what the file's header says; None: the folder is remote."""
        return None if filesystem.is_remote(self.root) else self.header

    def header(self, split: str, index: int) -> ImageHeader:
        """Returns what the header of file `index` of a split says.

        Raises:
            DecodeError: see `decode.read_image_header`.
        """
        return read_image_header(self.path(split, index))

    def label(self, split: str, index: int) -> int:
        """Returns the label of file `index` of a split."""
        return int(self.labels[whole(split)][index])

    def stamp(self, split: str, rows: Sequence[int]) -> str:
        """Returns a short text that differs when sizes or times of these files do; of remote files it is empty.

        It is no part of the digest: a copy of the folder trains as the folder does.
        """
        if filesystem.is_remote(self.root):
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


@functools.cache
def tell(line: str) -> None:
    """Logs a line once."""
    logging.getLogger(__name__).warning(line)


def class_names(names: Names, folder: str) -> tuple[str, ...]:
    """Returns the sorted classes of the split train, which lies in `folder`: its folders', or its list's.

    Raises:
        UserError: it has neither.
    """
    if names.images_in(folder):
        return tuple(sorted(set(of_list(names, folder, collections.Counter()).values())))
    return tuple(names.subfolders(folder))


def has_class_folders(names: Names, folder: str, classes: tuple[str, ...]) -> bool:
    """Returns whether a split is read by its class folders, not by a list: where they are those of train."""
    present = names.subfolders(folder)
    if names.images_in(folder) or not present:
        return False
    return set(present) <= set(classes) or not lists_of(names, folder)


def of_list(names: Names, folder: str, left_out: collections.Counter[str]) -> dict[str, str]:
    """Returns file -> class of a split without class folders, and counts what is left out.

    Raises:
        UserError: there are no images, or not just one list of them, or it gives a file two classes.
    """
    place, found = names.path(folder), lists_of(names, folder)
    if images := names.images_in(folder):
        if not found:
            raise UserError(f"images lie directly in {place} ({listing(images)}); {WANTED}; {FLAT.format(place)}")
    elif not names.subfolders(folder):
        raise UserError(f"the folder {place} holds no class folders; {WANTED}")
    if len(found) > 1:
        raise UserError(f"several lists could be that of {place}: {listing(found)}; keep one of them")
    path = found[0]
    return label_files.match(
        label_files.rows(names.text(path), names.path(path)),
        names.images_below(folder, left_out),
        below=folder,
        name=names.path(path),
        left_out=left_out,
    )


def lists_of(names: Names, folder: str) -> list[str]:
    """Returns the paths of what may be the list of files and classes of a split: in it, or else beside it."""
    if inside := [path for path in names.files_in(folder) if label_files.is_list(path)]:
        return inside
    called = [name for name, split in SPLITS.items() if split == SPLITS.get(folder)]
    return [path for path in names.beside_splits() if folder and label_files.is_list(path, called)]


def list_folder_splits(root: str) -> list[str]:
    """Returns the names of the splits of a folder that have labels, and logs which have none.

    Raises:
        UserError: see `split_folders`.
    """
    names = Names(root)
    found = split_folders(names)
    classes = class_names(names, found.get("train", next(iter(found.values()))))
    bare = []
    for split, folder in found.items():
        present = names.subfolders(folder)
        flat = names.images_in(folder) or (len(present) == 1 and present[0] not in classes)
        if split != "train" and flat and not lists_of(names, folder):
            bare.append(split)
            tell(f"{names.path(folder)} has no labels and is left out: {FLAT.format(names.path(folder))}.")
    return [split for split in found if split not in bare]


def split_folders(names: Names) -> dict[str, str]:
    """Returns split -> folder below the root ('' is the root).

    Raises:
        UserError: neither `{train,val,test}/<class>/*` nor `<class>/*` is there.
    """
    root, folders = names.root, names.subfolders("")
    splits = [name for name in folders if name in SPLITS]
    others = [name for name in folders if name not in SPLITS]
    if (images := names.images_in("")) and (splits or not lists_of(names, "")):
        raise UserError(f"images lie directly in {root} ({listing(images)}); {WANTED}")
    if not folders and not images:
        raise UserError(f"the folder {root} holds no class folders; {WANTED}")
    if splits and others:
        raise UserError(f"the folder {root} mixes splits ({listing(splits)}) with others ({listing(others)}); {WANTED}")
    if not splits:
        return {"train": ""}
    if {"val", "validation"} <= set(splits):
        raise UserError(f"the folder {root} holds both val and validation; keep one of them")
    return {SPLITS[name]: name for name in splits}


def listing(names: list[str]) -> str:
    """Returns the first names for an error message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
