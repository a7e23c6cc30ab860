"""A folder of this user with copies of remote files, bounded in size: those used longest ago leave first.

`VIT_JAX_CACHE` says where it lies, `VIT_JAX_CACHE_GB` how much it may hold. Several processes may use it at once.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vit_jax import UserError

DEFAULT_GB = 50.0
ABANDONED = 24 * 3600  # seconds after which an unfinished copy is one of a process that was killed

_in_use: dict[str, int] = {}  # key -> size of what this process uses, or is about to
_making_room = threading.Lock()


def root() -> Path:
    """Returns the cache folder, made if need be."""
    path = Path(os.environ.get("VIT_JAX_CACHE") or "~/.cache/vit_jax").expanduser()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def bound() -> int:
    """Returns how many bytes the copies may take.

    Raises:
        UserError: `VIT_JAX_CACHE_GB` is no number.
    """
    text = os.environ.get("VIT_JAX_CACHE_GB") or str(DEFAULT_GB)
    try:
        return int(float(text) * 1e9)
    except (ValueError, OverflowError):
        raise UserError(f"VIT_JAX_CACHE_GB={text} must be a number of gigabytes.") from None


def entry(key: str, what: str, size: int, fill: Callable[[Path], None]) -> Path:
    """Returns the folder kept under a key; it stays as long as this process runs.

    Args:
        key: differs for different content.
        what: it is, for the error message.
        size: bytes of the content.
        fill: puts the content into an empty folder, if it is not here yet.

    Raises:
        UserError: it does not fit beside what is in use.
    """
    folder = root() / "files"
    folder.mkdir(exist_ok=True)
    place = folder / key
    with _locked(folder / f"{key}.lock"):  # others that want the same wait instead of copying it, too
        if not place.exists():
            _make_room(folder, key, what, size)
            partial = Path(tempfile.mkdtemp(prefix=f"{key}.", suffix=".partial", dir=folder))
            try:
                fill(partial)
                partial.rename(place)
            except BaseException:
                _in_use.pop(key, None)
                shutil.rmtree(partial, ignore_errors=True)
                raise
        _in_use[key] = size
        os.utime(place)
    return place


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_room(folder: Path, key: str, what: str, size: int) -> None:
    """Reserves `size` bytes for a key, removing copies that nobody here uses."""
    with _making_room:
        now = time.time()
        for partial in folder.glob("*.partial"):
            if now - partial.stat().st_mtime > ABANDONED:
                shutil.rmtree(partial, ignore_errors=True)
        unused = [path for path in folder.iterdir() if path.is_dir() and path.name not in _in_use]
        unused = sorted((path for path in unused if path.suffix != ".partial"), key=lambda path: path.stat().st_mtime)
        sizes = {path: _size(path) for path in unused}
        used, limit = sum(_in_use.values()), bound()
        if used + size > limit:
            beside = f" beside {used / 1e9:.3g} GB in use" if used else ""
            raise UserError(
                f"{what} takes {size / 1e9:.3g} GB{beside}, more than the {limit / 1e9:.3g} GB that {folder} may hold; "
                "set VIT_JAX_CACHE_GB to more, and VIT_JAX_CACHE to a folder with room"
            )
        while unused and used + size + sum(sizes[path] for path in unused) > limit:
            oldest = unused.pop(0)
            shutil.rmtree(oldest, ignore_errors=True)
            oldest.with_name(f"{oldest.name}.lock").unlink(missing_ok=True)
        _in_use[key] = size


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
