"""Shard files in the ArrayRecord format: found, checked, opened when first read, and written whole."""

import contextlib
import functools
import glob
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from vit_jax import UserError
from vit_jax.data.shards import tf_example
from vit_jax.data.shards.manifest import MANIFEST_NAME, Manifest, read_manifest
from vit_jax.storage import Version, atomic_write, cache, filesystem

SHARD_NAME = re.compile(r"(?P<split>.+)-(?P<number>\d{5,})-of-(?P<total>\d{5,})\.array_record")
MAX_OPEN = 512  # shards per process: each takes a file descriptor, of which there are often only 1,024
STREAMED_BYTES = 64_000_000  # of one, about, where hosts hold a few of them at a time
ROOM_WAIT = 60.0  # seconds for other processes to let go of what they stream

# A record is compressed already, and read alone. Measured on photographs of 110 KB: 39,000 random reads a second (of
# cached files, one core), 33,000 with zstd, which saves 0.6 % of the bytes, 3,200 in groups of 16. Records of 2.5 KB:
# 21,000, 21,000 (9 % saved), 80,000; there decoding takes longer than reading.
WRITER_OPTIONS = "group_size:1,uncompressed"
READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # as ArrayRecord recommends for random access


class Shard(NamedTuple):
    """A file of records.

    Attributes:
        path: local or remote.
        records: their number.
        size: in bytes, or None if nothing states it.
        version: of a remote file when it was listed; another is refused.
    """

    path: str
    records: int
    size: int | None
    version: Version | None = None


class Streamed(NamedTuple):
    """A shard that comes and goes.

    Attributes:
        reader: of it.
        give_back: to be called at the end; a copy may be removed then.
    """

    reader: ArrayRecordReader
    give_back: Callable[[], None]


_streamed: dict[str, Streamed] = {}  # by path
_needed: dict[int, Collection[str]] = {}  # owner, such as the reading ahead of a training or an evaluation -> paths


class ShardSet(NamedTuple):
    """The shards that a pattern matches.

    Attributes:
        manifest: None if there is none beside them.
        paths: split -> file name -> path.
        versions: of the shards, by path; of local ones None.
        folder: in which the manifest would lie.
        pattern: of the files.
    """

    manifest: Manifest | None
    paths: dict[str, dict[str, str]]
    versions: dict[str, Version | None]
    folder: str
    pattern: str


def file_name(split: str, number: int, total: int) -> str:
    """Returns the name of shard `number` of a split's `total`."""
    return f"{split}-{number:05}-of-{total:05}.array_record"


def find_shards(pattern: str) -> ShardSet:
    """Lists shards without opening them.

    Args:
        pattern: a folder, or a path of shards with `*`, `?` and `[...]`; local or remote.

    Raises:
        UserError: there are none, a name contains no split, or the manifest is unreadable.
    """
    forget_readers()
    pattern = pattern if filesystem.is_remote(pattern) else os.path.expanduser(pattern)
    is_folder = os.path.isdir(pattern) or not (re.search(r"[*?[]", pattern) or pattern.endswith(".array_record"))
    folder = pattern if is_folder else os.path.dirname(pattern)
    manifest = read_manifest(os.path.join(folder, MANIFEST_NAME))
    paths: dict[str, dict[str, str]] = {split: {} for split in manifest.splits} if is_folder and manifest else {}
    pattern = os.path.join(glob.escape(folder), "*.array_record") if is_folder else pattern
    versions = filesystem.expand_pattern(pattern)
    for path in versions:
        name = path.rpartition("/")[2]
        match = SHARD_NAME.fullmatch(name)
        if not match:
            raise UserError(f"cannot read {path}: the name of a shard must be like {file_name('train', 0, 16)}")
        by_name = paths.setdefault(match["split"], {})
        if name in by_name:
            raise UserError(f"two shards have the same name: {by_name[name]} and {path}")
        by_name[name] = path
    if not any(paths.values()):
        if is_folder and not filesystem.is_remote(folder) and not os.path.isdir(folder):
            raise UserError(
                f"{folder} does not exist; make it with python -m vit_jax.pack, or name another folder: "
                "--config.data.source=array_record:FOLDER; to run without data, use --config.data.source=synthetic"
            )
        raise UserError(
            f"there are no files {pattern}; shards have names like {file_name('train', 0, 16)}; "
            "set --config.data.source=array_record:FOLDER to their folder"
        )
    return ShardSet(manifest, paths, versions, folder, pattern)


