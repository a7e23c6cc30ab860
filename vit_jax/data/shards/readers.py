"""Readers of shards of any format.

A shard is opened when it is first read, and kept open for a while. A remote shard is copied into the cache first.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from vit_jax import UserError, user_errors
from vit_jax.data.shards.array_record_file import ArrayRecordFile
from vit_jax.data.shards.parquet_file import ParquetFile
from vit_jax.data.shards.tar_file import TarFile
from vit_jax.data.shards.tfrecord_file import TFRecordFile
from vit_jax.machine import raise_open_files_limit
from vit_jax.storage import Version, cache, filesystem

OPEN_FILES = raise_open_files_limit()  # per process; each shard that is open is one
MAX_OPEN, MAX_STREAMED = min(512, OPEN_FILES // 2), OPEN_FILES // 4  # shards per process
STREAMED_BYTES = 64_000_000  # about the size of a shard to be streamed, since hosts hold a few of them at a time
ROOM_WAIT = 60.0  # seconds that other processes have to close the shards that they stream


@runtime_checkable
class ShardReader(Protocol):
    """An open shard, which threads may share; it is closed when nothing refers to it."""

    def num_records(self) -> int:
        """Returns the number of records."""

    def read(self, row: int) -> Any:
        """Returns a record, in the form that its format has; raises ValueError if it is damaged."""


# Format -> function of (path for messages, path of the file or of its local copy) that returns the reader, or raises
# UserError if the file is damaged.
FORMATS: dict[str, Callable[[str, str], ShardReader]] = {
    "array_record": ArrayRecordFile,
    "parquet": ParquetFile,
    "tar": TarFile,
    "tfrecord": TFRecordFile,
}


class Shard(NamedTuple):
    """A file of records.

    Attributes:
        path: the path of the file, local or remote.
        records: the number of its records.
        size: in bytes, or None if nothing states it.
        version: the version of a remote file when it was listed; another version is refused. None: any version.
        format: one of `FORMATS`.
    """

    path: str
    records: int
    size: int | None
    version: Version | None = None
    format: str = "array_record"


class StreamedShard(NamedTuple):
    """A shard that is open only while it is streamed.

    Attributes:
        reader: the reader of the shard.
        give_back: called when the shard is closed; a local copy of a remote shard may be removed then.
    """

    reader: ShardReader
    give_back: Callable[[], object]


_streamed: dict[str, StreamedShard] = {}  # by path
_needed: dict[int, Collection[str]] = {}  # owner, such as the id of a `ShardFetcher` -> paths that it needs


def check_file_size(path: str, expected: int | None) -> None:
    """Raises UserError if a local file cannot be opened or does not have `expected` bytes; None: any size."""
    with user_errors(f"cannot read {path}"), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
    if expected not in (None, size):
        raise UserError(f"{path} has {size} bytes, but its data set states {expected}; copy or pack it again")


def open_reader(path: str, local: str, size: int | None = None, format: str = "array_record") -> ShardReader:
    """Opens the file `local`, which is the shard `path` itself or a local copy of it; error messages name `path`.

    Raises:
        UserError: the file is truncated, has not the stated size, or is not of the format.
    """
    check_file_size(local, size)
    return FORMATS[format](path, local)


def open_shard(shard: Shard, local: str) -> ShardReader:
    """Opens a shard at `local`, which is its own path or that of a local copy.

    Raises:
        UserError: as `open_reader`, or the number of records is not the stated one.
    """
    reader = open_reader(shard.path, local, shard.size, shard.format)
    if reader.num_records() != shard.records:
        raise UserError(
            f"{shard.path} has {reader.num_records()} records, but its data set states {shard.records}; copy or "
            "pack it again"
        )
    return reader


def count_records(
    path: str, size: int | None = None, version: Version | None = None, format: str = "array_record"
) -> int:
    """Returns the number of records of a shard, after copying a remote one; raises UserError as `open_reader` does."""
    return open_reader(path, filesystem.local_copy(path, version=version), size, format).num_records()


@functools.cache
def local_path(path: str, version: Version | None = None) -> str:
    """Returns the path of a shard or of its local copy, which stays while this process runs."""
    return filesystem.local_copy(path, version=version)


@functools.lru_cache(MAX_OPEN)
def cached_reader(shard: Shard) -> ShardReader:
    """Returns the reader of a shard, which any number of threads may use.

    The `MAX_OPEN` shards that were used last stay open in this process.

    Raises:
        UserError: the file is damaged, has another number of records than stated, or was replaced after it was listed.
    """
    return open_shard(shard, local_path(shard.path, shard.version))


def forget_readers() -> None:
    """Forgets the cached readers, so that each shard, which may have been replaced, is opened anew when it is read."""
    cached_reader.cache_clear()
    local_path.cache_clear()


def streamed_reader(shard: Shard, may_wait: bool = True) -> ShardReader:
    """Returns the reader of a shard, which threads may share. It and its local copy stay until `close_streamed`.

    Of more than `MAX_STREAMED` shards, those that were opened first are closed, and opened again when they are needed.

    Args:
        shard: the shard to open.
        may_wait: what happens if the cache has no room. True, for a shard that is needed now: the streamed shards of
            this process are closed, and other processes have `ROOM_WAIT` seconds to close theirs. A shard that is
            closed so is copied again when it is needed. False: UserError is raised at once.

    Raises:
        UserError: as `cached_reader`, or the cache has no room.
    """
    entry, end = _streamed.get(shard.path), time.monotonic() + ROOM_WAIT
    while entry is None:
        with contextlib.ExitStack() as unused:
            try:
                local, give_back = filesystem.borrow_copy(shard.path, shard.version)
            except cache.NoRoom:
                if not may_wait or time.monotonic() > end:
                    raise
                _close(_streamed)
                time.sleep(0.1)
                continue
            unused.callback(give_back)
            opened = StreamedShard(open_shard(shard, local), give_back)
            entry = _streamed.setdefault(shard.path, opened)
            if entry is opened:  # and not one that another thread has opened meanwhile
                unused.pop_all()
            _close(list(_streamed)[:-MAX_STREAMED])
    return entry.reader


def close_streamed(keep: Collection[str], owner: int = 0) -> None:
    """Closes the readers that `streamed_reader` has opened in this process, except of shards that an owner needs.

    Args:
        keep: the paths of the shards that the calling owner needs from now on, in place of those that it named before.
        owner: identifies the caller, such as the id of a `ShardFetcher`.
    """
    if keep:
        _needed[owner] = keep
    else:
        _needed.pop(owner, None)
    _close(set(_streamed).difference(*list(_needed.values())))


def _close(paths: Iterable[str]) -> None:
    for path in list(paths):
        if closed := _streamed.pop(path, None):
            closed.give_back()  # a thread that is reading from it can still finish
