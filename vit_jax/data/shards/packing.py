"""Packs all splits of a source into shards, resumably; `records` says in which format."""

import array
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax import UserError
from vit_jax.data.images import DecodeError, EncodeOptions
from vit_jax.data.shards import class_selection, files
from vit_jax.data.sources import Label, Source, SourceConfig, open_split, split_names

SHARD = 256_000_000  # bytes of a shard, about, unless told otherwise: few files, and soon done again after a crash
SAMPLE = 64  # examples of a split that tell its size
CHUNK = 8  # images that a thread reads at a time
LABELS = 1000  # labels likewise
PROGRESS = "progress.jsonl"  # in OUT while it is packed: what is packed and, line by line, the shards that are done


@dataclasses.dataclass(frozen=True)
class Packed:
    """What lies there when all is packed.

    Attributes:
        records: split -> number of images.
        shards: how many files.
        size: their bytes.
        left_out: how many unreadable images are missing.
        read: how many images were read now, not before.
    """

    records: dict[str, int]
    shards: int
    size: int
    left_out: int
    read: int


class Job(NamedTuple):
    """A shard to write.

    Attributes:
        split: which it is of.
        name: of its file.
        rows: the examples of the split that belong in it.
        stamp: differs when their files do.
    """

    split: str
    name: str
    rows: Sequence[int]
    stamp: str


