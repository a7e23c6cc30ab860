"""Image folders: `{train,val,test}/<class>/*` or `<class>/*`, or images beside a label file, or without labels.

Folders called train, val, validation and test are splits. If there are none of these, folders stand for splits whose
names say so in other words, as `name_splits` reads them: `Training` and `Testing`, `seg_train` and `seg_test`. The
classes of a split may lie one folder deeper, in a folder of the same split: `seg_train/seg_train/<class>`.
"""

import collections
import hashlib
import os
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from vit_jax import UserError, first_names, nearest_path, tell, user_errors
from vit_jax.data.images import IMAGE_SUFFIXES, EncodedImage, ImageHeader, read_image
from vit_jax.data.sources import label_files
from vit_jax.data.sources.source import Label, Source, SourceConfig, compose, stamp_files, stamp_versions
from vit_jax.data.sources.splits import (
    SPLIT_WORDS,
    canonical_name,
    name_splits,
    resolve_name,
    select_examples,
    split_names,
)
from vit_jax.storage import filesystem

SPLITS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}  # folder -> split
KAGGLE = "ILSVRC/Data/CLS-LOC"  # the folder of ImageNet's splits in Kaggle's archive; label files lie 3 folders above
LAYOUT = "either {train,val,test}/<class>/* or <class>/*"
ANNOTATIONS = (".csv", ".tsv", "_annotations.txt", "_boxes.txt")  # not images, and not reported as skipped
WITHOUT_FOLDERS = "a split without class folders needs a label file with the columns image and class, such as {}.csv"
CLASS_WORDS = ("words.txt", "LOC_synset_mapping.txt")  # describe classes in words: Tiny-ImageNet's, ImageNet's


