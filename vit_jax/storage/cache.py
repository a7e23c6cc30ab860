"""A folder of this user with copies of remote files, bounded in size: those used longest ago leave first.

`VIT_JAX_CACHE` says where it lies, `VIT_JAX_CACHE_GB` how much it may hold. Several processes may use it at once:
one at a time, by `files/lock`, looks up and changes what is here. Who copies an entry holds its lock alone, who uses it
shares that. Locks are never removed: others may wait for them.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from vit_jax import UserError

DEFAULT_GB = 50.0

_held: dict[Path, IO[str]] = {}  # what this process uses -> its lock, open until the process ends


def root() -> Path:
    """Returns the cache folder, made if need be.

    Raises:
        UserError: it cannot be made.
    """
    path = _path()
    with _told():
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def max_bytes() -> int:
    """Returns how many bytes the copies may take.

    Raises:
        UserError: `VIT_JAX_CACHE_GB` is no number.
    """
    text = os.environ.get("VIT_JAX_CACHE_GB") or str(DEFAULT_GB)
    try:
        return int(float(text) * 1e9)
    except (ValueError, OverflowError):
        raise UserError(f"VIT_JAX_CACHE_GB={text} must be a number of gigabytes.") from None


def cached_folder(key: str, what: str, size: int, fill: Callable[[Path], None]) -> Path:
    """Returns the folder kept under a key; it stays as long as this process runs.

    Args:
        key: differs for different content.
        what: it is, for the error message.
        size: bytes of the content.
        fill: puts the content into an empty folder, if it is not here yet.

    Raises:
        UserError: it does not fit beside what is in use, or cannot be written.
    """
    folder = root() / "files"
    place = folder / key
    with _told():
        folder.mkdir(exist_ok=True)
        while place not in _held:
            lock = _open_lock(place)
            try:
                with _alone(folder):
                    here = place.exists()
                    mine = _try_lock(lock, fcntl.LOCK_SH if here else fcntl.LOCK_EX)
                    if here and mine:
                        _held[place] = lock
                    elif mine:
                        _make_room(place, what, size)
                        _note(lock, size)
                if not mine:
                    fcntl.flock(lock, fcntl.LOCK_SH)  # somebody copies it: look again when that is over
                elif not here:
                    _copy(place, lock, fill)
            finally:
                if _held.get(place) is not lock:
                    lock.close()
        os.utime(place)
    return place


def lock_folder(folder: Path) -> bool:
    """Takes a folder for this process, until it ends or releases it; returns False if another process has it."""
    with _told():
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder not in _held:
            lock = _open_lock(folder)
            if not _try_lock(lock, fcntl.LOCK_EX):
                lock.close()
                return False
            _held[folder] = lock
    return True


def unlock_folder(folder: Path) -> None:
    """Lets go of a folder that this process holds."""
    if folder in _held:
        _held.pop(folder).close()


def _path() -> Path:
    return Path(os.environ.get("VIT_JAX_CACHE") or "~/.cache/vit_jax").expanduser()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write to {_path()}: {reason}; VIT_JAX_CACHE may name another folder.") from error


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _open_lock(place: Path) -> IO[str]:
    return place.with_name(f"{place.name}.lock").open("a+")


def _try_lock(lock: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _note(lock: IO[str], size: int) -> None:
    """Writes into a lock how many bytes lie behind it."""
    lock.truncate(0)
    lock.write(str(size))
    lock.flush()


def _copy(place: Path, lock: IO[str], fill: Callable[[Path], None]) -> None:
    partial = _unfinished(place)
    try:
        partial.mkdir()
        fill(partial)
        with _alone(place.parent):
            _note(lock, sum(path.stat().st_size for path in partial.rglob("*") if path.is_file()))
            partial.rename(place)
            fcntl.flock(lock, fcntl.LOCK_SH)
            _held[place] = lock
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _unfinished(place: Path) -> Path:
    return place.with_name(f"{place.name}.partial")


def _make_room(place: Path, what: str, size: int) -> None:
    """Removes what was left unfinished and, until `size` more bytes fit, copies that no process uses."""
    used, unused = 0, []
    for path in place.parent.glob("*.lock"):
        other = path.with_suffix("")
        with path.open("r+") as lock:
            noted = int(lock.read() or 0)
            if other != place and not _try_lock(lock, fcntl.LOCK_EX):
                used += noted
            elif other.exists():
                unused.append((other.stat().st_mtime, noted, other))
            else:
                shutil.rmtree(_unfinished(other), ignore_errors=True)
    limit = max_bytes()
    if used + size > limit:
        beside = f" beside {used / 1e9:.3g} GB in use" if used else ""
        raise UserError(
            f"{what} takes {size / 1e9:.3g} GB{beside}, more than the {limit / 1e9:.3g} GB that {place.parent} may "
            "hold; set VIT_JAX_CACHE_GB to more, and VIT_JAX_CACHE to a folder with room"
        )
    total = used + size + sum(noted for _, noted, _ in unused)
    for _, noted, oldest in sorted(unused):
        if total > limit:
            oldest.rename(_unfinished(oldest))  # at once: none half removed is found
            shutil.rmtree(_unfinished(oldest), ignore_errors=True)
            total -= noted
