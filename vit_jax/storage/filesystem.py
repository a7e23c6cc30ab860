"""Files by path, local or remote: `gs://bucket/name`, `s3://bucket/name` or whatever else fsspec opens.

The one place where a path may be remote. What a store's library raises, and its silence, become a sentence.
"""

import contextlib
import functools
import glob as local_glob
import hashlib
import os
import posixpath
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec

from vit_jax import BUGS, UserError
from vit_jax.storage import cache, timeout

PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs"}  # kind of path -> what opens it
TAGS = ("etag", "ETag", "generation", "mtime", "LastModified", "created")  # what tells versions of an object apart
AT_ONCE = 16  # requests
# Progress is told part by part: parts of 50 MB, ten at once, would each take too long on a healthy but slow line.
PARTS = {"chunksize": 2**23, "max_concurrency": 4}

# A listing must show what others, and Orbax's own writer, have written meanwhile.
for _kind in ("gs", "gcs", "s3", "s3a"):
    fsspec.config.conf.setdefault(_kind, {})["use_listings_cache"] = False
for _kind in ("s3", "s3a"):
    fsspec.config.conf[_kind]["max_concurrency"] = 1  # of parts to read: files are read as streams, `AT_ONCE`


def is_remote(path: str) -> bool:
    """Returns whether a path names a file system that is not mounted here: `gs://bucket/name`."""
    return "://" in path


def absolute_path(path: str) -> str:
    """Returns a path that means the same from wherever one stands."""
    return path if is_remote(path) else os.path.abspath(os.path.expanduser(path))


def join_path(folder: str, *names: str) -> str:
    """Returns the path of what lies in a folder."""
    return posixpath.join(folder, *names)


def read_bytes(path: str) -> bytes:
    """Returns what a file holds.

    Raises:
        UserError: it cannot be read.
    """
    if is_remote(path):
        return _ask("read", path, lambda store, name, _: store.cat_file(name))
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def write_bytes(path: str, content: bytes) -> None:
    """Writes a file, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    if is_remote(path):
        _ask("write", path, lambda store, name, _: store.pipe_file(name, content))
        return
    partial = Path(f"{path}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def exists(path: str) -> bool:
    """Returns whether there is a file.

    Raises:
        UserError: the store cannot be asked.
    """
    if not is_remote(path):
        return Path(path).is_file()
    return _ask("read", path, lambda store, name, _: store.exists(name))


def expand_pattern(pattern: str) -> list[str]:
    """Returns the sorted paths of the files that a pattern with `*`, `?` and `[...]` names.

    Raises:
        UserError: the store cannot be asked.
    """
    if not is_remote(pattern):
        return sorted(local_glob.glob(pattern))
    return _ask("list", pattern, lambda store, name, _: sorted(map(store.unstrip_protocol, store.glob(name))))


def list_files(folder: str) -> list[str]:
    """Returns the sorted names, relative to a remote folder, of all files below it; none if it is absent.

    Raises:
        UserError: the store cannot be asked.
    """
    return sorted(_listing(folder))


def local_copy(path: str, *beside: str) -> str:
    """Returns a path under which a file can be opened here: its own, or that of a copy of a remote one.

    The copy lies in a bounded cache (see `cache`) and is made anew when the remote file has changed.

    Args:
        path: of the file.
        *beside: names of files in the same folder that are to lie beside it.

    Raises:
        UserError: the file cannot be read, or does not fit.
    """
    if not is_remote(path):
        return path
    folder, name = posixpath.split(path)
    infos = {
        one: _ask("read", join_path(folder, one), lambda store, key, _: store.info(key)) for one in (name, *beside)
    }
    for one, info in infos.items():
        if info["type"] == "directory":
            raise UserError(f"{join_path(folder, one)} is a folder, not a file.")
    return os.path.join(_fetch(folder, infos), name)


def local_copy_of_folder(folder: str, wanted: Callable[[str], bool] = lambda name: True) -> str:
    """Returns a folder here with copies of the files of a remote one, or of some; cached as those of `local`.

    Args:
        folder: remote.
        wanted: takes a name relative to the folder and says whether that file is needed.

    Raises:
        UserError: there are no such files, they cannot be read, or do not fit.
    """
    infos = {name: info for name, info in _listing(folder).items() if wanted(name)}
    if not infos:
        raise UserError(f"there is no {folder}.")
    return _fetch(folder, infos)


def download(folder: str, names: Iterable[str], target: Path) -> None:
    """Copies files of a remote folder, by their names relative to it, into a folder here.

    Raises:
        UserError: they cannot be read.
    """

    def copy(name: str) -> None:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        where = str(target / name)
        _ask(
            "read", join_path(folder, name), lambda store, key, progress: store.get_file(key, where, callback=progress)
        )

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(copy, names))


def upload(path: str | Path, remote: str) -> None:
    """Writes a local file to a remote path, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    _ask("write", remote, lambda store, name, progress: store.put_file(str(path), name, callback=progress, **PARTS))