class FolderTree:
    """The folders and files below a root; a local root is listed folder by folder, a remote one at once.

    All paths are relative to the root, with `/`; the root is ''.

    Attributes:
        root: the absolute path of the folder, local or remote.
        remote: for a remote root, folder -> the names of the folders and of the files in it; None for a local root.
        versions: for a remote root, file -> its version, see `filesystem.file_version`; empty for a local root.
    """

    def __init__(self, root: str):
        """Checks that the root exists, and lists it if it is remote.

        Raises:
            UserError: there is no such folder, or its store cannot be reached.
        """
        self.root = filesystem.absolute_path(root)
        self.remote: dict[str, tuple[set[str], list[str]]] | None = None
        self.versions: dict[str, str] = {}
        if filesystem.is_remote(root):
            self.remote = collections.defaultdict(lambda: (set(), []))
            self.versions = {name: version.text for name, version in filesystem.list_versions(root).items()}
            for path in self.versions:
                folder, _, name = path.rpartition("/")
                self.remote[folder][1].append(name)
                while folder:
                    folder, _, name = folder.rpartition("/")
                    self.remote[folder][0].add(name)
        if not (self.remote if self.remote is not None else os.path.isdir(self.root)):
            path = filesystem.absolute_path(root)
            near = None if filesystem.is_remote(root) else nearest_path(Path(path))
            hint = f" (did you mean {str(near)!r}?)" if near and near.is_dir() else ""
            raise UserError(f"there is no folder {path}{hint}; a folder of images contains {LAYOUT}")

    def full_path(self, relative: str) -> str:
        """Returns the full path of a path relative to the root, which may begin with `../`."""
        path = filesystem.join_path(self.root, relative).rstrip("/")
        return path if filesystem.is_remote(path) else posixpath.normpath(path)

    def list_entries(self, folder: str) -> tuple[list[str], list[str]]:
        """Returns the sorted names of the folders and of the files in a folder, hidden ones included.

        Raises:
            UserError: the folder cannot be read.
        """
        if self.remote is not None:
            folders, names = self.remote[folder]
            return sorted(folders), sorted(names)
        folders_and_files: tuple[list[str], list[str]] = [], []
        with (
            user_errors(f"cannot list the folder {self.full_path(folder)}"),
            os.scandir(os.path.join(self.root, folder)) as entries,
        ):
            for entry in entries:
                folders_and_files[not is_folder(entry)].append(entry.name)
        return sorted(folders_and_files[0]), sorted(folders_and_files[1])

    def subfolders(self, folder: str) -> list[str]:
        """Returns the sorted names of the folders in a folder, except hidden ones."""
        return [name for name in self.list_entries(folder)[0] if not is_hidden(name)]

    def files_in(self, folder: str) -> list[str]:
        """Returns the sorted paths of the files in a folder, except hidden ones."""
        return [join_relative(folder, name) for name in self.list_entries(folder)[1] if not is_hidden(name)]

    def images_in(self, folder: str) -> list[str]:
        """Returns the sorted names of the images in a folder, found by their suffix, except hidden ones."""
        return [path.rpartition("/")[2] for path in self.files_in(folder) if path.lower().endswith(IMAGE_SUFFIXES)]

    def images_below(
        self, folder: str, skipped: collections.Counter[str], parents: tuple[tuple[int, int], ...] = ()
    ) -> list[str]:
        """Returns the paths of the images in a folder and in the folders below it.

        Args:
            folder: where to look.
            skipped: reason -> number of files skipped; changed in place.
            parents: (device, inode) of the folders that contain `folder`, the root first; a link to one of them is not
                followed. Callers leave it empty.
        """
        if self.remote is None:
            parts = folder.split("/") if folder else []
            parents = parents or tuple(self.device_and_inode("/".join(parts[:count])) for count in range(len(parts)))
            if (this := self.device_and_inode(folder)) in parents:
                skipped["links to parent folders"] += 1
                return []
            parents += (this,)
        folders, names = self.list_entries(folder)
        images = []
        for name in names:
            if is_hidden(name):
                skipped["hidden"] += 1
            elif name.lower().endswith(IMAGE_SUFFIXES):
                images.append(join_relative(folder, name))
            elif not name.lower().endswith(ANNOTATIONS):
                skipped[os.path.splitext(name)[1].lower() or "without a suffix"] += 1
        for name in folders:
            if is_hidden(name):
                skipped["hidden"] += 1
            else:
                images += self.images_below(join_relative(folder, name), skipped, parents)
        return images

    def kaggle_folder(self) -> str | None:
        """Returns the path of ImageNet's splits if the root is a folder above them in Kaggle's archive, else None."""
        parts = KAGGLE.split("/")
        for path in ("/".join(parts[count:]) for count in range(len(parts))):
            if self.has_folder(path):
                return self.full_path(path)
        return None

    def has_folder(self, path: str) -> bool:
        """Returns whether there is a folder of this path."""
        return os.path.isdir(os.path.join(self.root, path)) if self.remote is None else path in self.remote

    def device_and_inode(self, folder: str) -> tuple[int, int]:
        """Returns the device and inode of a local folder; a link to the folder has the same."""
        with user_errors(f"cannot list the folder {self.full_path(folder)}"):
            status = os.stat(os.path.join(self.root, folder))
        return status.st_dev, status.st_ino

    def files_beside_splits(self) -> list[str]:
        """Returns the paths of the files in the root, except hidden ones.

        If the root is the folder of the splits of Kaggle's ImageNet, the label files of ImageNet follow, whose paths
        begin with `../`.
        """
        files = self.files_in("")
        if self.remote is None and os.path.abspath(self.root).endswith(f"/{KAGGLE}"):
            top = os.path.join(self.root, "../../..")
            files += [f"../../../{name}" for name in sorted(os.listdir(top)) if name.startswith("LOC_")]
        return files

    def read_text(self, path: str) -> str:
        """Returns the text of a file. Bytes that are not UTF-8 become surrogate escapes, as in the names of files.

        Raises:
            UserError: the file cannot be read.
        """
        return filesystem.read_bytes(self.full_path(path)).decode("utf-8-sig", "surrogateescape")


