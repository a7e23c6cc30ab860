"""Sets of shards in the ArrayRecord format: how they are found, checked and written."""

import contextlib
import glob
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from vit_jax import UserError
from vit_jax.data.shards import tf_example
from vit_jax.data.shards.array_record_file import open_writer
from vit_jax.data.shards.readers import Shard, ShardReader, check_file_size, count_records, forget_readers
from vit_jax.data.shards.shard_manifest import MANIFEST_NAME, Manifest, read_manifest
from vit_jax.storage import Version, atomic_write, cache, filesystem

SHARD_NAME = re.compile(r"(?P<split>.+)-(?P<number>\d{5,})-of-(?P<total>\d{5,})\.array_record")
STREAMED_BYTES = 64_000_000  # about the size of a shard to be streamed, since hosts hold a few of them at a time


class ShardSet(NamedTuple):
    """The shards that a pattern matches.

    Attributes:
        manifest: what the info.json beside the shards states, or None if there is none.
        paths: split -> file name of a shard -> its path.
        versions: path of a shard -> its version, None for a local shard.
        folder: the folder in which the info.json lies, if there is one.
        pattern: the pattern of the paths of the shards, also if a folder was named.
    """

    manifest: Manifest | None
    paths: dict[str, dict[str, str]]
    versions: dict[str, Version | None]
    folder: str
    pattern: str


def file_name(split: str, number: int, total: int) -> str:
    """Returns the file name of shard `number`, counted from 0, of the `total` shards of a split."""
    return f"{split}-{number:05}-of-{total:05}.array_record"


def find_shards(pattern: str) -> ShardSet:
    """Lists shards without opening them, and forgets the cached readers, see `forget_readers`.

    Args:
        pattern: a folder, or a path of shards with `*`, `?` and `[...]`; local or remote.

    Raises:
        UserError: there are no shards, a name contains no split, two shards have the same name, or the manifest is
            unreadable.
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


def shards_of_split(shard_set: ShardSet, split: str) -> tuple[Shard, ...]:
    """Returns the shards of a split in order.

    With a manifest, no shard is opened; the sizes of local shards are compared with those that it states. Without a
    manifest, all shards are opened to count their records, and remote shards are copied into the cache first.

    Raises:
        UserError: a shard is missing, truncated or unexpected, or the shards to copy do not fit into the cache.
    """
    paths, manifest = shard_set.paths[split], shard_set.manifest
    if manifest and split not in manifest.splits:
        unlisted = f"{MANIFEST_NAME} does not list the split {split} of {next(iter(paths.values()))}"
        raise UserError(f"{unlisted}; move the shards of this split to another folder")
    if not manifest:
        listed = {paths[name]: shard_set.versions[paths[name]] for name in names_in_order(split, paths)}
        sizes = {path: version.size if version else None for path, version in listed.items()}
        size = sum(size or 0 for size in sizes.values())
        check_count_room(split, shard_set.folder, MANIFEST_NAME, size, f"array_record:{shard_set.folder}")
        return tuple(
            Shard(path, count_records(path, version=version), sizes[path], version) for path, version in listed.items()
        )
    check_names(split, paths, [entry.name for entry in manifest.splits[split]])
    shards = tuple(
        Shard(path := paths[entry.name], entry.records, entry.size, shard_set.versions[path])
        for entry in manifest.splits[split]
    )
    for shard in shards:
        if not filesystem.is_remote(shard.path):
            check_file_size(shard.path, shard.size)
    return shards


def list_sizes(shard_set: ShardSet) -> dict[str, int | None]:
    """Returns path of a shard -> its size in bytes, or None if its store does not state the size."""
    return {path: version.size if version else os.path.getsize(path) for path, version in shard_set.versions.items()}


def check_count_room(split: str, folder: str, info: str, size: int, source: str) -> None:
    """Raises UserError if the cache cannot hold the remote shards of a split whose records must be counted.

    Args:
        split: the name of the split.
        folder: the folder of the shards.
        info: the name of the file that could state their numbers of records.
        size: bytes of the shards whose number of records is not stated.
        source: the data source, for the command in the message, which counts the records.
    """
    if size > cache.max_bytes():
        raise UserError(
            f"the number of records in split {split} of {folder} is not known, since no {info} is beside the shards, "
            f"and the shards ({size / 1e9:.3g} GB) do not fit into the cache ({cache.max_bytes() / 1e9:.3g} GB) to be "
            f"counted; count the records once with python -m vit_jax.describe {source} --num-classes=N"
        )


def names_in_order(split: str, names: Collection[str]) -> list[str]:
    """Returns the names of the shards of a split in order; each name states how many shards there are.

    Raises:
        UserError: a shard is missing.
    """
    totals = sorted({int(match["total"]) for match in map(SHARD_NAME.fullmatch, names) if match})
    expected = [file_name(split, number, total) for total in totals for number in range(total)]
    check_names(split, names, expected)
    return expected


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


def read_record(reader: ShardReader, row: int) -> tuple[bytes, list[int]]:
    """Returns the image and the labels of a record.

    Raises:
        ValueError: the record is damaged, or lacks one of the features.
    """
    return tf_example.parse_example(reader.read(row))


def read_image(reader: ShardReader, row: int) -> bytes:
    """Returns the image of a record, which needs no label; raises ValueError as `read_record`."""
    return tf_example.parse_image(reader.read(row))


def write_shard(path: str, examples: Iterable[tuple[bytes, list[int]]]) -> Shard:
    """Writes a local shard of (encoded image, labels), whole or not at all, and returns it.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
        Exception: raised by `examples`, unchanged.
    """
    written = 0
    with contextlib.ExitStack() as stack:
        with report_write_errors(path):
            temporary = str(stack.enter_context(atomic_write(path)))
            writer = open_writer(temporary)
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


def check_room(out: str, need: float) -> None:
    """Raises UserError if a local folder has no room for shards of `need` bytes.

    Shards that lie in the folder already are some of these, so their bytes count as room.
    """
    room = shutil.disk_usage(out).free
    room += sum(os.path.getsize(path) for path in glob.glob(f"{glob.escape(out)}/*.array_record"))
    if need > room:
        raise UserError(
            f"the shards need about {need / 1e9:.3g} GB, but {out} has room for {room / 1e9:.3g}; make room, choose "
            "another folder, or pack smaller images"
        )


@contextlib.contextmanager
def report_write_errors(path: str) -> Iterator[None]:
    """Turns the errors of writing to a path into a UserError; the block must do nothing else that can fail."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot write {path}: {error}") from error