def move_folder(folder: str, names: list[str], target: str) -> None:
    """Moves files of a remote folder, by their names relative to it, to another one of the same store: the first is the
    first to be gone from the old folder, where all stay until all are copied.

    Raises:
        UserError: they cannot be copied or removed.
    """

    def copy(name: str) -> None:
        new = join_path(target, name)
        _ask("read", join_path(folder, name), lambda store, key, _: store.cp_file(key, store._strip_protocol(new)))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(copy, names))
    remove_files(folder, names[:1])
    remove_files(folder, names[1:])


def remove_files(folder: str, names: list[str]) -> None:
    """Removes files of a remote folder, by their names relative to it; some may be gone already.

    Raises:
        UserError: they cannot be removed.
    """

    def rm(store: Any, name: str, _: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            store.rm_file(name)  # unlike rm, takes the name as it is: `*` and `[` are letters

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda one: _ask("remove", join_path(folder, one), rm), names))


def _listing(folder: str) -> dict[str, dict[str, Any]]:
    """Returns relative name -> what the store tells of each file, asked folder by folder, many at once."""

    def ask(relative: str) -> dict[str, dict[str, Any]]:
        def entries(store: Any, top: str, _: Any) -> dict[str, dict[str, Any]]:
            try:
                found = store.ls(top, detail=True)
            except FileNotFoundError:
                return {}
            named = {posixpath.join(relative, posixpath.basename(one["name"].rstrip("/"))): one for one in found}
            # Some stores list a folder's own empty object in it.
            return {name: one for name, one in named.items() if one["name"].strip("/") != top.strip("/")}

        return _ask("list", join_path(folder, relative).rstrip("/"), entries)

    found: dict[str, dict[str, Any]] = {}
    folders = [""]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while folders:
            level = {name: info for entries in pool.map(ask, folders) for name, info in entries.items()}
            folders = [name for name, info in level.items() if info["type"] == "directory"]
            found |= {name: info for name, info in level.items() if info["type"] != "directory"}
    return found


def _fetch(folder: str, infos: dict[str, dict[str, Any]]) -> str:
    versions = [
        (name, info["size"], next((str(info[tag]) for tag in TAGS if info.get(tag)), ""))
        for name, info in sorted(infos.items())
    ]
    key = hashlib.sha256(repr((folder, versions)).encode()).hexdigest()[:32]
    size = sum(info["size"] or 0 for info in infos.values())
    what = join_path(folder, *infos) if len(infos) == 1 else folder

    def fill(place: Path) -> None:
        download(folder, infos, place)
        for name, info in infos.items():
            if info["size"] is not None and (place / name).stat().st_size != info["size"]:
                raise UserError(f"{join_path(folder, name)} was cut short, or changed, while it was copied; try again.")

    return str(cache.cached_folder(key, what, size, fill))


def _ask(verb: str, path: str, call: Callable[[Any, str, timeout.Progress], Any]) -> Any:
    """Returns what `call(file system, name in it, progress)` returns.

    Raises:
        UserError: the package that opens such paths is missing, there is no such file, no permission, or no answer.
    """

    kind, _, place = path.partition("://")
    server = f"{kind}://{place.partition('/')[0]}"

    def run(progress: timeout.Progress) -> Any:
        store = _store(server, os.getpid())
        return call(store, store._strip_protocol(path), progress)

    try:
        return timeout.call_with_timeout(path, run)
    except (UserError, *BUGS):
        raise
    except ImportError as error:
        command = f"pip install {PACKAGES[kind]}" if kind in PACKAGES else str(error)
        raise UserError(f"{kind}:// paths need a package that is not installed: {command}") from error
    except FileNotFoundError as error:
        raise UserError(f"there is no {path}, or no bucket {server}.") from error
    except PermissionError as error:
        raise UserError(f"no permission to {verb} {path}: {_first_line(error)}") from error
    except Exception as error:  # of whatever library speaks with the store
        raise UserError(f"cannot {verb} {path}: {_first_line(error)}") from error


@functools.cache
def _store(server: str, process: int) -> Any:
    """Returns the file system of a server: one for all threads, with its open connections, but none is inherited."""
    if server.startswith(("gs://", "gcs://")):
        _limit_google()
    return fsspec.core.url_to_fs(server)[0]


def _limit_google() -> None:
    """Gives gcsfs and TensorStore, which Orbax uses and which wait for ever, a limit for silence; they try again."""
    import aiohttp  # comes with gcsfs

    silence = aiohttp.ClientTimeout(sock_connect=timeout.TIMEOUT, sock_read=timeout.TIMEOUT)
    for kind in ("gs", "gcs"):
        fsspec.config.conf[kind]["requests_timeout"] = silence
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", f"{timeout.TIMEOUT:.0f}")
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