class FolderFiles:
    """Image files of some splits below a folder, with a label each, as a `Source` reads them.

    Attributes:
        root: the absolute path of the folder, local or remote.
        files: split -> the paths of its files relative to the root, bytes [n].
        labels: split -> the labels of its files [n, ...].
        counts: split -> number of its files.
        versions: for a remote root, split -> the versions of its files, as the store listed them.
        digest: a hash of the relative paths and labels of the splits, in order.
    """

    def __init__(self, tree: FolderTree, listed: Mapping[str, tuple[np.ndarray, np.ndarray]]):
        """Takes split -> (files, labels), both in the order of the split."""
        self.root = tree.root
        self.files = {name: files for name, (files, _) in listed.items()}
        self.labels = {name: labels for name, (_, labels) in listed.items()}
        self.counts = {name: len(files) for name, files in self.files.items()}
        if "validation" in self.counts:
            self.counts["val"] = self.counts["validation"]
        self.versions = {
            name: np.array([stamp_versions([tree.versions[os.fsdecode(bytes(path))]]) for path in files])
            for name, files in self.files.items()
            if tree.remote is not None
        }
        digest = hashlib.sha256()
        for name in listed:
            digest.update(self.files[name].tobytes() + self.labels[name].tobytes())
        self.digest = digest.hexdigest()

    def read_example(self, split: str, index: int) -> tuple[EncodedImage, Label]:
        """Returns (image, label) number `index` of a split.

        Raises:
            DecodeError: the file is unreadable.
            UserError: the store of a remote file does not give it.
        """
        return read_image(self.path(split, index)), self.read_label(split, index)

    def read_header(self, split: str, index: int) -> ImageHeader:
        """Returns the header of file `index` of a split; the files must be local.

        Raises:
            DecodeError: see `ImageHeader.read`.
        """
        return ImageHeader.read(self.path(split, index))

    def split_labels(self, split: str) -> Shaped[np.ndarray, " n *labels"]:
        """Returns the labels of all files of a split."""
        return self.labels[canonical_name(split)]

    def read_label(self, split: str, index: int) -> Label:
        """Returns the label of file `index` of a split."""
        label = self.labels[canonical_name(split)][index]
        return label if np.ndim(label) else int(label)

    def read_name(self, split: str, index: int) -> str:
        """Returns the path of file `index` of a split, relative to the root."""
        return os.fsdecode(bytes(self.files[canonical_name(split)][index]))

    def file_stamp(self, split: str, indices: Sequence[int]) -> str:
        """Returns a short text that changes when these files are replaced."""
        if self.versions:  # as the store listed them, which saves a request for each file
            versions = self.versions[canonical_name(split)]
            return stamp_versions(str(versions[index]) for index in indices)
        return stamp_files(self.path(split, index) for index in indices)

    def path(self, split: str, index: int) -> str:
        """Returns the full path of file `index` of a split."""
        return os.path.join(self.root, self.read_name(split, index))