def shards_of_split(found: ShardSet, split: str) -> tuple[Shard, ...]:
    """Returns the shards of a split in order.

    With a manifest, sizes of local shards are compared and none is opened; without one, all are opened.

    Raises:
        UserError: a shard is missing, truncated or unexpected, or those to open do not fit into the cache.
    """
    paths, manifest = found.paths[split], found.manifest
    if manifest and split not in manifest.splits:
        raise UserError(f"{MANIFEST_NAME} lists no split {split}, but there is {next(iter(paths.values()))}")
    expected = [entry.name for entry in manifest.splits[split]] if manifest else stated_names(split, paths)
    check_names(split, paths, expected)
    if not manifest:
        listed = {paths[name]: found.versions[paths[name]] for name in expected}
        sizes = {path: version.size if version else None for path, version in listed.items()}
        check_count_room(found, split, sum(size or 0 for size in sizes.values()))
        return tuple(
            Shard(path, count_records(path, version=version), sizes[path], version) for path, version in listed.items()
        )
    shards = tuple(
        Shard(path := paths[entry.name], entry.records, entry.size, found.versions[path])
        for entry in manifest.splits[split]
    )
    for shard in shards:
        if not filesystem.is_remote(shard.path):
            check_file_size(shard.path, shard.size)
    return shards


def list_sizes(found: ShardSet) -> dict[str, int | None]:
    """Returns the sizes of all shards in bytes, by path; None: its store does not state it."""
    return {path: version.size if version else os.path.getsize(path) for path, version in found.versions.items()}


def check_count_room(found: ShardSet, split: str, size: int) -> None:
    """Raises UserError if the cache cannot hold the remote shards of a split, of `size` bytes, to count them."""
    if size > cache.max_bytes():
        raise UserError(
            f"the records of split {split} in {found.folder} are not counted, since there is no {MANIFEST_NAME} beside "
            f"its shards, and these need {size / 1e9:.3g} GB, more than the {cache.max_bytes() / 1e9:.3g} GB that the "
            "cache may hold; count them once with python -m vit_jax.describe "
            f"array_record:{found.folder} --num-classes=N"
        )


def stated_names(split: str, names: Collection[str]) -> list[str]:
    """Returns the names in order that the shards of a split must have, as these names of them state their number."""
    totals = sorted({int(match["total"]) for match in map(SHARD_NAME.fullmatch, names) if match})
    return [file_name(split, number, total) for total in totals for number in range(total)]


