"""Writes all splits of a source into shards, and resumes after an interruption: the work of `vit_jax.pack`.

`sources.array_record` documents the format. While shards are written, the file `progress.jsonl` beside them states what
is packed and which shards are finished.
"""

import array
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import glob
import itertools
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from vit_jax import UserError, choose
from vit_jax.data.images import DecodeError, Encoding
from vit_jax.data.packing.near_duplicates import MAX_DISTANCE, KnownImages, hash_splits
from vit_jax.data.shards import (
    MANIFEST_NAME,
    SHUFFLE,
    STREAMED_BYTES,
    Duplicate,
    LeftOut,
    Manifest,
    Shard,
    ShardEntry,
    cached_reader,
    count_records,
    file_name,
    parse_example,
    read_manifest,
    report_write_errors,
    write_label_index,
    write_manifest,
    write_shard,
)
from vit_jax.data.sources import Source, SourceConfig, compose, have_same_classes, label_list, list_splits, open_split
from vit_jax.data.thread_pool import open_thread_pool
from vit_jax.storage import atomic_write

SHARD_BYTES = 256_000_000  # about the size of a shard: few files, and each is soon packed again after a crash
SAMPLE = 64  # examples of a split from which its size is estimated
CHUNK = 8  # images that a thread reads at a time
LABEL_CHUNK = 1000  # labels that a thread reads at a time
MAX_LISTED = 20  # names of classes in a message
UNFINISHED = "*.partial"  # the temporary files of `atomic_write`, which a killed process leaves
PROGRESS = "progress.jsonl"  # while packing: line 1 is what is packed, then a line for each finished shard


@dataclasses.dataclass(frozen=True)
class WrittenShards:
    """The totals of all shards that were written.

    Attributes:
        records: split -> number of packed images.
        shards: number of files.
        size: bytes of all files.
        left_out: number of unreadable images left out.
        duplicates: number of near-duplicates of other images left out.
        emptied: split -> the labels, as packed, of the classes that lost all their images as near-duplicates.
        read: number of images that this run has read; images of shards that were finished before do not count.
    """

    records: dict[str, int]
    shards: int
    size: int
    left_out: int
    duplicates: int
    emptied: dict[str, list[int]]
    read: int


class ShardJob(NamedTuple):
    """A shard to write.

    Attributes:
        split: the split that it belongs to.
        name: the name of its file.
        rows: the indices in the split of its examples.
        file_stamp: a text that changes when the files of these examples change.
    """

    split: str
    name: str
    rows: Sequence[int]
    file_stamp: str


class EncodedExample(NamedTuple):
    """An example as packed: the bytes of its image, and its labels or numbers."""

    image: bytes
    labels: list[int] | list[float]


