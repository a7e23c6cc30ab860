"""A folder with copies of remote files, limited in size: the least recently used copies are removed first.

`VIT_JAX_CACHE` names the folder, `VIT_JAX_CACHE_GB` its limit. Several processes may use it at once: `files/lock`
guards every look-up and change. Each copy also has its own lock: the process that makes the copy holds this lock
exclusively, and the processes that use the copy share it. Lock files are never removed, since other processes may be
waiting for them.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from vit_jax import UserError, format_rounded_up, user_errors

DEFAULT_GB = 50.0


class NoRoom(UserError):
    """A copy does not fit into the cache beside the copies that are in use."""


_locks: dict[Path, IO[str]] = {}  # folder that this process uses -> its open lock


def root() -> Path:
    """Returns the cache folder, which is created if needed. Everything that is kept between runs lies below it.

    Raises:
        UserError: the folder cannot be created.
    """
    path = _root_path()
    with write_errors(path):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def max_bytes() -> int:
    """Returns how many bytes the copies of remote files in the cache may take, by `VIT_JAX_CACHE_GB` or a default.

    Raises:
        UserError: `VIT_JAX_CACHE_GB` is not a number.
    """
    text = os.environ.get("VIT_JAX_CACHE_GB") or str(DEFAULT_GB)
    try:
        return int(float(text) * 1e9)
    except (ValueError, OverflowError):
        raise UserError(f"VIT_JAX_CACHE_GB={text} must be a number of gigabytes.") from None


def cached_folder(key: str, what: str, size: int, fill: Callable[[Path], None]) -> Path:
    """Returns the folder that is cached under a key. It stays at least until this process ends.

    Args:
        key: identifies the content: different content has a different key.
        what: the name of the content in error messages.
        size: the size of the content in bytes.
        fill: writes the content into the empty folder that it is given; called only if the folder is not cached yet.

    Raises:
        UserError: the content does not fit into the cache beside the copies in use, or cannot be written.
    """
    copy = root() / "files" / key
    if copy not in _locks:
        _, lock = borrow_folder(key, what, size, fill)
        _locks.setdefault(copy, lock)
    with write_errors():
        os.utime(copy)
    return copy


def borrow_folder(key: str, what: str, size: int, fill: Callable[[Path], None]) -> tuple[Path, IO[str]]:
    """Returns the folder that is cached under a key, and its lock. The folder stays until the caller closes the lock.

    The arguments and the errors are those of `cached_folder`.
    """
    folder = root() / "files"
    copy = folder / key
    with write_errors():
        folder.mkdir(exist_ok=True)
        while True:
            lock = _open_lock(copy)
            with contextlib.ExitStack() as failed:
                failed.callback(lock.close)
                with _locked(folder):
                    exists = copy.exists()
                    acquired = _try_lock(lock, fcntl.LOCK_SH if exists else fcntl.LOCK_EX)
                    if acquired and not exists:
                        _make_room(copy, what, size)
                        _record_size(lock, size)
                if not acquired:
                    fcntl.flock(lock, fcntl.LOCK_SH)  # another process is copying it: wait, then look again
                    continue
                if not exists:
                    _make_copy(copy, lock, fill)
                os.utime(copy)
                failed.pop_all()
                return copy, lock


def try_lock_folder(folder: Path) -> bool:
    """Locks a folder until this process ends or unlocks it; returns False if any process holds the lock already."""
    with write_errors():
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _open_lock(folder)
        if not _try_lock(lock, fcntl.LOCK_EX):
            lock.close()
            return False
        _locks[folder] = lock
    return True


def is_locked_here(folder: Path) -> bool:
    """Returns whether this process has locked a folder."""
    return folder in _locks


def unlock_folder(folder: Path) -> None:
    """Unlocks a folder, or ends this process's use of a cached one. Does nothing if the process does not use it."""
    if folder in _locks:
        _locks.pop(folder).close()


def write_errors(folder: Path | None = None) -> contextlib.AbstractContextManager[None]:
    """Turns an `OSError` into a `UserError` that names the folder, which is the cache folder by default."""
    return user_errors(f"cannot write to {folder or _root_path()}", advice="set VIT_JAX_CACHE to another folder.")


def _root_path() -> Path:
    return Path(os.environ.get("VIT_JAX_CACHE") or "~/.cache/vit_jax").expanduser()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _open_lock(copy: Path) -> IO[str]:
    return copy.with_name(f"{copy.name}.lock").open("a+")


def _try_lock(lock: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _record_size(lock: IO[str], size: int) -> None:
    """Writes the size of a copy, in bytes, into its lock."""
    lock.truncate(0)
    lock.write(str(size))
    lock.flush()


def _make_copy(copy: Path, lock: IO[str], fill: Callable[[Path], None]) -> None:
    unfinished = _unfinished_path(copy)
    try:
        unfinished.mkdir()
        fill(unfinished)
        with _locked(copy.parent):
            _record_size(lock, sum(path.stat().st_size for path in unfinished.rglob("*") if path.is_file()))
            unfinished.rename(copy)
            fcntl.flock(lock, fcntl.LOCK_SH)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _unfinished_path(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.partial")


def _make_room(copy: Path, what: str, size: int) -> None:
    """Removes unfinished copies, then makes room for `size` bytes.

    Of the copies that no process uses, the least recently used ones are removed until `copy` fits.

    Args:
        copy: the folder that is to be filled; the caller holds its lock.
        what: the name of its content in error messages.
        size: the size of its content in bytes.

    Raises:
        NoRoom: the copies in use leave less than `size` bytes; no finished copy is removed.
    """
    used, unused = 0, []
    for path in copy.parent.glob("*.lock"):
        other = path.with_suffix("")
        with path.open("r+") as lock:
            recorded = int(lock.read() or 0)
            if other != copy and not _try_lock(lock, fcntl.LOCK_EX):
                used += recorded
            elif other.exists():
                unused.append((other.stat().st_mtime, recorded, other))
            else:
                shutil.rmtree(_unfinished_path(other), ignore_errors=True)
    limit = max_bytes()
    if used + size > limit:
        beside = f" in addition to {used / 1e9:.3g} GB in use" if used else ""
        enough = format_rounded_up((used + size) / 1e9, 3)
        raise NoRoom(
            f"{what} needs {size / 1e9:.3g} GB{beside}, more than the {limit / 1e9:.3g} GB that {copy.parent} may "
            f"hold; set VIT_JAX_CACHE_GB={enough} or more, and VIT_JAX_CACHE to a folder with room."
        )
    total = used + size + sum(recorded for _, recorded, _ in unused)
    for _, recorded, oldest in sorted(unused):
        if total > limit:
            oldest.rename(_unfinished_path(oldest))  # first, so that no process finds a copy that is half removed
            shutil.rmtree(_unfinished_path(oldest), ignore_errors=True)
            total -= recorded
