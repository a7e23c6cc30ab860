"""ArrayRecord shards and the `info.json` beside them: found, checked, opened when first read from, written whole."""

import contextlib
import functools
import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from vit_jax import UserError
from vit_jax.data.shards import tf_example
from vit_jax.data.shards.manifest import SET_DEFAULTS, check_info
from vit_jax.storage import cache, filesystem

NAME = re.compile(r"(?P<split>.+)-(?P<number>\d{5,})-of-(?P<total>\d{5,})\.array_record")
INFO = "info.json"
VERSION = 1
OPEN = 512  # shards that a process keeps open: each is a file descriptor, of which there are often no more than 1,024

# A record is compressed already, and read alone. Measured on photographs of 110 KB: 39,000 random reads a second (of
# cached files, one core), 33,000 with zstd, which saves 0.6 % of the bytes, 3,200 in groups of 16. Records of 2.5 KB:
# 21,000, 21,000 (9 % saved), 80,000; there decoding takes longer than reading.
WRITER = "group_size:1,uncompressed"
READER = "readahead_buffer_size:0,max_parallelism:0"  # for random access, as ArrayRecord recommends


class Shard(NamedTuple):
    """A file of records.

    Attributes:
        path: local or remote.
        records: how many it holds.
        size: in bytes, or None where no info.json states it.
    """

    path: str
    records: int
    size: int | None


class Found(NamedTuple):
    """What a pattern names.

    Attributes:
        info: what info.json holds; empty if there is none.
        files: split -> file name -> path.
    """

    info: Mapping[str, Any]
    files: dict[str, dict[str, str]]


def file_name(split: str, number: int, total: int) -> str:
    """Returns the name of shard `number` of a split's `total`."""
    return f"{split}-{number:05}-of-{total:05}.array_record"


def find(pattern: str) -> Found:
    """Lists shards without opening them.

    Args:
        pattern: a folder, or a path of shards with `*`, `?` and `[...]`; local or remote.

    Raises:
        UserError: there are none, a name tells no split, or info.json is unreadable.
    """
    open_shard.cache_clear()  # what lies there may have been packed anew
    located.cache_clear()
    pattern = pattern if filesystem.is_remote(pattern) else os.path.expanduser(pattern)
    whole = os.path.isdir(pattern) or not (re.search(r"[*?[]", pattern) or pattern.endswith(".array_record"))
    folder = pattern if whole else os.path.dirname(pattern)
    info = read_info(os.path.join(folder, INFO))
    files: dict[str, dict[str, str]] = {split: {} for split in info["splits"]} if whole and info else {}
    pattern = os.path.join(glob.escape(folder), "*.array_record") if whole else pattern
    for path in filesystem.expand_pattern(pattern):
        name = path.rpartition("/")[2]
        match = NAME.fullmatch(name)
        if not match:
            raise UserError(f"cannot read {path}: the name of a shard must be like {file_name('train', 0, 16)}")
        listed = files.setdefault(match["split"], {})
        if name in listed:
            raise UserError(f"two shards have the same name: {listed[name]} and {path}")
        listed[name] = path
    if not any(files.values()):
        raise UserError(
            f"there are no files {pattern}; shards have names like {file_name('train', 0, 16)}; "
            "where they lie is said by --config.data.source=array_record:FOLDER"
        )
    return Found(info, files)


def read_info(path: str) -> dict[str, Any]:
    """Returns what an info.json holds, and nothing if there is none.

    Raises:
        UserError: it is damaged, of another version, or a field is not as it must be.
    """
    if not filesystem.expand_pattern(glob.escape(path)):
        return {}
    try:
        info = json.loads(filesystem.read_bytes(path))
    except ValueError as error:
        raise UserError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    if not isinstance(info, dict) or "version" not in info:
        raise UserError(f"cannot read {path}: it must be an object with a version")
    if info["version"] != VERSION:
        raise UserError(f"{path} is of version {info['version']}, but this program reads version {VERSION}")
    check_info(info, path)
    return {**SET_DEFAULTS, **info}


def of_split(found: Found, split: str) -> tuple[Shard, ...]:
    """Returns the shards of a split in order.

    With an info.json, their sizes are compared where that needs no download, and none is opened; without, all are.

    Raises:
        UserError: one is missing, truncated or one too many.
    """
    here = found.files[split]
    if found.info and split not in found.info["splits"]:
        raise UserError(f"{INFO} lists no split {split}, but there is {next(iter(here.values()))}")
    if found.info:
        stated = {shard["name"]: shard for shard in found.info["splits"][split]}
    else:
        stated = dict.fromkeys(file_name(split, i, total) for total in totals(here) for i in range(total))
    for names, what in ((set(stated) - set(here), "missing"), (set(here) - set(stated), "one too many")):
        if names:
            first = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise UserError(f"of the {len(stated)} shards of {split}, {len(names)} are {what}: {first}")
    if not found.info:
        return tuple(Shard(here[name], count(here[name]), None) for name in stated)
    shards = tuple(Shard(here[name], entry["records"], entry["bytes"]) for name, entry in stated.items())
    for shard in shards:
        if not filesystem.is_remote(shard.path):
            check_size(shard.path, shard.size)
    return shards