@dataclasses.dataclass(frozen=True)
class Packing:
    """What to pack, and how.

    Attributes:
        opened: split -> all its examples.
        rows: split -> which of them.
        labels: number of each class in the source -> its label; other labels are dropped.
        info: what info.json will say, but for the shards.
        form: of the images.
        skip: leave unreadable images out instead of failing.
        workers: threads that read, decode and encode.
        shards: of each split, at most one for each example; None: so many that one has about 256 MB.
    """

    opened: dict[str, Source]
    rows: dict[str, Sequence[int]]
    labels: dict[int, int]
    info: dict[str, Any]
    form: EncodeOptions
    skip: bool
    workers: int
    shards: int | None

    def run(self, out: str, advance: Callable[[int], None]) -> Packed:
        """Packs what is not packed yet.

        Args:
            out: the folder; made if absent.
            advance: called with the number of images that are done besides.

        Raises:
            UserError: the folder holds something else, an image is unreadable, or the disk is full.
        """
        read = 0
        with lock_folder(out), concurrent.futures.ThreadPoolExecutor(self.workers) as pool:
            counts = {split: self.count(split) for split in self.opened}
            with files.writing(out):
                done = begin(out, self.info, counts)
            listed: dict[str, list[dict]] = {split: [] for split in counts}
            for job in self.jobs(counts):
                entry = done.get(job.name, {})
                if self.is_done(out, job, entry):
                    advance(len(job.rows))
                else:
                    entry = self.write(out, job, pool, advance)
                    read += len(job.rows)
                listed[job.split].append(entry)
            with files.writing(out):
                files.write_json(f"{out}/{files.INFO}", {**self.info, "splits": listed})
                os.remove(f"{out}/{PROGRESS}")
        return summary(listed, read)

    def jobs(self, counts: Mapping[str, int]) -> Iterator[Job]:
        """Iterates over the shards of all splits, given the number of each split's; looks at their files only then."""
        for split, count in counts.items():
            source, total = self.opened[split], len(self.rows[split])
            for number in range(count):
                rows = self.rows[split][total * number // count : total * (number + 1) // count]
                stamp = source.stamp(split, rows) if source.stamp else ""
                yield Job(split, files.file_name(split, number, count), rows, stamp)

    def is_done(self, out: str, job: Job, entry: Mapping[str, Any]) -> bool:
        """Returns whether a shard lies there as its entry says, made from the same files and with nothing amiss."""
        if not entry or entry.get("files", "") != job.stamp or ("left_out" in entry and not self.skip):
            return False
        try:
            return files.count(f"{out}/{job.name}", entry["bytes"]) == entry["records"]
        except UserError:
            return False

    def write(
        self, out: str, job: Job, pool: concurrent.futures.Executor, advance: Callable[[int], None]
    ) -> dict[str, Any]:
        """Writes a shard and notes down that it is done; returns its entry in info.json."""
        left_out: list[dict] = []
        shard = files.write_shard(f"{out}/{job.name}", self.examples(pool, job, left_out, advance))
        entry: dict[str, Any] = {"name": job.name, "records": shard.records, "bytes": shard.size}
        entry |= {"files": job.stamp} if job.stamp else {}
        entry |= {"left_out": left_out} if left_out else {}
        with files.writing(out), open(f"{out}/{PROGRESS}", "a") as progress:
            progress.write(json.dumps(entry) + "\n")
        return entry

    def count(self, split: str) -> int:
        """Returns the number of shards of a split."""
        total = len(self.rows[split])
        if self.shards:
            return min(self.shards, total)
        sample = [self.read(split, index) for index in self.rows[split][:: -(-total // SAMPLE)]]
        return max(1, round(total * np.mean([len(image or b"") for image, _ in sample]) / SHARD))

    def read(self, split: str, index: int) -> tuple[bytes | None, Any]:
        """Returns (encoded image, labels), or (None, what is wrong) of an unreadable one that is to be left out."""
        source = self.opened[split]
        try:
            image, label = source.read(split, index)
            encoded = self.form(image)
        except DecodeError as error:
            if not self.skip:
                raise UserError(f"{error}; repair it, or leave such images out with --bad-images=skip") from error
            return None, str(error)
        except OSError as error:  # of the source: what is written is written elsewhere
            raise UserError(f"cannot read image {index} of the split {split}: {error}") from error
        numbers = listed(label)
        if wrong := [number for number in numbers if not 0 <= number < source.num_classes]:
            raise UserError(
                f"image {index} of the split {split} has the label {wrong[0]}, but there are {source.num_classes} "
                "classes; leave the split out with --splits"
            )
        return encoded, [self.labels[number] for number in numbers if number in self.labels]

    def examples(
        self,
        pool: concurrent.futures.Executor,
        job: Job,
        left_out: list[dict],
        advance: Callable[[int], None],
    ) -> Iterator[tuple[bytes, list[int]]]:
        """Iterates over images and labels in order, read ahead by the threads; fills `left_out`."""

        def read(chunk: Sequence[int]) -> list[tuple[int, bytes | None, Any]]:
            return [(index, *self.read(job.split, index)) for index in chunk]

        def submit(chunk: Sequence[int]) -> concurrent.futures.Future:
            return pool.submit(read, chunk)

        chunks = iter([job.rows[start : start + CHUNK] for start in range(0, len(job.rows), CHUNK)])
        ahead = deque(map(submit, itertools.islice(chunks, 2 * self.workers)))
        while ahead:
            found = ahead.popleft().result()
            ahead.extend(map(submit, itertools.islice(chunks, 1)))
            for index, image, labels in found:
                if image is None:
                    left_out.append({"index": index, "error": labels})
                else:
                    yield image, labels
            advance(len(found))


def plan_packing(
    origin: SourceConfig,
    form: EncodeOptions,
    *,
    splits: list[str] | None = None,
    only: str | None = None,
    count: int | None = None,
    skip: bool = False,
    workers: int = 0,
) -> Packing:
    """Opens what is to be packed.

    Args:
        origin: where the examples come from.
        form: of the images.
        splits: which; None: all.
        only: the classes to take, in the order of their labels, as `class_selection.parse` reads them; None: all.
        count: of the shards of each split; None: so many that one has about 256 MB.
        skip: leave unreadable images out instead of failing.
        workers: threads; 0: one for each core.

    Raises:
        UserError: the source, a split or a class is absent, or a split is not whole.
    """
    for split in splits or []:
        if set(split) & set("[+"):
            raise UserError(f"cannot pack {split}: splits are packed whole, and cut when they are read")
    opened = {split: open_split(origin, split) for split in split_names(origin, splits or ())}
    first = next(iter(opened.values()))
    workers = workers or os.cpu_count() or 1
    numbers = list(range(first.num_classes))
    rows: dict[str, Sequence[int]] = {split: range(len(source)) for split, source in opened.items()}
    if only is not None:
        numbers = class_selection.parse(only, first.class_ids or first.class_names, first.num_classes, origin.source)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            rows = {split: with_classes(source, split, set(numbers), pool) for split, source in opened.items()}
    info = {
        "version": files.VERSION,
        "name": first.name.removeprefix("array_record:"),
        "num_classes": len(numbers),
        "class_names": first.class_names and [first.class_names[number] for number in numbers],
        "max_labels": first.max_labels and min(first.max_labels, len(numbers)),
        "made_from": {
            "source": origin.source,
            "fingerprints": {split: source.fingerprint for split, source in opened.items()},
            **dataclasses.asdict(form),
            **({"classes": numbers} if only is not None else {}),
        },
    }
    labels = {number: label for label, number in enumerate(numbers)}
    return Packing(opened, rows, labels, info, form, skip, workers, count)


def listed(label: Label) -> list[int]:
    """Returns the labels of an image."""
    return [label] if isinstance(label, int) else label[label >= 0].tolist()


def with_classes(
    source: Source, split: str, numbers: Collection[int], pool: concurrent.futures.Executor
) -> Sequence[int]:
    """Returns the positions, in a whole split, of the images that have one of the classes; decodes none.

    An image whose label is unreadable is among them: what reads it next says so.

    Raises:
        UserError: there are none.
    """

    def is_one(index: int) -> bool:
        try:
            label = source.label(split, index) if source.label else source.read(split, index)[1]
        except (DecodeError, OSError):
            return True
        return any(number in numbers for number in listed(label))

    def of_chunk(chunk: Sequence[int]) -> list[int]:
        return list(filter(is_one, chunk))

    whole = range(len(source))
    chunks = [whole[start : start + LABELS] for start in whole[::LABELS]]
    found = array.array("q", itertools.chain.from_iterable(pool.map(of_chunk, chunks)))
    if not found:
        raise UserError(f"no image of the split {split} has one of the classes; leave the split out with --splits")
    return found


@contextlib.contextmanager
def lock_folder(out: str) -> Iterator[None]:
    """Makes a folder and keeps other processes from packing into it, where the file system can.

    Raises:
        UserError: the folder cannot be written, or another process packs into it.
    """
    with files.writing(out):
        os.makedirs(out, exist_ok=True)
        folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is packing into {out}") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(folder)


def begin(out: str, info: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, dict]:
    """Returns the shards that are done, by name, and writes what is going to be packed.

    Raises:
        UserError: the folder holds something else.
    """
    plan = {**info, "shards": dict(counts)}
    lines = read_lines(f"{out}/{PROGRESS}")
    plans, done = lines[:1], lines[1:]
    whole = files.read_info(f"{out}/{files.INFO}")
    if whole:
        splits = whole.pop("splits")
        plans.append({**whole, "shards": {split: len(listed) for split, listed in splits.items()}})
        done = [*itertools.chain(*splits.values()), *done]  # what was done since comes last, and holds
    if not plans and any(name.endswith(".array_record") for name in os.listdir(out)):
        raise UserError(f"{out} holds shards that this command did not write; choose another folder")
    for old in plans:
        before, after = flatten(old), flatten(plan)
        keys = [key for key in {**before, **after} if key != "made_from.source"]
        changed = [key for key in keys if before.get(key) != after.get(key)]
        if changed:
            details = "; ".join(f"{key}: {before.get(key)!s:.60} -> {after.get(key)!s:.60}" for key in changed)
            raise UserError(
                f"{out} was packed in another way ({details}); change it back, choose another folder or remove this one"
            )
    partial = f"{out}/{PROGRESS}.partial"
    with open(partial, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in (plan, *done))
    os.replace(partial, f"{out}/{PROGRESS}")
    return {entry["name"]: entry for entry in done}


def read_lines(path: str) -> list[dict]:
    """Returns the lines of a file of JSON, but for what follows a torn one."""
    lines: list[dict] = []
    if os.path.exists(path):
        with open(path) as file, contextlib.suppress(ValueError):
            lines.extend(map(json.loads, file))
    return lines


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def summary(listed: Mapping[str, list[dict]], read: int) -> Packed:
    """Returns what lies there, given the entries of the shards of each split."""
    entries = list(itertools.chain(*listed.values()))
    return Packed(
        records={split: sum(entry["records"] for entry in of_split) for split, of_split in listed.items()},
        shards=len(entries),
        size=sum(entry["bytes"] for entry in entries),
        left_out=sum(len(entry.get("left_out", [])) for entry in entries),
        read=read,
    )