def check_names(split: str, names: Collection[str], expected: Collection[str]) -> None:
    """Raises UserError if the shards of a split do not have the expected names."""
    missing, unexpected = set(expected) - set(names), set(names) - set(expected)
    for wrong, what, advice in (
        (missing, "missing", "copy or pack them again"),
        (unexpected, "unexpected", "move them to another folder"),
    ):
        if wrong:
            first = ", ".join(sorted(wrong)[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            raise UserError(f"split {split} must have {len(expected)} shards; {len(wrong)} {what}: {first}; {advice}")


def check_file_size(path: str, expected: int | None) -> None:
    """Raises UserError if a local file does not have the size that is stated."""
    try:
        size = os.path.getsize(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if expected not in (None, size):
        raise UserError(f"{path} has {size} bytes, but {expected} are stated; copy or pack it again")


def open_reader(path: str, local: str, size: int | None = None) -> ArrayRecordReader:
    """Opens a shard, or its local copy.

    Raises:
        UserError: the file is truncated or not an ArrayRecord file.
    """
    check_file_size(local, size)
    reader = ArrayRecordReader(local, READER_OPTIONS)
    if not reader.ok():
        try:
            reader.close()
        except RuntimeError as error:  # only closing the reader gives the reason
            reason = f"it is truncated or not an ArrayRecord file ({str(error).partition(';')[0]})"
            raise UserError(f"cannot read {path}: {reason}; copy or pack it again") from None
    return reader


def open_shard(shard: Shard, local: str) -> ArrayRecordReader:
    """Opens a shard, or its local copy; raises UserError as `open_reader`, or if it has other records than stated."""
    reader = open_reader(shard.path, local, shard.size)
    if reader.num_records() != shard.records:
        raise UserError(
            f"{shard.path} has {reader.num_records()} records, but {shard.records} are stated; copy or pack it again"
        )
    return reader


def count_records(path: str, size: int | None = None, version: Version | None = None) -> int:
    """Returns the number of records of a shard; raises UserError as `open_reader` does."""
    return open_reader(path, local_path(path, version), size).num_records()


@functools.cache
def local_path(path: str, version: Version | None = None) -> str:
    """Returns the path of a shard or of its local copy, which stays while this process runs."""
    return filesystem.local_copy(path, version=version)


@functools.lru_cache(MAX_OPEN)
def cached_reader(shard: Shard) -> ArrayRecordReader:
    """Returns the reader of a shard, which stays open in this process; any number of threads may use it.

    Raises:
        UserError: the file is damaged, has another number of records than stated, or was replaced after it was listed.
    """
    return open_shard(shard, local_path(shard.path, shard.version))


def forget_readers() -> None:
    """Opens every shard anew when it is read next: they may have been replaced."""
    cached_reader.cache_clear()
    local_path.cache_clear()


def streamed_reader(shard: Shard, waits: bool = True) -> ArrayRecordReader:
    """Returns the reader of a shard, which stays open until `close_streamed`, as its copy does; threads may share it.

    Args:
        shard: to open.
        waits: whether it is needed now: then, where the cache has no room, what is open here is closed, and copied
            again when it is needed; and other processes are waited for.

    Raises:
        UserError: as `cached_reader`.
    """
    found, end = _streamed.get(shard.path), time.monotonic() + ROOM_WAIT
    while found is None:
        with contextlib.ExitStack() as unused:
            try:
                local, give_back = filesystem.borrow_copy(shard.path, shard.version)
            except cache.NoRoom:
                if not waits or time.monotonic() > end:
                    raise
                _close(_streamed)
                time.sleep(0.1)
                continue
            unused.callback(give_back)
            opened = Streamed(open_shard(shard, local), give_back)
            found = _streamed.setdefault(shard.path, opened)
            if found is opened:  # and not one that another thread has opened meanwhile
                unused.pop_all()
    return found.reader


def close_streamed(keep: Collection[str], owner: int = 0) -> None:
    """Closes the readers that `streamed_reader` has opened in this process, but those of paths that an owner needs.

    The owner who calls needs the paths to `keep` from now on; one that keeps none is forgotten.
    """
    if keep:
        _needed[owner] = keep
    else:
        _needed.pop(owner, None)
    _close(set(_streamed).difference(*list(_needed.values())))


def _close(paths: Iterable[str]) -> None:
    for path in list(paths):
        if closed := _streamed.pop(path, None):
            closed.give_back()  # a thread that reads from it ends what it reads


def read_bytes(reader: ArrayRecordReader, row: int) -> bytes:
    """Returns a record; raises ValueError if it is damaged."""
    try:
        [record] = reader.read([row])
    except RuntimeError as error:
        raise ValueError(str(error).partition(";")[0]) from error
    return record


def read_record(reader: ArrayRecordReader, row: int) -> tuple[bytes, list[int]]:
    """Returns the image and the labels of a record.

    Raises:
        ValueError: the record is damaged, or lacks one of the features.
    """
    return tf_example.parse_example(read_bytes(reader, row))


def write_shard(path: str, examples: Iterable[tuple[bytes, list[int]]]) -> Shard:
    """Writes a local shard of images with labels, whole or not at all.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
        Exception: raised by `examples`, unchanged.
    """
    written = 0
    with contextlib.ExitStack() as stack:
        with report_write_errors(path):
            temporary = str(stack.enter_context(atomic_write(path)))
            with open(temporary, "wb"):  # the writer does not report that it cannot write
                writer = ArrayRecordWriter(temporary, WRITER_OPTIONS)
        try:
            for image, labels in examples:
                with report_write_errors(path):
                    writer.write(tf_example.serialise_example(image, labels))
                written += 1
        finally:
            with report_write_errors(path):
                writer.close()
        with report_write_errors(path):
            if count_records(temporary) != written:
                raise OSError("the file does not contain what was written")
            stack.close()
            return Shard(path, written, os.path.getsize(path))


@contextlib.contextmanager
def report_write_errors(path: str) -> Iterator[None]:
    """Turns the errors of writing to a path into a UserError; the block must do nothing else that can fail."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot write {path}: {error}") from error