class ImageFolder(FolderFiles):
    """Image files of some splits of a folder, labelled unless labels are not needed.

    The name of a folder is a class. The label of a class is its place among the sorted class names of `train`. Images
    in folders within a class belong to the class; hidden files are ignored. With `<class>/*` directly below the root,
    everything is `train`. A split without class folders has a label file in it or beside it, or else has no labels
    (-1). If `train` has none, no split has. The order of a split is fixed but mixed (by a hash of each file's relative
    path), so a slice such as `train[:90%]` is not a slice of the classes, and the order stays nearly the same when
    files are added.

    Attributes, besides those of `FolderFiles`:
        class_names: sorted names of the classes.
        class_words: `class_names` with a description in words, where a file beside the splits has one.
        split_names: the names of all splits that have labels: those of their folders, if these are names of splits.
        read_as: which folders are read as splits by other names, see `describe_splits`.
        notes: a line for each split listed that has a label file or files that are skipped.
    """

    def __init__(self, root: str, splits: list[str], needs_labels: bool = True):
        """Lists the files.

        Args:
            root: the folder, local or remote.
            splits: what to list: train, validation (or val), test.
            needs_labels: whether a split without labels is refused.

        Raises:
            UserError: the folder is missing, empty or has another layout, or a split has no labels and needs them.
        """
        tree = FolderTree(root)
        folders = find_splits(tree, needs_labels)
        self.read_as = describe_splits(folders)
        for name in splits:
            resolve_name(name, folders, f"split of the folder {tree.root}")
        splits = list(map(canonical_name, splits))
        # Labels are those of training, even if only another split is read.
        self.class_names = list_classes(tree, folders.get("train", folders[splits[0]]), needs_labels)
        has_no_classes = not needs_labels and not self.class_names
        unlabelled = list(folders) if has_no_classes else unlabelled_splits(tree, folders, self.class_names)
        for name in splits:
            if name in unlabelled and needs_labels:
                raise missing_labels(tree, folders[name])
        named = {name: folder if folder in SPLITS else name for name, folder in folders.items() if folder}
        self.split_names = tuple(folder for name, folder in named.items() if name not in unlabelled)
        self.notes: list[str] = []
        texts = [tree.read_text(path) for path in tree.files_beside_splits() if path.rpartition("/")[2] in CLASS_WORDS]
        self.class_words = label_files.names_in_words(self.class_names, texts)
        super().__init__(
            tree, {name: self.list_split(name, folders[name], tree, name not in unlabelled) for name in splits}
        )

    def list_split(self, split: str, folder: str, tree: FolderTree, has_labels: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns the files (bytes, relative to the root) and the labels of a split, in their mixed order."""
        skipped: collections.Counter[str] = collections.Counter()
        labelled = ""
        classes: Mapping[str, str | None]
        if not has_labels:
            labelled = ", no labels"
            classes = dict.fromkeys(tree.images_below(folder, skipped))
            if not classes:
                raise UserError(f"{tree.full_path(folder)} contains no images ({' '.join(IMAGE_SUFFIXES)})")
        elif has_class_folders(tree, folder, self.class_names):
            classes = self.classes_by_folder(split, folder, tree, skipped)
        else:
            label_file = choose_label_file(tree, folder)
            labelled = f", labels from {label_file.rpartition('/')[2]}"
            stated = classes_by_label_file(tree, folder, label_file, skipped)
            classes = match_classes(stated, self.class_names, tree.full_path(folder))
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
        if labelled or reasons:
            left_out = f"; skipped: {reasons}" if reasons else ""
            self.notes.append(f"{tree.full_path(folder)}: {len(classes):,} images{labelled}{left_out}")
        label_of = {name: label for label, name in enumerate(self.class_names)} | {None: -1}
        return mix_files([*classes], np.array([label_of[name] for name in classes.values()], np.int32))

    def classes_by_folder(
        self, split: str, folder: str, tree: FolderTree, skipped: collections.Counter[str]
    ) -> dict[str, str]:
        """Returns file -> class of a split with class folders, and counts other files in `skipped`.

        Raises:
            UserError: a folder is not a class of train, there are no images, or a class of train has no images.
        """
        path, present = tree.full_path(folder), {compose(name): name for name in tree.subfolders(folder)}
        if unknown := sorted(present.keys() - set(map(compose, self.class_names))):
            raise UserError(
                f"{path} has classes that train does not have: {first_names(unknown)}; {WITHOUT_FOLDERS.format(path)}"
            )
        classes: dict[str, str] = {}
        empty = []
        for name in self.class_names:
            inside = present.get(compose(name))
            images = tree.images_below(join_relative(folder, inside), skipped) if inside else []
            classes |= dict.fromkeys(images, name)
            empty += [] if images else [name]
        if not classes or (empty and split == "train"):
            suffixes = " ".join(IMAGE_SUFFIXES)
            raise UserError(f"these classes of {path} contain no images ({suffixes}): {first_names(empty)}")
        return classes


def mix_files(paths: Sequence[str], labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns paths, as bytes, and their labels, both in the order of a hash of each path."""
    encoded = [os.fsencode(path) for path in paths]
    order = np.argsort([hashlib.sha256(path).digest() for path in encoded])
    return np.array(encoded)[order], labels[order]


def open_folder(source_config: SourceConfig, name: str, split: str) -> Source:
    """Opens image files in folders; see `ImageFolder`. The EXIF orientation is applied."""
    folder = ImageFolder(name, split_names(split), source_config.reads_labels and source_config.needs_labels)
    return Source(
        name=f"folder {folder.read_as}".strip(),
        parts=tuple(select_examples(split, folder.counts)),
        sizes=folder.counts,
        read_example=folder.read_example,
        num_classes=len(folder.class_names),
        class_names=folder.class_words or None,
        class_ids=folder.class_names or None,
        split_names=folder.split_names,
        notes=tuple(folder.notes),
        digest=folder.digest,
        file_stamp=folder.file_stamp,
        read_label=folder.read_label,
        split_labels=folder.split_labels,
        read_name=folder.read_name,
        read_header=None if filesystem.is_remote(folder.root) else folder.read_header,
    )


def list_folder_splits(source_config: SourceConfig, name: str) -> list[str]:
    """Returns the names of the splits of a folder that have labels, and prints which splits have none.

    Raises:
        UserError: see `find_splits`.
    """
    tree = FolderTree(name)
    folders = find_splits(tree)
    classes = list_classes(tree, folders.get("train", next(iter(folders.values()))))
    unlabelled = unlabelled_splits(tree, folders, classes)
    for path in (tree.full_path(folders[split]) for split in unlabelled):
        tell(f"{path} has no labels and is skipped: {WITHOUT_FOLDERS.format(path)}.")
    return [split for split in folders if split not in unlabelled]


def find_splits(tree: FolderTree, needs_labels: bool = True) -> dict[str, str]:
    """Returns split -> its folder below the root ('' is the root, whose images a label file may list).

    Unless `needs_labels`, the root may contain images without a label file.

    Raises:
        UserError: there is neither `{train,val,test}/<class>/*` nor `<class>/*`, or the names of the folders can be
            read as splits and as classes.
    """
    if inner := tree.kaggle_folder():
        raise UserError(f"{tree.root} is Kaggle's ImageNet; use --config.data.source=folder:{inner}")
    root, folders, images = tree.root, tree.subfolders(""), tree.images_in("")
    exact = [name for name in folders if name in SPLITS]
    if images and (exact or (needs_labels and not find_label_files(tree, ""))):
        raise UserError(f"{root} contains images directly ({first_names(images)}); it must contain {LAYOUT}")
    if not folders and not images:
        raise UserError(f"the folder {root} contains no class folders; it must contain {LAYOUT}")
    named = {} if images else name_splits(folders)
    others = [name for name in folders if name not in named]
    if exact and others:
        raise UserError(
            f"{root} contains both split folders ({first_names(exact)}) and other folders ({first_names(others)}); "
            f"it must contain {LAYOUT}"
        )
    # A single class may be called after a split, such as Train among vehicles. It has no classes in it.
    if others and named and (len(set(named.values())) > 1 or any(tree.subfolders(name) for name in named)):
        beside = first_names(others)
        raise UserError(
            f"the folders of {root} can be read in two ways: as the splits {first_names([*named])}, beside {beside}, "
            f"or as {len(folders)} classes; to read splits, move {beside} elsewhere; to read classes, move all of them "
            f"into a folder {root}/train"
        )
    if others or not named:
        check_inside(tree, folders)
        return {"train": ""}
    return place_splits(tree, named)


def place_splits(tree: FolderTree, named: dict[str, str]) -> dict[str, str]:
    """Returns split -> its folder, given folder -> split; raises UserError if two folders stand for the same split."""
    placed: dict[str, str] = {}
    for name, split in named.items():
        if split in placed:
            raise UserError(
                f"the folder {tree.root} contains both {placed[split]} and {name}, which stand for the same split; "
                f"keep one of them or, if they are classes, move them into a folder {tree.root}/train"
            )
        placed[split] = name
    return {split: inner_folder(tree, name, split) for split, name in placed.items()}


def inner_folder(tree: FolderTree, folder: str, split: str) -> str:
    """Returns the folder with the classes of a split: `folder`, or the only one in it if that is of the same split."""
    inside = tree.subfolders(folder)
    if len(inside) == 1 and name_splits(inside).get(inside[0]) == split and not tree.images_in(folder):
        inner = join_relative(folder, inside[0])
        return inner if tree.subfolders(inner) else folder
    return folder


def check_inside(tree: FolderTree, folders: list[str]) -> None:
    """Raises UserError if the only folder, which would be the only class, contains splits."""
    inside = tree.subfolders(folders[0]) if len(folders) == 1 else []
    if inside and len(set(name_splits(inside).values())) > 1:
        place = tree.full_path(folders[0])
        raise UserError(
            f"the only folder of {tree.root} contains the splits {first_names(inside)}; use "
            f"--config.data.source=folder:{place}"
        )


def describe_splits(folders: dict[str, str]) -> str:
    """Returns which folders, split -> folder, are read as splits by other names than their own; empty if none is."""
    renamed = sorted(f"{folder} as {split}" for split, folder in folders.items() if folder and folder not in SPLITS)
    return f"with {', '.join(renamed)}" if renamed else ""


def list_classes(tree: FolderTree, folder: str, needs_labels: bool = True) -> tuple[str, ...]:
    """Returns the sorted classes of the split in `folder`, which is train if there is a train.

    They are the names of its subfolders or, if it contains images directly, the classes in its label file. Unless
    `needs_labels`, there are none if such a split has no label file.

    Raises:
        UserError: the folder contains images directly, but has no label file or several, or its label file gives nearly
            every image a class of its own, or the names of two classes differ only in their form of Unicode.
    """
    if tree.images_in(folder):
        if not needs_labels and not find_label_files(tree, folder):
            return ()
        label_file = choose_label_file(tree, folder)
        classes = classes_by_label_file(tree, folder, label_file, collections.Counter())
        if not label_files.names_its_columns(tree.read_text(label_file)):
            label_files.check_classes(classes, tree.full_path(label_file))
        names = sorted(set(classes.values()))
    else:
        names = tree.subfolders(folder)
    if repeated := [name for name, count in collections.Counter(map(compose, names)).items() if count > 1]:
        raise UserError(
            f"{tree.full_path(folder)} has several classes {repeated[0]}, whose names differ only in their form of "
            "Unicode; give them one name"
        )
    return tuple(names)


def has_class_folders(tree: FolderTree, folder: str, classes: tuple[str, ...]) -> bool:
    """Returns whether the folders in the folder of a split are taken for classes, so that no label file is read.

    They are if all of them are classes of train, or if there is no label file. The folder must not contain images
    directly.
    """
    present = tree.subfolders(folder)
    if tree.images_in(folder) or not present:
        return False
    return set(map(compose, present)) <= set(map(compose, classes)) or not find_label_files(tree, folder)


def choose_label_file(tree: FolderTree, folder: str) -> str:
    """Returns the path of the label file of a split without class folders.

    Raises:
        UserError: there are no images, or not exactly one label file.
    """
    path, candidates = tree.full_path(folder), find_label_files(tree, folder)
    if images := tree.images_in(folder):
        if not candidates:
            raise UserError(
                f"{path} contains images directly ({first_names(images)}); it must contain {LAYOUT}; "
                f"{WITHOUT_FOLDERS.format(path)}"
            )
    elif not tree.subfolders(folder):
        raise UserError(f"the folder {path} contains no class folders; it must contain {LAYOUT}")
    if len(candidates) > 1:
        raise UserError(f"{path} has several label files: {first_names(candidates)}; keep one of them")
    return candidates[0]


def classes_by_label_file(
    tree: FolderTree, folder: str, label_file: str, skipped: collections.Counter[str]
) -> dict[str, str]:
    """Returns file -> class of a split without class folders, and counts other files in `skipped`.

    Raises:
        UserError: the label file is unreadable, lists no image or gives an image two classes.
    """
    return label_files.match_images(
        label_files.parse_label_file(tree.read_text(label_file), tree.full_path(label_file)),
        tree.images_below(folder, skipped),
        folder=folder,
        name=tree.full_path(label_file),
        skipped=skipped,
    )


def match_classes(stated: dict[str, str], names: tuple[str, ...], path: str) -> dict[str, str]:
    """Returns file -> class of train, given file -> class as the label file of the split `path` states it.

    Raises:
        UserError: a class is not one of `names`, those of train.
    """
    known = {compose(name): name for name in names}
    # ImageNet's label files also state the position of the object, after the class.
    classes = {file: one if compose(one) in known else one.partition(" ")[0] for file, one in stated.items()}
    if unknown := sorted({one for one in classes.values() if compose(one) not in known}):
        raise UserError(f"the label file of {path} has classes that train does not have: {first_names(unknown)}")
    return {file: known[compose(one)] for file, one in classes.items()}


def find_label_files(tree: FolderTree, folder: str) -> list[str]:
    """Returns the paths of the files that may be the label file of a split.

    They lie in its folder or, if none does, beside it with the name of the split in their names.
    """
    if inside := [path for path in tree.files_in(folder) if label_files.is_label_file(path)]:
        return inside
    split = next(iter(name_splits([folder.partition("/")[0]]).values()), None)
    for words in (SPLITS, SPLIT_WORDS):  # other words, such as training, only where a file names none of the usual ones
        names = [word for word, meant in words.items() if meant == split]
        if beside := [path for path in tree.files_beside_splits() if label_files.is_label_file(path, names)]:
            return beside
    return []


def unlabelled_splits(tree: FolderTree, folders: dict[str, str], classes: tuple[str, ...]) -> list[str]:
    """Returns the splits other than train that have images but neither class folders nor a label file."""
    splits = []
    for split, folder in folders.items():
        present = tree.subfolders(folder)
        known = set(map(compose, classes))
        flat = tree.images_in(folder) or (len(present) == 1 and compose(present[0]) not in known)
        if split != "train" and flat and not find_label_files(tree, folder):
            splits.append(split)
    return splits


def missing_labels(tree: FolderTree, folder: str) -> UserError:
    """Returns the error of a split without labels."""
    path = tree.full_path(folder)
    why = "" if tree.images_in(folder) else f" (its folder {tree.subfolders(folder)[0]} is not a class of train)"
    return UserError(
        f"{path} has no labels{why}; vit_jax.predict takes a folder of images without labels; to train or evaluate, "
        f"{WITHOUT_FOLDERS.format(path)}"
    )


def is_hidden(name: str) -> bool:
    """Returns whether a file or folder is not one of the data: also `__MACOSX`, which macOS adds to zip files."""
    return name.startswith(".") or name == "__MACOSX"


def is_folder(entry: os.DirEntry) -> bool:
    """Returns whether an entry is a folder or a link to one. False for a link to itself: it is an unreadable file."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def join_relative(folder: str, name: str) -> str:
    """Returns the path of an entry of a folder; the root is ''."""
    return f"{folder}/{name}".lstrip("/")
