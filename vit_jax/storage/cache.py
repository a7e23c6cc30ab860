"""A folder with copies of remote files, limited in size: the least recently used copies are removed first.

`VIT_JAX_CACHE` names the folder, `VIT_JAX_CACHE_GB` its limit. Several processes may use it at once: `files/lock`
guards every look-up and change. The process that makes a copy holds the copy's own lock file exclusively. A process
that uses copies holds for each a shared lock on one byte of `files/uses`, so that any number of them takes one file
descriptor; the system removes these locks when the process ends. `files/total` states how many bytes the copies take
at most, so that they are looked through only when there may be no room.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from vit_jax import UserError, format_rounded_up, user_errors
from vit_jax.storage.paths import expand_home

DEFAULT_GB = 50.0
SPARE = 64  # where copies must go, one in so many goes in addition: the others need not be looked through for each


class NoRoom(UserError):
    """A copy does not fit into the cache beside the copies that are in use."""


class _Unused(NamedTuple):
    """A copy that no process uses; they sort by the time of their last use."""

    used: float
    size: int
    copy: Path


_unlock: dict[Path, Callable[[], object]] = {}  # folder that this process has locked or uses -> what ends that
_uses: dict[Path, int] = {}  # copy that this process uses -> how many times it was borrowed
_counting = threading.Lock()  # held while `_uses` changes
_uses_files: dict[Path, IO[bytes]] = {}  # folder -> its open `uses`; to close it would end all locks of this process


def root() -> Path:
    """Returns the cache folder, which is created if needed. Everything that is kept between runs lies below it.

    Raises:
        UserError: the folder cannot be created, or another user has made the one in the folder of temporary files.
    """
    path = _root_path()
    with write_errors(path):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path == _temporary_path() and path.lstat().st_uid != os.getuid():
            raise UserError(f"{path} is not a folder of this user; set VIT_JAX_CACHE to another folder.")
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
    if copy not in _unlock:
        _, release = borrow_folder(key, what, size, fill)
        if _unlock.setdefault(copy, release) is not release:  # another thread was faster
            release()
    with write_errors():
        os.utime(copy)
    return copy


def borrow_folder(key: str, what: str, size: int, fill: Callable[[Path], None]) -> tuple[Path, Callable[[], object]]:
    """Returns the folder that is cached under a key, and a function to call once. Until then the folder stays.

    The arguments and the errors are those of `cached_folder`.
    """
    folder = root() / "files"
    copy = folder / key
    with write_errors():
        folder.mkdir(exist_ok=True)
        while True:
            with _locked(folder):
                if copy.exists():
                    os.utime(copy)
                    return copy, _use(copy)
                lock = _open_lock(copy)  # here, since the lock files of copies that have gone are removed
                with contextlib.ExitStack() as failed:
                    failed.callback(lock.close)
                    if acquired := _try_lock(lock, fcntl.LOCK_EX):
                        _make_room(copy, what, size)
                        _record_size(lock, size)
                    failed.pop_all()
            with lock:
                if acquired:
                    return copy, _make_copy(copy, lock, size, fill)
                fcntl.flock(lock, fcntl.LOCK_SH)  # another process is copying it: wait, then look again


def try_lock_folder(folder: Path) -> bool:
    """Locks a folder until this process ends or unlocks it; returns False if any process holds the lock already."""
    with write_errors():
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _open_lock(folder)
        if not _try_lock(lock, fcntl.LOCK_EX):
            lock.close()
            return False
        _unlock[folder] = lock.close
    return True


def is_locked_here(folder: Path) -> bool:
    """Returns whether this process has locked a folder."""
    return folder in _unlock


def unlock_folder(folder: Path) -> None:
    """Unlocks a folder, or ends this process's use of a cached one. Does nothing if the process does not use it."""
    if folder in _unlock:
        _unlock.pop(folder)()


def write_errors(folder: Path | None = None) -> contextlib.AbstractContextManager[None]:
    """Turns an `OSError` into a `UserError` that names the folder, which is the cache folder by default."""
    return user_errors(f"cannot write to {folder or _root_path()}", advice="set VIT_JAX_CACHE to another folder.")


def _root_path() -> Path:
    """Returns the path of the cache folder.

    It is in the folder of temporary files if the user has no home folder, or one in which nothing can be written, as
    happens in containers.
    """
    if given := os.environ.get("VIT_JAX_CACHE"):
        return expand_home(given, "set VIT_JAX_CACHE to a folder for what is kept between runs.")
    with contextlib.suppress(UserError):
        path = expand_home("~/.cache/vit_jax")
        existing = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
        if os.access(existing, os.W_OK):
            return path
    return _temporary_path()


def _temporary_path() -> Path:
    return Path(tempfile.gettempdir(), f"vit_jax-{os.getuid()}")


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


