"""Files by path, local or remote: `gs://bucket/name`, `s3://bucket/name` or any other path that fsspec opens.

Every access to remote files goes through this module. Errors of a store's library, and its silence, become sentences.
"""

import contextlib
import functools
import glob as local_glob
import hashlib
import os
import posixpath
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec

from vit_jax import UserError, reason, user_errors
from vit_jax.storage import cache, timeout
from vit_jax.storage.atomic import atomic_write

EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}  # protocol -> the extra that opens its paths
# The fields of a listing that differ between versions of an object; stores know some of them.
VERSION_FIELDS = (
    *("etag", "ETag", "generation", "mtime", "LastModified", "created"),
    *("last_modified", "Last-Modified", "modified", "modify", "updated", "blob_id", "sha", "Content-MD5"),
)
PROCESSES = "VIT_JAX_PROCESSES"  # the variable by which a process and its workers know each other
CONCURRENT_REQUESTS = 16
# Progress is reported part by part: with parts of 50 MB, ten at once, each would take too long on a slow line.
UPLOAD_OPTIONS = {"chunksize": 2**23, "max_concurrency": 4}


def is_remote(path: str) -> bool:
    """Returns whether a path names a file system that is not mounted here: `gs://bucket/name`."""
    return "://" in path


def absolute_path(path: str) -> str:
    """Returns the path, absolute if it is local."""
    return path if is_remote(path) else os.path.abspath(os.path.expanduser(path))


def relative_path(path: str) -> str:
    """Returns a local path relative to the current folder if it lies below it; else the path."""
    here = f"{os.getcwd()}/"
    return path.removeprefix(here)


def join_path(folder: str, *names: str) -> str:
    """Returns the path of a file in a folder."""
    return posixpath.join(folder, *names)


def read_bytes(path: str) -> bytes:
    """Returns the content of a file.

    Raises:
        UserError: it cannot be read.
    """
    if is_remote(path):
        return _call_store("read", path, lambda store, name, _: store.cat_file(name))
    with user_errors(f"cannot read {path}"):
        return Path(path).read_bytes()


def read_range(path: str, start: int, end: int) -> bytes:
    """Returns some bytes of a remote file; raises UserError as `read_bytes` does."""
    return _call_store("read", path, lambda store, name, _: store.cat_file(name, start=start, end=end))


