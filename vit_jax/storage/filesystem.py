"""Files by path, local or remote: `gs://bucket/name`, `s3://bucket/name` or any other path that fsspec opens.

Every access to remote files goes through this module. An error of a store's library becomes a `UserError`, and so does
the lack of an answer.
"""

import contextlib
import glob as local_glob
import hashlib
import json
import os
import posixpath
import re
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from vit_jax import UserError, reason, user_errors
from vit_jax.storage import cache
from vit_jax.storage.atomic import atomic_write
from vit_jax.storage.paths import expand_home
from vit_jax.storage.stores import (
    EXTRAS,
    Progress,
    ShortRead,
    call_with_timeout,
    log_recovery,
    open_store,
    retry_transient,
)

CONCURRENT_REQUESTS = 16
# Progress is reported part by part: with parts of 50 MB, ten at once, each would take too long on a slow line.
UPLOAD_OPTIONS = {"chunksize": 2**23, "max_concurrency": 4}
REPEATED = {"read", "list"}  # the operations that are repeated after a transient error
# The fields of a listing that differ between versions of an object; stores know some of them.
FIELDS = (
    *("etag", "ETag", "generation", "mtime", "LastModified", "created"),
    *("last_modified", "Last-Modified", "modified", "modify", "updated", "blob_id", "sha", "Content-MD5"),
)
PROCESSES = "VIT_JAX_PROCESSES"  # the variable by which a process and its workers know each other
DATASET = re.compile(r"hf://datasets/(?P<name>[^/@,+*]+/[^/@,+*]+)(?:@(?P<revision>[^/,+*]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")


class Version(NamedTuple):
    """The version of a remote file; it can be sent to other processes.

    Attributes:
        size: the size in bytes; None: the store does not state it.
        field: the name of the field that identifies the version, one of FIELDS; empty: the store states none of them.
        value: the value of `field`. Without a field, a text that is unique to this process and its workers.
    """

    size: int | None
    field: str
    value: str

    @property
    def text(self) -> str:
        """A short text that differs between a file and another that replaces it."""
        return f"{self.size} {self.value}"

    @property
    def is_known(self) -> bool:
        """Whether the store states the size and a field that changes when another file replaces this one."""
        return bool(self.field) and self.size is not None

    def is_replaced(self, info: dict[str, Any]) -> bool:
        """Returns whether a store's later entry is of another file; False if the entry does not state `field`."""
        return bool(self.field) and str(info.get(self.field, self.value)) != self.value


def version_of(info: dict[str, Any]) -> Version:
    """Returns the version that a store's entry states."""
    field = next((field for field in FIELDS if info.get(field)), "")
    return Version(
        info["size"], field, str(info[field]) if field else os.environ.setdefault(PROCESSES, uuid.uuid4().hex)
    )


def is_remote(path: str) -> bool:
    """Returns whether a path names a file system that is not mounted here: `gs://bucket/name`."""
    return "://" in path


def absolute_path(path: str) -> str:
    """Returns the absolute form of a local path, `~` expanded by `expand_home`; a remote path as it is."""
    return path if is_remote(path) else os.path.abspath(expand_home(path))


def relative_path(path: str) -> str:
    """Returns a local path relative to the current folder if it lies below that folder; any other path as it is."""
    return path.removeprefix(f"{os.getcwd()}/")


def join_path(folder: str, *names: str) -> str:
    """Returns the path of a file in a folder."""
    return posixpath.join(folder, *names)


def read_bytes(path: str) -> bytes:
    """Returns the content of a file.

    Raises:
        UserError: the file cannot be read.
    """
    if is_remote(path):
        return _call_store("read", path, lambda store, name, _: store.cat_file(name))
    with user_errors(f"cannot read {path}"):
        return Path(path).read_bytes()


def read_json(path: str) -> Any:
    """Returns the value in a JSON file, local or remote.

    Raises:
        UserError: the file is missing or not JSON, or an object has two entries of the same key, of which Python would
            take the last.
    """
    try:
        return json.loads(read_bytes(path), object_pairs_hook=_unique_entries)
    except (ValueError, RecursionError) as error:  # the second: nested thousands of times
        raise UserError(f"cannot read {path}: {type(error).__name__}: {error}") from error