def _use(copy: Path) -> Callable[[], object]:
    """Marks a copy as used by this process, and returns what ends that. The caller has locked the folder."""
    with _counting:
        _lock_use(copy, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _uses[copy] = _uses.get(copy, 0) + 1
    return functools.partial(_end_use, copy)


def _end_use(copy: Path) -> None:
    with _counting:
        _uses[copy] -= 1
        if not _uses[copy]:
            del _uses[copy]
            _lock_use(copy, fcntl.LOCK_UN)


def _is_used(copy: Path) -> bool:
    """Returns whether any process uses a copy. The caller has locked the folder."""
    if copy in _uses:
        return True
    try:
        _lock_use(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # which of them depends on the system
        return True
    _lock_use(copy, fcntl.LOCK_UN)
    return False


def _lock_use(copy: Path, kind: int) -> None:
    """Calls `fcntl.lockf` for the byte of a copy; raises as it does."""
    folder = copy.parent
    is_open = folder in _uses_files and os.fstat(_uses_files[folder].fileno()).st_nlink  # and the cache not removed
    if not is_open and kind != fcntl.LOCK_UN:
        _uses_files[folder] = (folder / "uses").open("a+b")
    place = int.from_bytes(hashlib.sha256(copy.name.encode()).digest()[:7], "big")
    fcntl.lockf(_uses_files[folder], kind, 1, place)


def _record_size(lock: IO[str], size: int) -> None:
    """Writes the size of a copy, in bytes, into its lock file."""
    lock.seek(0)
    lock.truncate()
    lock.write(str(size))
    lock.flush()


def _read_size(copy: Path, lock: IO[str]) -> int:
    """Returns the size that the lock file of a copy states, or else what the copy has."""
    try:
        return int(lock.read())
    except ValueError:  # a loss of power has left zeros, or nothing
        size = _measure(copy)
        _record_size(lock, size)
        return size


def _measure(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _read_total(folder: Path) -> int | None:
    """Returns the bytes that the copies of a folder take at most, or None if nothing states it."""
    try:
        return int((folder / "total").read_text())
    except (FileNotFoundError, ValueError):
        return None


def _write_total(folder: Path, total: int) -> None:
    (folder / "total").write_text(str(total))


def _make_copy(copy: Path, lock: IO[str], size: int, fill: Callable[[Path], None]) -> Callable[[], object]:
    """Makes a copy, for which there is room, and returns what ends its use. The caller holds its lock."""
    unfinished = _unfinished_path(copy)
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        unfinished.mkdir()
        fill(unfinished)
        with _locked(copy.parent):
            actual = _measure(unfinished)
            _record_size(lock, actual)
            total = _read_total(copy.parent)
            if total is not None:  # else the next copy counts anew
                _write_total(copy.parent, total + actual - size)
            unfinished.rename(copy)
            return _use(copy)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _unfinished_path(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.partial")


def _make_room(copy: Path, what: str, size: int) -> None:
    """Makes room for `size` bytes, if the limit might be exceeded. The caller holds the locks of the folder and `copy`.

    Args:
        copy: the folder that is to be filled.
        what: the name of its content in error messages.
        size: the size of its content in bytes.

    Raises:
        NoRoom: the copies in use leave less than `size` bytes; no finished copy is removed.
    """
    total = _read_total(copy.parent)
    if total is None or total + size > max_bytes():
        total = _remove_unused(copy, what, size)
    _write_total(copy.parent, total + size)


def _remove_unused(copy: Path, what: str, size: int) -> int:
    """Removes unfinished copies, and of those that no process uses the least recently used ones, until `copy` fits.

    Returns the bytes that the other copies take. The arguments and the errors are those of `_make_room`.
    """
    used, unused = 0, []
    for path in copy.parent.glob("*.lock"):
        other = path.with_suffix("")
        if other == copy:
            continue
        with path.open("r+") as lock:
            # A process of an earlier version shares the lock of a copy that it uses.
            if _is_used(other) or not _try_lock(lock, fcntl.LOCK_EX):
                used += _read_size(other, lock)
            elif other.exists():
                unused.append(_Unused(other.stat().st_mtime, _read_size(other, lock), other))
            else:
                _remove(other)
    limit = max_bytes()
    if used + size > limit:
        beside = f" in addition to {used / 1e9:.3g} GB in use" if used else ""
        enough = format_rounded_up((used + size) / 1e9, 3)
        raise NoRoom(
            f"{what} needs {size / 1e9:.3g} GB{beside}, more than the {limit / 1e9:.3g} GB that {copy.parent} may "
            f"hold; set VIT_JAX_CACHE_GB={enough} or more, and VIT_JAX_CACHE to a folder with room."
        )
    unused.sort()
    total, removed = used + sum(one.size for one in unused), 0
    while total + size > limit:
        total -= unused[removed].size
        removed += 1
    removed += len(unused) // SPARE if removed else 0
    for one in unused[:removed]:
        one.copy.rename(_unfinished_path(one.copy))  # first, so that no process finds a copy that is half removed
        _remove(one.copy)
    return used + sum(one.size for one in unused[removed:])


def _remove(copy: Path) -> None:
    """Removes what is unfinished of a copy, then its lock file."""
    shutil.rmtree(_unfinished_path(copy), ignore_errors=True)
    copy.with_name(f"{copy.name}.lock").unlink()