def write_bytes(path: str, content: bytes) -> None:
    """Writes a file, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    if is_remote(path):
        _call_store("write", path, lambda store, name, _: store.pipe_file(name, content))
        return
    with user_errors(f"cannot write {path}"), atomic_write(path) as temporary:
        temporary.write_bytes(content)


def exists(path: str) -> bool:
    """Returns whether a file exists.

    Raises:
        UserError: the store refuses or does not answer.
    """
    if not is_remote(path):
        return Path(path).is_file()
    return _call_store("read", path, lambda store, name, _: store.exists(name))


def expand_pattern(pattern: str) -> list[str]:
    """Returns the sorted paths of the files that match a pattern with `*`, `?` and `[...]`.

    Raises:
        UserError: the store refuses or does not answer.
    """
    return list(pattern_sizes(pattern)) if is_remote(pattern) else sorted(local_glob.glob(pattern))


def pattern_sizes(pattern: str) -> dict[str, int | None]:
    """Returns the sizes in bytes, None if not known, of the remote files that `expand_pattern` finds, by path."""

    def glob(store: Any, name: str, _: Any) -> dict[str, int | None]:
        found = store.glob(name, detail=True)
        return {store.unstrip_protocol(path): found[path]["size"] for path in sorted(found)}

    return _call_store("list", pattern, glob)


def list_files(folder: str) -> list[str]:
    """Returns the sorted names, relative to a remote folder, of all files below it; none if it does not exist.

    Raises:
        UserError: the store refuses or does not answer.
    """
    return sorted(_listing(folder))


def list_versions(folder: str) -> dict[str, str]:
    """Returns the `file_version` of all files below a remote folder, by their names relative to it, sorted.

    Raises:
        UserError: the store refuses or does not answer.
    """
    return {name: _version(info) for name, info in sorted(_listing(folder).items())}


def list_sizes(folder: str) -> dict[str, int | None]:
    """Returns the sizes in bytes of all files below a remote folder, by their names relative to it; None: not known.

    Raises:
        UserError: the store refuses or does not answer.
    """
    return {name: info["size"] for name, info in _listing(folder).items()}


def file_version(path: str) -> str:
    """Returns a short text that differs between a file and another that replaces it.

    It contains the size and, of a local file, its time; of a remote one, what its store knows: a version, a checksum or
    a time. Where the store knows none of them the text is of this process and its workers alone, so that what is kept
    under it is not found again.

    Raises:
        UserError: the file does not exist, or its store refuses or does not answer.
    """
    if is_remote(path):
        return _version(_info(path))
    with user_errors(f"cannot read {path}"):
        status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns}"


def local_copy(path: str, *beside: str) -> str:
    """Returns a local path of a file: its own, or that of a copy of a remote file.

    The copy lies in the `cache` and is made again when the remote file has changed.

    Args:
        path: of the file.
        *beside: names of files in the same folder to copy along with it.

    Raises:
        UserError: the file cannot be read, or does not fit into the cache.
    """
    if not is_remote(path):
        return path
    folder, name = posixpath.split(path)
    infos = {one: _info(join_path(folder, one)) for one in (name, *beside)}
    for one, info in infos.items():
        if info["type"] == "directory":
            raise UserError(f"{join_path(folder, one)} is a folder, not a file.")
    return os.path.join(_copy_to_cache(folder, infos), name)


def borrow_copy(path: str) -> tuple[str, Callable[[], None]]:
    """Returns a local path of a file, as `local_copy` does, and a function that gives it back.

    Until then, a copy stays; what is open then can be read to its end.

    Raises:
        UserError: as `local_copy`.
    """
    if not is_remote(path):
        return path, lambda: None
    folder, name = posixpath.split(path)
    place, lock = cache.borrow_folder(*_cached_content(folder, {name: _info(path)}))
    return str(place / name), lock.close


def local_copy_of_folder(folder: str, wanted: Callable[[str], bool] = lambda name: True) -> str:
    """Returns a local folder with copies of files of a remote folder, cached as those of `local_copy`.

    Args:
        folder: the remote folder.
        wanted: takes a name relative to the folder and returns whether to copy that file; all by default.

    Raises:
        UserError: there are no such files, they cannot be read, or they do not fit into the cache.
    """
    infos = {name: info for name, info in _listing(folder).items() if wanted(name)}
    if not infos:
        raise UserError(f"there is no {folder}.")
    return _copy_to_cache(folder, infos)


def download(folder: str, names: Iterable[str], target: Path) -> None:
    """Copies files of a remote folder, named relative to it, into a local folder.

    Raises:
        UserError: they cannot be read.
    """

    def copy(name: str) -> None:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        where = str(target / name)
        _call_store(
            "read", join_path(folder, name), lambda store, key, progress: store.get_file(key, where, callback=progress)
        )

    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        list(pool.map(copy, names))


def upload(path: str | Path, remote: str) -> None:
    """Writes a local file to a remote path, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    _call_store(
        "write",
        remote,
        lambda store, name, progress: store.put_file(str(path), name, callback=progress, **UPLOAD_OPTIONS),
    )


def move_folder(folder: str, names: list[str], target: str) -> None:
    """Moves files of a remote folder, named relative to it, to another folder of the same store.

    All files are copied before any is removed; the first name is removed before the others.

    Raises:
        UserError: they cannot be copied or removed.
    """

    def copy(name: str) -> None:
        new = join_path(target, name)
        _call_store("read", join_path(folder, name), lambda store, key, _: store.cp_file(key, _key(store, new)))

    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        list(pool.map(copy, names))
    remove_files(folder, names[:1])
    remove_files(folder, names[1:])


