"""What lies in the folders below a root, local or remote."""

import collections
import os
import posixpath

from vit_jax import UserError
from vit_jax.data.images import IMAGE_SUFFIXES
from vit_jax.storage import filesystem

KAGGLE = "/ILSVRC/Data/CLS-LOC"  # where Kaggle packs ImageNet's splits; the lists lie three folders above


class Names:
    """The names of folders and files below a root: a local one is read folder by folder, a remote one listed at once.

    All paths are relative to the root, with `/`.
    """

    def __init__(self, root: str):
        """Lists a remote root.

        Raises:
            UserError: there is no such folder, or its store cannot be asked.
        """
        self.root = root if filesystem.is_remote(root) else os.path.expanduser(root)
        self.remote: dict[str, tuple[set[str], list[str]]] | None = None
        if filesystem.is_remote(root):
            self.remote = collections.defaultdict(lambda: (set(), []))
            for path in filesystem.list_files(root):
                folder, _, name = path.rpartition("/")
                self.remote[folder][1].append(name)
                while folder:
                    folder, _, name = folder.rpartition("/")
                    self.remote[folder][0].add(name)
        if not (self.remote if self.remote is not None else os.path.isdir(self.root)):
            raise UserError(f"there is no folder {filesystem.absolute_path(root)}")

    def path(self, relative: str) -> str:
        """Returns the path, for messages and to read it, of what lies below the root or, with `../`, beside it."""
        path = filesystem.join_path(self.root, relative).rstrip("/")
        return path if filesystem.is_remote(path) else posixpath.normpath(path)

    def entries(self, folder: str) -> tuple[list[str], list[str]]:
        """Returns the sorted names of the folders and of the files in a folder, hidden ones included.

        Raises:
            UserError: the folder cannot be read.
        """
        if self.remote is not None:
            folders, names = self.remote[folder]
            return sorted(folders), sorted(names)
        found: tuple[list[str], list[str]] = [], []
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                for entry in entries:
                    found[not is_folder(entry)].append(entry.name)
        except OSError as error:
            raise UserError(f"cannot list the folder {self.path(folder)}: {error.strerror or error}") from error
        return sorted(found[0]), sorted(found[1])

    def subfolders(self, folder: str) -> list[str]:
        """Returns the sorted names of the folders in a folder, but for hidden ones."""
        return [name for name in self.entries(folder)[0] if not name.startswith(".")]

    def files_in(self, folder: str) -> list[str]:
        """Returns the sorted paths of the files in a folder, but for hidden ones."""
        return [joined(folder, name) for name in self.entries(folder)[1] if not name.startswith(".")]

    def images_in(self, folder: str) -> list[str]:
        """Returns the sorted names of the images in a folder, by their suffix, but for hidden ones."""
        return [path.rpartition("/")[2] for path in self.files_in(folder) if path.lower().endswith(IMAGE_SUFFIXES)]

    def images_below(
        self, folder: str, left_out: collections.Counter[str], above: tuple[tuple[int, int], ...] = ()
    ) -> list[str]:
        """Returns the paths of the images in a folder and in the folders below it.

        Args:
            folder: where to look.
            left_out: reason -> files left out; what is found here is added.
            above: the folders that it lies in, by device and number: a link to one of them is not followed.
        """
        if self.remote is None:
            parts = folder.split("/") if folder else []
            above = above or tuple(self.identity("/".join(parts[:count])) for count in range(len(parts)))
            if (this := self.identity(folder)) in above:
                left_out["links to folders above"] += 1
                return []
            above += (this,)
        folders, names = self.entries(folder)
        found = []
        for name in names:
            if name.startswith("."):
                left_out["hidden"] += 1
            elif name.lower().endswith(IMAGE_SUFFIXES):
                found.append(joined(folder, name))
            else:
                left_out[os.path.splitext(name)[1].lower() or "without an ending"] += 1
        for name in folders:
            if name.startswith("."):
                left_out["hidden"] += 1
            else:
                found += self.images_below(joined(folder, name), left_out, above)
        return found

    def identity(self, folder: str) -> tuple[int, int]:
        """Returns device and number of a local folder: a link to it has the same."""
        status = os.stat(os.path.join(self.root, folder))
        return status.st_dev, status.st_ino

    def beside_splits(self) -> list[str]:
        """Returns the paths of the files in the root, but for hidden ones; of ImageNet from Kaggle, those of its lists
        too, which begin with `../`.
        """
        found = self.files_in("")
        if self.remote is None and os.path.abspath(self.root).endswith(KAGGLE):
            top = os.path.join(self.root, "../../..")
            found += [f"../../../{name}" for name in sorted(os.listdir(top)) if name.startswith("LOC_")]
        return found

    def text(self, path: str) -> str:
        """Returns what a text file says; bytes that are not UTF-8 stay as they are in names of files.

        Raises:
            UserError: it cannot be read.
        """
        return filesystem.read_bytes(self.path(path)).decode("utf-8-sig", "surrogateescape")


def is_folder(entry: os.DirEntry) -> bool:
    """Returns whether an entry is a folder, or a link to one; a link to itself is a file, that cannot be read."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def joined(folder: str, name: str) -> str:
    """Returns the path of what lies in a folder given relative to the root ('' is the root)."""
    return f"{folder}/{name}".lstrip("/")
