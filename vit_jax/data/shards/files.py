"""Sets of shards in the ArrayRecord format: found, checked and written whole."""

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
from vit_jax.data.shards.manifest import MANIFEST_NAME, Manifest, read_manifest
from vit_jax.data.shards.readers import Shard, ShardReader, check_file_size, count_records, forget_readers
from vit_jax.storage import Version, atomic_write, cache, filesystem

SHARD_NAME = re.compile(r"(?P<split>.+)-(?P<number>\d{5,})-of-(?P<total>\d{5,})\.array_record")
STREAMED_BYTES = 64_000_000  # of one, about, where hosts hold a few of them at a time


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
    if not manifest:
        listed = {paths[name]: found.versions[paths[name]] for name in names_in_order(split, paths)}
        sizes = {path: version.size if version else None for path, version in listed.items()}
        size = sum(size or 0 for size in sizes.values())
        check_count_room(split, found.folder, MANIFEST_NAME, size, f"array_record:{found.folder}")
        return tuple(
            Shard(path, count_records(path, version=version), sizes[path], version) for path, version in listed.items()
        )
    check_names(split, paths, [entry.name for entry in manifest.splits[split]])
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


def check_count_room(split: str, folder: str, info: str, size: int, source: str) -> None:
    """Raises UserError if the cache cannot hold the remote shards of a split, of `size` bytes, to count them.

    Args:
        split: of which they are.
        folder: in which they lie.
        info: the name of the file that would state their lengths.
        size: of those whose length is not stated.
        source: for the command that counts them.
    """
    if size > cache.max_bytes():
        raise UserError(
            f"the records of split {split} in {folder} are not counted, since there is no {info} beside its shards, "
            f"and these need {size / 1e9:.3g} GB, more than the {cache.max_bytes() / 1e9:.3g} GB that the cache may "
            f"hold; count them once with python -m vit_jax.describe {source} --num-classes=N"
        )


def names_in_order(split: str, names: Collection[str]) -> list[str]:
    """Returns the names of the shards of a split in order, each of which states their number.

    Raises:
        UserError: one is missing.
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
    """Raises UserError if a local folder has no room for shards of this many bytes, of which some may lie in it."""
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