def _unique_entries(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of the entries of a JSON object; raises ValueError if two of them have the same key."""
    value = dict(entries)
    if len(value) < len(entries):
        keys = [key for key, _ in entries]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} occurs twice in an object")
    return value


def read_range(path: str, start: int, end: int) -> bytes:
    """Returns the bytes `start` to `end - 1` of a remote file; raises UserError as `read_bytes` does."""
    return _call_store("read", path, lambda store, name, _: store.cat_file(name, start=start, end=end))


def write_bytes(path: str, content: bytes) -> None:
    """Writes a file, whole or not at all.

    Raises:
        UserError: the file cannot be written.
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


def expand_pattern(pattern: str) -> dict[str, Version | None]:
    """Returns path -> version of the files that match a pattern with `*`, `?` and `[...]`, sorted by path.

    The version of a remote file is the one that the store's listing states. The version of a local file is None.

    Raises:
        UserError: the store refuses or does not answer.
    """
    if not is_remote(pattern):
        return dict.fromkeys(sorted(local_glob.glob(pattern)))

    def entries(store: Any, name: str, _: Any) -> dict[str, Version | None]:
        infos = store.glob(name, detail=True)
        return {store.unstrip_protocol(path): version_of(info) for path, info in sorted(infos.items())}

    return _call_store("list", pattern, entries)


def list_files(folder: str) -> list[str]:
    """Returns the sorted names of all files below a remote folder, relative to it; [] if it does not exist.

    Raises:
        UserError: the store refuses or does not answer.
    """
    return sorted(_listing(folder))


def list_versions(folder: str) -> dict[str, Version]:
    """Returns name -> version of all files below a remote folder, sorted by name. Names are relative to the folder.

    Raises:
        UserError: the store refuses or does not answer.
    """
    return {name: version_of(info) for name, info in sorted(_listing(folder).items())}


def file_version(path: str) -> str:
    """Returns a short text that differs between a file and another that replaces it.

    The text contains the size and, for a local file, the time of its modification. For a remote file it contains what
    the store states instead: a version, a checksum or a time. If the store states none of these, the text is unique to
    this process and its workers, so that no later process finds what is cached under it.

    Raises:
        UserError: the file does not exist, or its store refuses or does not answer.
    """
    if is_remote(path):
        return version_of(_info(path)).text
    with user_errors(f"cannot read {path}"):
        status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns}"


def pin_revision(path: str) -> str:
    """Returns a path or a source in which the revision of a data set on the hub is replaced by its commit.

    Where no revision is stated, the commit of main is inserted. A path that is not on the hub is returned as it is.

    Raises:
        UserError: there is no such data set or revision, or the hub does not answer.
    """

    def pin(match: re.Match) -> str:
        name, revision = match["name"], match["revision"]
        commit = revision if COMMIT.fullmatch(revision or "") else _hub_commit(name, revision)
        return f"hf://datasets/{name}@{commit}"

    return DATASET.sub(pin, path)


def unpin_revision(path: str) -> str:
    """Returns a path or a source without the commit that it states. A revision that is not a commit stays."""
    return DATASET.sub(
        lambda match: f"hf://datasets/{match['name']}" if COMMIT.fullmatch(match["revision"] or "") else match[0], path
    )


def _hub_commit(name: str, revision: str | None) -> str:
    """Returns the commit of a revision (None: main) of the data set OWNER/NAME on the hub; raises as `read_bytes`."""

    def ask(store: Any, _: str, __: Progress) -> str:
        import huggingface_hub  # there if its store could be opened

        hub = huggingface_hub.HfApi(endpoint=store.endpoint, token=store.token)
        return hub.dataset_info(name, revision=revision).sha

    return _call_store("read", f"hf://datasets/{name}", ask)