@dataclasses.dataclass(frozen=True)
class ShardWriter:
    """Packs the examples of some splits into a folder of shards.

    Attributes:
        sources: split -> all its examples.
        rows: split -> indices of the examples to pack, in the order in which they are written.
        labels: label in the source -> its new label; other labels are dropped.
        manifest: what info.json will contain, without the shards.
        encode: how images are encoded.
        without: images whose near-duplicates are left out; None: no near-duplicates are left out.
        skip_unreadable: whether unreadable images are left out; False: they raise UserError.
        workers: number of threads that read, decode and encode.
        shards: number of shards of each split, at most one for each example; None: shards of about `SHARD_BYTES`, or
            of about `STREAMED_BYTES` if the images are shuffled.
        index_labels: whether the labels of all images are written beside the shards, as they are in any case if they
            are numbers, or if the folder has such files from before.
    """

    sources: dict[str, Source]
    rows: dict[str, Sequence[int]]
    labels: dict[int, int]
    manifest: Manifest
    encode: Encoding
    without: KnownImages | None
    skip_unreadable: bool
    workers: int
    shards: int | None
    index_labels: bool = False

    def run(self, out: str, advance: Callable[[int], None]) -> WrittenShards:
        """Packs what is not packed yet.

        Args:
            out: the folder of the shards, which is made if it is missing.
            advance: called with the number of images that have been finished since the last call.

        Raises:
            UserError: the folder contains something else, an image is unreadable, or the disk has no room.
        """
        read = 0
        cv2.setNumThreads(0)  # the threads of the pool already keep every core busy
        with writing_lock(out), concurrent.futures.ThreadPoolExecutor(self.workers) as pool:
            counts = {split: self.count_shards(split) for split in self.sources}
            check_room(out, sum(self.sizes.values()))
            with report_write_errors(out):
                before = read_manifest(f"{out}/{MANIFEST_NAME}")
                finished = resume_progress(out, self.manifest, counts)
            splits: dict[str, list[ShardEntry]] = {split: [] for split in counts}
            for job in self.shard_jobs(counts):
                entry = finished.get(job.name)
                if entry and self.is_finished(out, job, entry):
                    advance(len(job.rows))
                else:
                    entry = self.run_job(out, job, pool, advance)
                    read += len(job.rows)
                splits[job.split].append(entry)
            packed = {split: tuple(entries) for split, entries in splits.items()}
            with report_write_errors(out):
                complete = dataclasses.replace(self.manifest, splits=packed)
                if self.index_labels or complete.has_numbers or (before and before.label_counts):
                    settings = complete.num_classes, complete.max_labels, complete.has_numbers
                    counted = {split: write_label_index(out, split, of, *settings) for split, of in packed.items()}
                    complete = dataclasses.replace(complete, label_counts=counted)
                write_manifest(f"{out}/{MANIFEST_NAME}", complete)
                os.remove(f"{out}/{PROGRESS}")
        return summarize(packed, find_emptied(out, self.sources, self.labels, packed), read)

    def shard_jobs(self, counts: Mapping[str, int]) -> Iterator[ShardJob]:
        """Iterates over the shards of all splits, `counts` of each; stamps the files of a shard when it is reached."""
        for split, count in counts.items():
            source, total = self.sources[split], len(self.rows[split])
            for number in range(count):
                rows = self.rows[split][total * number // count : total * (number + 1) // count]
                yield ShardJob(split, file_name(split, number, count), rows, source.stamp(rows))

    def is_finished(self, out: str, job: ShardJob, entry: ShardEntry) -> bool:
        """Returns whether a shard is as `entry` states, from unchanged files, and lacks only what may be skipped."""
        if entry.file_stamp != job.file_stamp or (entry.left_out and not self.skip_unreadable):
            return False
        try:
            return count_records(f"{out}/{job.name}", entry.size) == entry.records
        except UserError:
            return False

    def run_job(
        self, out: str, job: ShardJob, pool: concurrent.futures.Executor, advance: Callable[[int], None]
    ) -> ShardEntry:
        """Writes a shard and records that it is finished; returns its entry in the manifest."""
        left_out: list[LeftOut | Duplicate] = []
        records, size = write_shard(f"{out}/{job.name}", self.encode_examples(pool, job, left_out, advance))
        unreadable = tuple(image for image in left_out if isinstance(image, LeftOut))
        duplicates = tuple(image for image in left_out if isinstance(image, Duplicate))
        entry = ShardEntry(job.name, records, size, job.file_stamp, unreadable, duplicates)
        record_finished(out, entry)
        return entry

    @functools.cached_property
    def sizes(self) -> dict[str, float]:
        """Split -> estimated bytes of its packed images."""
        return {split: estimate_size(rows, split, self.encode_example) for split, rows in self.rows.items()}

    def count_shards(self, split: str) -> int:
        """Returns the number of shards of a split."""
        if self.shards:
            return min(self.shards, len(self.rows[split]))
        size = STREAMED_BYTES if SHUFFLE in self.manifest.made_from else SHARD_BYTES
        return max(1, round(self.sizes[split] / size))

    def encode_example(self, split: str, index: int) -> EncodedExample | LeftOut | Duplicate:
        """Reads and encodes an example, or returns why it is left out."""
        source = self.sources[split]
        try:
            example = source[index]
            image, label = example["image"], example["label"]
            if duplicate := self.without and self.without.find(index, image):
                return duplicate
            encoded = self.encode(image)
        except DecodeError as error:
            if not self.skip_unreadable:
                raise UserError(f"{error}; repair it, or leave such images out with --bad-images=skip") from error
            return LeftOut(index, str(error))
        except OSError as error:  # reported here, so that the output is not blamed for it
            raise UserError(f"cannot read image {index} of split {split}: {error}") from error
        if source.has_numbers:
            return EncodedExample(encoded, np.asarray(label).tolist())
        return EncodedExample(encoded, [self.labels[label] for label in label_list(label) if label in self.labels])

    def encode_examples(
        self,
        pool: concurrent.futures.Executor,
        job: ShardJob,
        left_out: list[LeftOut | Duplicate],
        advance: Callable[[int], None],
    ) -> Iterator[EncodedExample]:
        """Iterates over the encoded examples of a shard in order; appends those that it leaves out to `left_out`."""

        def encode_chunk(chunk: Sequence[int]) -> list[EncodedExample | LeftOut | Duplicate]:
            return [self.encode_example(job.split, index) for index in chunk]

        def submit(chunk: Sequence[int]) -> concurrent.futures.Future:
            return pool.submit(encode_chunk, chunk)

        chunks = iter([job.rows[start : start + CHUNK] for start in range(0, len(job.rows), CHUNK)])
        ahead = deque(map(submit, itertools.islice(chunks, 2 * self.workers)))
        while ahead:
            examples = ahead.popleft().result()
            ahead.extend(map(submit, itertools.islice(chunks, 1)))
            for example in examples:
                if isinstance(example, EncodedExample):
                    yield example
                else:
                    left_out.append(example)
            advance(len(examples))


def make_shard_writer(
    source_config: SourceConfig,
    encode: Encoding,
    *,
    splits: list[str] | None = None,
    classes: str | None = None,
    without: Sequence[str] = (),
    max_distance: int = MAX_DISTANCE,
    shards: int | None = None,
    shuffle: int | None = None,
    skip_unreadable: bool = False,
    workers: int = 0,
    index_labels: bool = False,
) -> ShardWriter:
    """Opens the splits to pack and returns their `ShardWriter`, which has written nothing yet.

    Args:
        source_config: where the examples come from.
        encode: how images are encoded.
        splits: names of whole splits; None: all splits.
        classes: the classes to pack, in the order of their new labels, see `parse_class_selection`; None: all classes.
        without: splits whose near-duplicates are left out, as `hash_splits` reads them.
        max_distance: the largest distance between the hashes of near-duplicates, in bits.
        shards: number of shards of each split; None: shards of about 256 MB, or of 64 MB, to stream, if shuffled.
        shuffle: seed of a random order of the images; None: the order of the source.
        skip_unreadable: whether unreadable images are left out; False: they raise UserError.
        workers: number of threads; 0: one for each core.
        index_labels: whether the labels of all images are written beside the shards.

    Raises:
        UserError: a class is missing, or see `open_splits`.
    """
    sources = open_splits(source_config, splits or ())
    first = next(iter(sources.values()))
    workers = workers or os.cpu_count() or 1
    selected = list(range(first.num_classes))
    rows: dict[str, Sequence[int]] = {split: range(len(source)) for split, source in sources.items()}
    if classes is not None and first.has_numbers:
        raise UserError(
            f"--classes chooses classes, but the labels of {source_config.source} are numbers; leave it out"
        )
    if classes is not None:
        names = first.class_ids or first.class_names
        selected = parse_class_selection(classes, names, first.num_classes, source_config.source)
        with open_thread_pool(workers) as pool:
            rows = {split: rows_with_classes(source, split, set(selected), pool) for split, source in sources.items()}
    if shuffle is not None:
        rows = {split: shuffle_rows(rows[split], shuffle, number) for number, split in enumerate(rows)}
    known = hash_splits(without, source_config, sources, max_distance, workers) if without else None
    manifest = Manifest(
        name=first.name.removeprefix("array_record:"),
        num_classes=len(selected),
        class_names=first.class_names and tuple(first.class_names[label] for label in selected),
        max_labels=first.max_labels and min(first.max_labels, len(selected)),
        has_numbers=first.has_numbers,
        made_from={
            "source": source_config.source,
            "fingerprints": {split: source.fingerprint for split, source in sources.items()},
            **dataclasses.asdict(encode),
            **({"classes": selected} if classes is not None else {}),
            **({"without": known.describe()} if known else {}),
            **({SHUFFLE: shuffle} if shuffle is not None else {}),
        },
    )
    labels = dict(zip(selected, range(len(selected)), strict=True))
    return ShardWriter(sources, rows, labels, manifest, encode, known, skip_unreadable, workers, shards, index_labels)


def open_splits(source_config: SourceConfig, names: Sequence[str]) -> dict[str, Source]:
    """Returns split -> its examples, which must have labels; of the splits `names`, or of all if none is named.

    Raises:
        UserError: the source or a split is missing, a split is not whole, or two splits number other classes.
    """
    check_whole(names)
    sources = {
        split: dataclasses.replace(open_split(source_config, split), needs_labels=True)
        for split in list_splits(source_config, names)
    }
    first = next(iter(sources))
    for split, source in sources.items():
        are_named = sources[first].class_names and source.class_names
        counts = {source.num_classes, sources[first].num_classes}
        if len(counts) > 1 or (are_named and not have_same_classes(source, sources[first])):
            raise UserError(
                f"the splits {first} and {split} have different classes, or number them differently, but a packed set "
                "has one numbering of its classes; pack each split into a folder of its own, with --splits"
            )
    return sources


def check_whole(splits: Sequence[str]) -> None:
    """Raises UserError if one of the splits is a slice, such as `train[:10%]`, or a sum, such as `train+test`."""
    for split in splits:
        if set(split) & set("[+"):
            raise UserError(
                f"cannot pack {split}: only whole splits can be packed; select a slice with --config.data.split when "
                "you train"
            )


def parse_class_selection(text: str, names: Sequence[str] | None, total: int, where: str) -> list[int]:
    """Returns the labels of the classes that a text lists, in the order of the text.

    Args:
        text: names, labels and ranges of labels, both ends included: `cat,dog` or `3,0-1`. A number that is the name of
            a class means that class.
        names: the names of all classes in the order of their labels, or None if they have no names.
        total: the number of all classes.
        where: the data set, for messages.

    Raises:
        UserError: there is no such class, or a class is listed twice.
    """
    selected: list[int] = []
    known = list(map(compose, names or []))
    for word in compose(text).split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if word in known:
            labels = [known.index(word)]
        elif match:
            first, last = int(match[1]), int(match[2] or match[1])
            if not first <= last < total:
                raise UserError(
                    f"{where} has no classes {word}; its labels are 0 to {total - 1} (write 0-1 for the first two)"
                )
            labels = list(range(first, last + 1))
        elif not known:
            raise UserError(f"the classes of {where} have no names: write numbers instead of {word!r}, as in 0-4")
        else:
            choose("class", word, known, where=where if len(known) > MAX_LISTED else "")
        for label in labels:
            if label in selected:
                raise UserError(f"class {known[label] if known else label} is listed twice in {text}")
            selected.append(label)
    return selected


def rows_with_classes(source: Source, split: str, classes: Collection[int], pool: ThreadPool) -> Sequence[int]:
    """Returns the indices, in a whole split, of the images that have one of the classes. No image is decoded.

    An image whose label is unreadable is among them, so that the error is reported when the image is packed.

    Raises:
        UserError: no image has one of the classes.
    """

    def has_class(index: int) -> bool:
        try:
            label = source.label(index)
        except (DecodeError, OSError):
            return True
        return any(label in classes for label in label_list(label))

    rows = range(len(source))
    matching_rows = array.array("q", itertools.compress(rows, pool.imap(has_class, rows, LABEL_CHUNK)))
    if not matching_rows:
        raise UserError(
            f"no image of split {split} has one of the classes in --classes; to skip this split, list only the other "
            "splits in --splits"
        )
    return matching_rows


def shuffle_rows(rows: Sequence[int], *key: int) -> Sequence[int]:
    """Returns rows in a random order that `key` determines. Drawing it takes 24 bytes a row, the result 8."""
    drawn = np.random.PCG64(key).random_raw(len(rows))
    return array.array("q", np.asarray(rows, np.int64)[np.argsort(drawn, kind="stable")].tobytes())


def estimate_size(
    rows: Sequence[int], split: str, encode_example: Callable[[str, int], EncodedExample | LeftOut | Duplicate]
) -> float:
    """Estimates from a sample how many bytes the packed images of a split take."""
    sample = [encode_example(split, index) for index in rows[:: -(-len(rows) // SAMPLE)]]
    sizes = [len(example.image) if isinstance(example, EncodedExample) else 0 for example in sample]
    return len(rows) * float(np.mean(sizes))


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
def writing_lock(out: str) -> Iterator[None]:
    """Makes a folder and keeps other processes from packing into it, if the file system has locks.

    Raises:
        UserError: the folder cannot be written, or another process is packing into it.
    """
    with report_write_errors(out):
        os.makedirs(out, exist_ok=True)
        folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            advice = "wait for it to end, or choose another folder"
            raise UserError(f"another process is packing into {out}; {advice}") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(folder)


def resume_progress(out: str, manifest: Manifest, counts: Mapping[str, int]) -> dict[str, ShardEntry]:
    """Prepares a folder for packing, and returns the entries of the shards in it that are finished, by name.

    Unfinished files are removed. What is going to be packed is recorded in the file `PROGRESS`.

    Args:
        out: the folder.
        manifest: what is going to be packed, without the shards.
        counts: split -> number of its shards.

    Raises:
        UserError: the folder contains shards of another program, or was packed with other settings.
    """
    plan = fixed_settings(manifest, counts)
    lines = read_json_lines(f"{out}/{PROGRESS}")
    plans, finished = lines[:1], list(map(ShardEntry.from_json, lines[1:]))
    if complete := read_manifest(f"{out}/{MANIFEST_NAME}"):
        plans.append(fixed_settings(complete, {split: len(entries) for split, entries in complete.splits.items()}))
        finished = [*itertools.chain(*complete.splits.values()), *finished]  # later entries replace earlier ones
    if not plans and any(name.endswith(".array_record") for name in os.listdir(out)):
        raise UserError(f"{out} contains shards that this command did not write; choose another folder")
    for old in plans:
        before, after = flatten_json(old), flatten_json(plan)
        keys = [key for key in {**before, **after} if key != "made_from.source"]
        changed = [key for key in keys if before.get(key) != after.get(key)]
        if changed:
            details = "; ".join(f"{key}: {before.get(key)!s:.60} -> {after.get(key)!s:.60}" for key in changed)
            raise UserError(
                f"{out} was packed with other settings ({details}); restore them, choose another folder or remove this "
                "one"
            )
    for leftover in Path(out).glob(UNFINISHED):
        leftover.unlink()
    with atomic_write(f"{out}/{PROGRESS}") as temporary, open(temporary, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in (plan, *(entry.to_json() for entry in finished)))
    return {entry.name: entry for entry in finished}


def record_finished(out: str, entry: ShardEntry) -> None:
    """Records that a shard is finished."""
    with report_write_errors(out), open(f"{out}/{PROGRESS}", "a") as file:
        file.write(json.dumps(entry.to_json()) + "\n")


def fixed_settings(manifest: Manifest, counts: Mapping[str, int]) -> dict[str, Any]:
    """Returns, as JSON values, the settings of a folder of shards, with which alone an interrupted writing goes on.

    Args:
        manifest: the manifest; its shards are left out.
        counts: split -> number of shards.
    """
    fields = manifest.to_json()
    fields = {name: value for name, value in fields.items() if name not in ("splits", "label_counts")}
    return {**fields, "shards": dict(counts)}


def read_json_lines(path: str) -> list[dict]:
    """Returns the parsed lines of a JSON Lines file before the first that is cut off; no lines if there is no file."""
    lines: list[dict] = []
    with contextlib.suppress(ValueError, FileNotFoundError, NotADirectoryError), open(path) as file:
        lines.extend(map(json.loads, file))
    return lines


def flatten_json(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted name -> value of all leaves of a tree of JSON objects; `prefix` precedes each name."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten_json(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def find_emptied(
    out: str, sources: Mapping[str, Source], labels: Mapping[int, int], splits: Mapping[str, tuple[ShardEntry, ...]]
) -> dict[str, list[int]]:
    """Returns the classes of each split of which near-duplicates were left out and no image remains.

    Args:
        out: the folder of the shards.
        sources: split -> its examples.
        labels: label in the source -> label as packed.
        splits: split -> the entries of its packed shards.

    Returns:
        Split -> the sorted labels, as packed, of these classes. A split without such classes is left out.

    Raises:
        UserError: a shard cannot be read.
    """
    emptied = {}
    for split, entries in splits.items():
        if sources[split].has_numbers:
            continue
        indices = [one.index for entry in entries for one in entry.duplicates]
        left_out = {label for index in indices for label in label_list(sources[split].label(index))}
        missing = {labels[label] for label in left_out if label in labels}
        for entry in entries:
            shard = Shard(f"{out}/{entry.name}", entry.records, entry.size)
            for row in range(entry.records):
                if not missing:
                    break
                missing -= set(parse_example(cached_reader(shard).read(row))[1] or ())
        if missing:
            emptied[split] = sorted(missing)
    return emptied


def summarize(splits: Mapping[str, tuple[ShardEntry, ...]], emptied: dict[str, list[int]], read: int) -> WrittenShards:
    """Returns the totals over all shards, with `emptied` and `read` as given."""
    entries = list(itertools.chain(*splits.values()))
    return WrittenShards(
        records={split: sum(entry.records for entry in of_split) for split, of_split in splits.items()},
        shards=len(entries),
        size=sum(entry.size for entry in entries),
        left_out=sum(len(entry.left_out) for entry in entries),
        duplicates=sum(len(entry.duplicates) for entry in entries),
        emptied=emptied,
        read=read,
    )
