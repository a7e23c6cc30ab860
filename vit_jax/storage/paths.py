"""Local paths: the home folder, which containers may lack, and names, which may have 255 bytes each."""

import hashlib
import os
from pathlib import Path

from vit_jax import UserError, printable

MOST_BYTES = 255  # on the file systems of Linux and macOS
SHORTENED = 200  # bytes of the start of a longer name, after which a digest and suffixes have room


def expand_home(path: str | Path, advice: str = "set HOME to a folder.") -> Path:
    """Returns a local path with `~` at its start replaced by the home folder.

    Raises:
        UserError: there is no such folder, and the message ends with `advice`; or see `check_names`.
    """
    check_names(path)
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"there is no home folder for {path}; {advice}") from None


def check_names(path: str | os.PathLike[str]) -> None:
    """Raises UserError if a local path has a name that is too long. Nothing is checked for addresses.

    Without this, some functions that ask whether a path exists raise an OSError.
    """
    names = [] if "://" in os.fspath(path) else os.fspath(path).split("/")
    if long := [name for name in names if len(os.fsencode(name)) > MOST_BYTES]:
        start, size = printable(long[0], 40), len(os.fsencode(long[0]))
        raise UserError(f"files and folders have names of at most {MOST_BYTES} bytes, but {start}... has {size:,}.")


def short_name(name: str) -> str:
    """Returns a name for a file or folder: the name itself or, if it is too long, its start with a digest of it all."""
    encoded = name.encode()
    if len(encoded) <= MOST_BYTES:
        return name
    return f"{encoded[:SHORTENED].decode(errors='ignore')}-{hashlib.sha256(encoded).hexdigest()[:16]}"