def remove_files(folder: str, names: list[str]) -> None:
    """Removes files of a remote folder, named relative to it. Files that do not exist are skipped.

    Raises:
        UserError: they cannot be removed.
    """

    def rm(store: Any, name: str, _: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            store.rm_file(name)  # unlike `rm`, takes `*` and `[` literally

    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        list(pool.map(lambda one: _call_store("remove", join_path(folder, one), rm), names))


def _info(path: str) -> dict[str, Any]:
    """Returns the store's entry of a remote file."""
    return _call_store("read", path, lambda store, key, _: store.info(key))


def _version(info: dict[str, Any]) -> str:
    """Returns the `file_version` of a store's entry."""
    known = [str(info[field]) for field in VERSION_FIELDS if info.get(field)]
    return f"{info['size']} {known[0] if known else os.environ.setdefault(PROCESSES, uuid.uuid4().hex)}"


def _listing(folder: str) -> dict[str, dict[str, Any]]:
    """Returns relative name -> the store's entry of each file; asks folder by folder, many at once."""

    def list_folder(relative: str) -> dict[str, dict[str, Any]]:
        def entries(store: Any, top: str, _: Any) -> dict[str, dict[str, Any]]:
            try:
                found = store.ls(top, detail=True)
            except FileNotFoundError:
                return {}
            named = {posixpath.join(relative, posixpath.basename(one["name"].rstrip("/"))): one for one in found}
            # Some stores list an empty object for the folder itself.
            return {name: one for name, one in named.items() if one["name"].strip("/") != top.strip("/")}

        return _call_store("list", join_path(folder, relative).rstrip("/"), entries)

    found: dict[str, dict[str, Any]] = {}
    folders = [""]
    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        while folders:
            level = {name: info for entries in pool.map(list_folder, folders) for name, info in entries.items()}
            folders = [name for name, info in level.items() if info["type"] == "directory"]
            found |= {name: info for name, info in level.items() if info["type"] != "directory"}
    return found


def _copy_to_cache(folder: str, infos: dict[str, dict[str, Any]]) -> str:
    return str(cache.cached_folder(*_cached_content(folder, infos)))


def _cached_content(folder: str, infos: dict[str, dict[str, Any]]) -> tuple[str, str, int, Callable[[Path], None]]:
    """Returns what `cache.cached_folder` takes, of some files of a remote folder."""
    versions = [(name, _version(info)) for name, info in sorted(infos.items())]
    key = hashlib.sha256(repr((folder, versions)).encode()).hexdigest()[:32]
    size = sum(info["size"] or 0 for info in infos.values())
    what = join_path(folder, *infos) if len(infos) == 1 else folder

    def fill(place: Path) -> None:
        download(folder, infos, place)
        for name, info in infos.items():
            if info["size"] is not None and (place / name).stat().st_size != info["size"]:
                raise UserError(f"{join_path(folder, name)} was truncated or changed while it was copied; try again.")

    return key, what, size, fill


def _call_store(verb: str, path: str, call: Callable[[Any, str, timeout.Progress], Any]) -> Any:
    """Returns what `call(store, name in it, progress)` returns.

    Raises:
        UserError: a package is missing, the file does not exist, or the store refuses or does not answer.
    """
    protocol, _, rest = path.partition("://")
    server = f"{protocol}://{rest.partition('/')[0]}"

    def run(progress: timeout.Progress) -> Any:
        store = open_store(server, os.getpid())
        return call(store, _key(store, path), progress)

    with user_errors(f"cannot {verb} {path}", Exception):  # each store's library has its own exceptions
        try:
            return timeout.call_with_timeout(path, run)
        except ImportError as error:
            command = f"pip install -e '.[{EXTRAS[protocol]}]'" if protocol in EXTRAS else str(error)
            raise UserError(f"{protocol}:// paths need a package that is not installed: {command}") from error
        except FileNotFoundError as error:
            raise UserError(f"there is no {path}, or no bucket {server}.") from error
        except PermissionError as error:
            raise UserError(f"no permission to {verb} {path}: {reason(error)}") from error


def _key(store: Any, path: str) -> str:
    """Returns the name by which a store knows a path."""
    # The public way, `url_to_fs(path)[1]`, also opens a store for every thread, each with its own connections.
    return store._strip_protocol(path)


@functools.cache
def open_store(server: str, process: int) -> Any:
    """Returns fsspec's file system of a server, such as "gs://bucket".

    All threads of a process share it and its connections; forked processes cannot, hence the process number.
    """
    _configure_stores()
    if server.startswith(("gs://", "gcs://")):
        _limit_google()
    return fsspec.core.url_to_fs(server)[0]


def _configure_stores() -> None:
    """Sets the defaults of the stores that this package and, through fsspec too, Orbax open from now on."""
    settings = {protocol: fsspec.config.conf.setdefault(protocol, {}) for protocol in EXTRAS}
    for protocol, options in settings.items():
        options["use_listings_cache"] = False  # other processes, and Orbax's own writer, add files
        if EXTRAS[protocol] == "s3":
            options["max_concurrency"] = 1  # parts of a file: files are read as streams, `CONCURRENT_REQUESTS` at once


def _limit_google() -> None:
    """Limits how long gcsfs and TensorStore (which Orbax uses) wait for a silent server; by default they never stop."""
    import aiohttp  # a dependency of gcsfs

    limit = aiohttp.ClientTimeout(sock_connect=timeout.TIMEOUT, sock_read=timeout.TIMEOUT)
    for kind in ("gs", "gcs"):
        fsspec.config.conf[kind]["requests_timeout"] = limit
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", f"{timeout.TIMEOUT:.0f}")
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
