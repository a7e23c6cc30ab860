"""Listing of the folders and files below a root, local or remote."""

import collections
import os
import posixpath
from pathlib import Path

from vit_jax import UserError, nearest_path, user_errors
from vit_jax.data.images import IMAGE_SUFFIXES
from vit_jax.storage import filesystem

KAGGLE = "ILSVRC/Data/CLS-LOC"  # the folder of ImageNet's splits in Kaggle's archive; label files lie 3 folders above
LAYOUT = "either {train,val,test}/<class>/* or <class>/*"
ANNOTATIONS = (".csv", ".tsv", "_annotations.txt", "_boxes.txt")  # not images, and not reported as skipped


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