def local_copy(path: str, *sibling_names: str, version: Version | None = None) -> str:
    """Returns a local path of a file: the path itself if it is local, else the path of a copy.

    The copy lies in the `cache` and is made again when the remote file has changed.

    Args:
        path: the path of the file.
        *sibling_names: names of files in the same folder that are copied along with it.
        version: the version of the file that is wanted, as `expand_pattern` states it; None: the present version, for
            which the store is asked.

    Raises:
        UserError: the file cannot be read, has been replaced, or does not fit into the cache.
    """
    if not is_remote(path):
        return path
    folder, name = posixpath.split(path)
    versions = {name: _wanted(path, version)} | {one: _wanted(join_path(folder, one), None) for one in sibling_names}
    return os.path.join(_copy_to_cache(folder, versions), name)


def borrow_copy(path: str, version: Version | None = None) -> tuple[str, Callable[[], object]]:
    """Returns a local path of a file, as `local_copy` does, and a function that releases the copy, to be called once.

    The copy is not removed before it is released. A file that is still open at that moment can be read to its end.

    Raises:
        UserError: as `local_copy`.
    """
    if not is_remote(path):
        return path, lambda: None
    folder, name = posixpath.split(path)
    place, release = cache.borrow_folder(*_cached_content(folder, {name: _wanted(path, version)}))
    return str(place / name), release


def local_copy_of_folder(folder: str, wanted: Callable[[str], bool] = lambda name: True) -> str:
    """Returns a local folder with copies of files of a remote folder. They are cached like the copies of `local_copy`.

    Args:
        folder: the remote folder.
        wanted: takes a name relative to the folder and returns whether to copy that file; all by default.

    Raises:
        UserError: there are no such files, they cannot be read, or they do not fit into the cache.
    """
    versions = {name: version_of(info) for name, info in _listing(folder).items() if wanted(name)}
    if not versions:
        raise UserError(f"there is no {folder}.")
    return _copy_to_cache(folder, versions)


def download(folder: str, names: Iterable[str], target: Path) -> None:
    """Copies files of a remote folder, many at once, into a local folder.

    Args:
        folder: the remote folder.
        names: the names of the files, relative to the folder; or name -> version, which refuses other versions.
        target: the local folder.

    Raises:
        UserError: a file cannot be read, or has been replaced.
    """
    versions = names if isinstance(names, Mapping) else dict.fromkeys(names)

    def copy(name: str) -> None:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        _copy(join_path(folder, name), versions[name], target / name)

    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        list(pool.map(copy, versions))


def upload(path: str | Path, remote: str) -> None:
    """Copies a local file to a remote path, whole or not at all.

    Raises:
        UserError: the remote file cannot be written.
    """
    _call_store(
        "write",
        remote,
        lambda store, name, progress: store.put_file(str(path), name, callback=progress, **UPLOAD_OPTIONS),
    )


def move_folder(folder: str, target: str, removed_first: str = "") -> None:
    """Renames a folder, local or remote; `target` is the new path on the same disk or store.

    On a store all files are copied before any is removed, and the file with the name `removed_first` is removed before
    the others.

    Raises:
        UserError: the folder cannot be renamed, or a file cannot be copied or removed.
    """
    if not is_remote(folder):
        with user_errors(f"cannot rename {folder}"):
            Path(folder).rename(target)
        return

    def copy(name: str) -> None:
        new = join_path(target, name)
        _call_store("move", join_path(folder, name), lambda store, key, _: store.cp_file(key, _key(store, new)))

    names = list_files(folder)
    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        list(pool.map(copy, names))
    for is_first in (True, False):
        remove_files(folder, [name for name in names if (name == removed_first) == is_first])