def require_room(shards: Iterable[Shard]) -> None:
    """Raises UserError if copies of all these shards, as far as they are remote, are more than the cache may hold.

    A copy stays while the process runs: without this, a run ends when the one that does not fit is first read from.
    """
    remote = {shard.path: shard.size or 0 for shard in shards if filesystem.is_remote(shard.path)}
    size = sum(remote.values())
    if remote and size > cache.max_bytes():
        raise UserError(
            f"the {len(remote)} shards to read, such as {next(iter(remote))}, take {size / 1e9:.3g} GB, more than the "
            f"{cache.max_bytes() / 1e9:.3g} GB of copies that are kept here; set VIT_JAX_CACHE_GB to more, and "
            "VIT_JAX_CACHE to a folder with room"
        )


def totals(names: Iterable[str]) -> list[int]:
    """Returns the numbers that names of shards say there are."""
    return sorted({int(match["total"]) for match in map(NAME.fullmatch, names) if match})


def check_size(path: str, stated: int | None) -> None:
    """Raises UserError if a local file is not of the size that info.json states."""
    try:
        size = os.path.getsize(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if stated not in (None, size):
        raise UserError(f"{path} has {size} bytes, but {INFO} says {stated}: copy or pack it anew")


def open_reader(path: str, size: int | None = None) -> ArrayRecordReader:
    """Opens a shard.

    Raises:
        UserError: it is truncated or no ArrayRecord file.
    """
    here = located(path)
    check_size(here, size)
    reader = ArrayRecordReader(here, READER)
    if not reader.ok():
        try:
            reader.close()
        except RuntimeError as error:  # only here the reader says what is wrong
            reason = str(error).partition(";")[0]
            raise UserError(f"{path} is truncated or no ArrayRecord file ({reason}): copy or pack it anew") from None
    return reader


def count(path: str, size: int | None = None) -> int:
    """Returns the number of records of a shard; raises UserError as `open_reader` does."""
    return open_reader(path, size).num_records()


@functools.cache
def located(path: str) -> str:
    """Returns where a shard lies here, or its copy, which stays as long as this process runs: a store is asked once."""
    return filesystem.local_copy(path)


@functools.lru_cache(OPEN)
def open_shard(shard: Shard) -> ArrayRecordReader:
    """Returns the reader of a shard, opened if it is not open in this process; any number of threads may use it.

    Raises:
        UserError: the file is damaged, or holds another number of records than it should.
    """
    reader = open_reader(shard.path, shard.size)
    if reader.num_records() != shard.records:
        raise UserError(f"{shard.path} has {reader.num_records()} records, but {INFO} says {shard.records}")
    return reader


def read(shard: Shard, row: int) -> tuple[bytes, list[int]]:
    """Returns the image and the labels of a record.

    Raises:
        UserError: the file is damaged.
        ValueError: the record is damaged, or has no such features.
    """
    reader = open_shard(shard)
    try:
        [record] = reader.read([row])
    except RuntimeError as error:
        raise ValueError(str(error).partition(";")[0]) from error
    return tf_example.parse_example(record)


def write_shard(path: str, examples: Iterable[tuple[bytes, list[int]]]) -> Shard:
    """Writes a local shard of images with labels: whole, or not at all under this name.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
        Exception: of `examples`, as it is.
    """
    partial, written = f"{path}.partial", 0
    with writing(partial), open(partial, "wb"):  # the writer is silent where it cannot write
        writer = ArrayRecordWriter(partial, WRITER)
    try:
        for image, labels in examples:
            with writing(partial):
                writer.write(tf_example.serialise_example(image, labels))
            written += 1
    finally:
        with writing(partial):
            writer.close()
    with writing(partial):
        if count(partial) != written:
            raise OSError("what was written is not what lies there")
        with open(partial, "rb+") as file:
            os.fsync(file)
        os.replace(partial, path)
        return Shard(path, written, os.path.getsize(path))


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turns what fails while a path is written to into a UserError; what fails elsewhere must not happen inside."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot write {path}: {error}") from error


def write_json(path: str, value: Mapping[str, Any]) -> None:
    """Writes a small file whole, or not at all under this name."""
    partial = f"{path}.partial"
    with open(partial, "w") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file)
    os.replace(partial, path)