def remove_files(folder: str, names: list[str]) -> None:
    """Removes files of a remote folder, named relative to it. Files that do not exist are skipped.

    Raises:
        UserError: a file cannot be removed.
    """

    def rm(store: Any, name: str, _: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            store.rm_file(name)  # unlike `rm`, takes `*` and `[` literally

    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        list(pool.map(lambda one: _call_store("remove", join_path(folder, one), rm), names))


def _info(path: str) -> dict[str, Any]:
    """Returns the store's entry of a remote file: fsspec's `info`."""
    return _call_store("read", path, lambda store, key, _: store.info(key))


def _wanted(path: str, version: Version | None) -> Version:
    """Returns `version` if it is known (`Version.is_known`), else the version that the store states now.

    Raises:
        UserError: the path is a folder, or an error of `_call_store`.
    """
    if version and version.is_known:
        return version
    info = _info(path)
    if info["type"] == "directory":
        raise UserError(f"{path} is a folder, not a file.")
    return version_of(info)


def _listing(folder: str) -> dict[str, dict[str, Any]]:
    """Returns name, relative to `folder` -> the store's entry, for all files below. Lists many folders at once."""

    def list_folder(relative: str) -> dict[str, dict[str, Any]]:
        def entries(store: Any, top: str, _: Any) -> dict[str, dict[str, Any]]:
            try:
                infos = store.ls(top, detail=True)
            except FileNotFoundError:
                return {}
            named = {posixpath.join(relative, posixpath.basename(one["name"].rstrip("/"))): one for one in infos}
            # Some stores list an empty object for the folder itself.
            return {name: one for name, one in named.items() if one["name"].strip("/") != top.strip("/")}

        return _call_store("list", join_path(folder, relative).rstrip("/"), entries)

    files: dict[str, dict[str, Any]] = {}
    folders = [""]
    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        while folders:
            level = {name: info for entries in pool.map(list_folder, folders) for name, info in entries.items()}
            folders = [name for name, info in level.items() if info["type"] == "directory"]
            files |= {name: info for name, info in level.items() if info["type"] != "directory"}
    return files


def _copy_to_cache(folder: str, versions: dict[str, Version]) -> str:
    return str(cache.cached_folder(*_cached_content(folder, versions)))


def _cached_content(folder: str, versions: dict[str, Version]) -> tuple[str, str, int, Callable[[Path], None]]:
    """Returns the arguments of `cache.cached_folder` for files of a remote folder, given as name -> version."""
    texts = [(name, version.text) for name, version in sorted(versions.items())]
    key = hashlib.sha256(repr((folder, texts)).encode()).hexdigest()[:32]
    size = sum(version.size or 0 for version in versions.values())
    what = join_path(folder, *versions) if len(versions) == 1 else folder
    return key, what, size, lambda place: download(folder, versions, place)


def _copy(path: str, version: Version | None, target: Path) -> None:
    """Copies a remote file to `target`.

    Raises:
        UserError: the file cannot be read, or is of another version than `version`, unless that is None.
    """

    def copy(store: Any, key: str, progress: Progress) -> None:
        # Each attempt has a file of its own: an attempt that was given up may still write to its file, or remove it.
        unfinished = target.with_name(f"{target.name}.{secrets.token_hex(4)}")
        try:
            store.get_file(key, str(unfinished), callback=progress)
            if version:
                # Asked after the copy, so that a replacement during the copy is noticed too.
                now, size = store.info(key), unfinished.stat().st_size
                # Some stores write the same time in another way when they list.
                if version.is_replaced(now) and all(map(version.is_replaced, store.ls(key, detail=True))):
                    raise UserError(
                        f"{path} was replaced after this run had listed it; run the same command again to read it anew."
                    )
                if now["size"] not in (None, size):
                    raise ShortRead(f"only {size} of its {now['size']} bytes came")
            unfinished.rename(target)
        finally:
            unfinished.unlink(missing_ok=True)

    _call_store("read", path, copy)


def _call_store(verb: str, path: str, call: Callable[[Any, str, Progress], Any]) -> Any:
    """Returns what `call(store, key, progress)` returns; `key` is the name by which the store knows `path`.

    `verb` names the operation in messages. An operation in `REPEATED` is repeated after a transient error.

    Raises:
        UserError: a package is missing, the file does not exist, or the store refuses or does not answer.
    """
    protocol, _, rest = path.partition("://")
    server = f"{protocol}://{rest.partition('/')[0]}"

    def once(progress: Progress) -> Any:
        store = open_store(server, os.getpid())
        return call(store, _key(store, path), progress)

    def run(progress: Progress) -> Any:
        began = time.monotonic()
        result = retry_transient(once, progress) if verb in REPEATED else once(progress)
        log_recovery(path, progress, time.monotonic() - began)
        return result

    with user_errors(f"cannot {verb} {path}", Exception):  # each store's library has its own exceptions
        try:
            return call_with_timeout(path, run)
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
