"""The one form that all sources of examples have.

A source is indexed like a list and gives `{"image": ..., "label": ...}`. The image is RGB uint8 [height, width, 3], or
an `EncodedImage`. The label is an int or, in multi-label data, an array; for regression it is an array of numbers. A
label of -1 says that an image has none, as in the test splits of TFDS. Sources can be pickled, so worker processes can
read them.
"""

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float32, Int32, Int64, Shaped

from vit_jax import UserError, format_rounded_up, printable
from vit_jax.data import images, shards
from vit_jax.data.sources import splits
from vit_jax.storage import cache, filesystem

Label: TypeAlias = int | Int32[np.ndarray, " max_labels"] | Float32[np.ndarray, " targets"]
Example: TypeAlias = tuple[images.RGB | images.EncodedImage, Label]
ClassNames: TypeAlias = tuple[str, ...]
ID_IN_BRACKETS = re.compile(r".* \[(\S+)\]")

# What is sampled of the contents of images.
STRETCHES, LENGTH = 8, 32  # stretches of as many consecutive examples, so that few shards are opened
SAMPLE_THREADS = 16

SHOWN_NAMES, SHOWN_CHARACTERS = 5, 40  # of the first classes, in the lines that a run prints


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """The source of examples, and what a user states about them.

    Attributes:
        source: `KIND` or `KIND:NAME`, see `kinds.KINDS`.
        data_dir: the folder of TFDS data; None: TFDS's own.
        num_classes: number of classes of synthetic images, and of data that do not state it.
        max_labels: the most labels of an image in multi-label data that do not state it.
        num_examples: number of synthetic images of the split `train_split`.
        train_split: the split of training, as a config names it.
        resolution: the side of synthetic images in pixels.
        exclude: the file with a list of images that are left out, see `image_lists`; None: there is none.
        groups: the file that states the group of each image, see `image_lists`; None: there is none.
        group_column: the column of that file with the groups; None: see `image_lists.read_groups`.
        reads_labels: False: the images have no labels (-1), so their files need none, except for VTAB.
        needs_labels: False: labels are read where there are any, and images of a folder may have none (-1).
    """

    source: str
    data_dir: str | None = None
    num_classes: int | None = None
    max_labels: int | None = None
    num_examples: int | None = None
    train_split: str | None = None
    resolution: int | None = None
    exclude: str | None = None
    groups: str | None = None
    group_column: str | None = None
    reads_labels: bool = True
    needs_labels: bool = True


class Shards(NamedTuple):
    """The shards of a source whose examples can be read a few shards at a time.

    A run is a sequence of examples that follow each other both in the source and in one shard.

    Attributes:
        runs: the shard of each run, in the order of the source; one shard may have several runs.
        examples: the number of examples of each run.
        shuffled: whether the order of the examples in the source is known to be random.
    """

    runs: tuple[shards.Shard, ...]
    examples: tuple[int, ...]
    shuffled: bool = False

    @property
    def remote_bytes(self) -> int:
        """The bytes of all remote shards whose size is stated; a shard of several runs counts once."""
        return sum({run.path: run.size or 0 for run in self.runs if filesystem.is_remote(run.path)}.values())


class Mixture(NamedTuple):
    """How training draws images from the parts of a mixture. The source has the examples of one part after the other.

    Attributes:
        lengths: the number of examples of each part.
        weights: whole numbers in the proportions of the shares of the parts.
    """

    lengths: tuple[int, ...]
    weights: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """The index in the source of the first example of each part."""
        return tuple(itertools.accumulate(self.lengths[:-1], initial=0))

    def runs(self, run_lengths: Sequence[int]) -> list[range]:
        """Returns, for each part, the range of its runs among the runs of the source, see `Shards`.

        Args:
            run_lengths: the number of examples in each run of the source.
        """
        ends = list(itertools.accumulate(run_lengths))
        stops = [bisect.bisect_left(ends, end) + 1 for end in itertools.accumulate(self.lengths)]
        return [range(start, stop) for start, stop in itertools.pairwise([0, *stops])]


@dataclasses.dataclass(frozen=True)
class Source:
    """The examples of a split.

    Attributes:
        name: the name of the data set, with its version if it has one.
        parts: what the split consists of, in order: (name of a whole split, which of its examples).
        read_example: (whole split, index in it) -> (image, label); the image may be encoded. If the examples lie in
            shards, it also takes `open_shard`, a function that returns the reader of a shard.
        num_classes: the labels are 0 to num_classes - 1; 0: no image has a label.
        class_names: the names of the classes in the order of the labels, or None.
        digest: a text that identifies what the name does not, such as the list of files.
        max_labels: the most labels of an image in multi-label data, where a label is an array of this length, each
            class once, padded with -1; None: every image has one label.
        has_numbers: whether a label is an array of `num_classes` numbers, the targets of regression, whose names are
            `class_names`; NaN where an image has none.
        file_stamp: (whole split, indices in it) -> a short text that changes when files of the same names change, see
            `stamp_files`; None where the digest covers the contents.
        read_label: (whole split, index in it) -> label, where it is known without reading the image; else None.
        split_labels: whole split -> labels of all its examples, [n], [n, max_labels] or [n, targets], where they are
            known without reading an image; else None.
        split_counts: (whole split, some of its examples) -> the number of images of each class, where that is known
            without the labels; else None.
        read_header: (whole split, index in it) -> header of the image, where it is a local file of its own; else None.
        read_name: (whole split, index in it) -> name of the image in the data, where it has one; else None. It also
            takes what `read_example` takes.
        class_ids: names of the classes for the fingerprint, where `class_names` are words; else None.
        split_names: the names of all whole splits with labels, as the data name them; empty if they are not known.
        notes: lines for the user on what was read and what was skipped.
        shards: the shards in which the examples lie; None if they do not lie in shards.
        mixture: how training draws from the parts of a mixture of sources; None if this is no mixture.
        needs_labels: whether an image without a label is refused when it is read.
        origins: (data set, whole split, which of its examples) of each part; two sources of the same images share some.
        sizes: whole split that was opened -> number of all its examples; empty if images cannot be named by position.
        groups: the groups that its images belong to, where `data.groups` states them.
    """

    name: str
    parts: tuple[tuple[str, splits.Rows], ...]
    read_example: Callable[..., Example]
    num_classes: int
    class_names: tuple[str, ...] | None = None
    digest: str = ""
    max_labels: int | None = None
    has_numbers: bool = False
    file_stamp: Callable[[str, Sequence[int]], str] | None = None
    read_label: Callable[[str, int], Label] | None = None
    split_labels: Callable[[str], Shaped[np.ndarray, " n *labels"]] | None = None
    split_counts: Callable[[str, splits.Rows], Int64[np.ndarray, " classes"]] | None = None
    read_header: Callable[[str, int], images.ImageHeader] | None = None
    read_name: Callable[..., str] | None = None
    class_ids: tuple[str, ...] | None = None
    split_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    shards: Shards | None = None
    mixture: Mixture | None = None
    needs_labels: bool = False
    origins: tuple[tuple[str, str, splits.Rows], ...] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    groups: frozenset[str] = frozenset()

    def __len__(self) -> int:
        """Returns the number of examples."""
        return sum(len(rows) for _, rows in self.parts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns `{"image": RGB or EncodedImage, "label": int or array}`.

        Raises:
            DecodeError: the file is unreadable.
            UserError: the label is not one of the classes, or is missing and needed.
        """
        image, label = self.read(*splits.locate_example(self.parts, int(index)))
        return {"image": image, "label": label}

    def read(self, split: str, row: int, **opening: Callable[..., Any]) -> Example:
        """Returns (image, label) number `row` of a whole split; takes what `read_example` takes, raises as an index."""
        image, label = self.read_example(split, row, **opening)
        name = image.name if isinstance(image, images.EncodedImage) else f"image {row}"
        self.check_label(label, f"{name} of the split {split}")
        return image, label

    def label(self, index: int) -> Label:
        """Returns the label of an example, without its image where the source can; raises as `source[index]`."""
        split, row = splits.locate_example(self.parts, index)
        if not self.read_label:
            return self.read(split, row)[1]
        label = self.read_label(split, row)
        self.check_label(label, f"image {row} of the split {split}")
        return label

    @property
    def blank_label(self) -> np.ndarray:
        """The label of a row that stands for no example: zeros int32, [max_labels] or [], or float32 [targets]."""
        if self.has_numbers:
            return np.zeros(self.num_classes, np.float32)
        return np.zeros(() if self.max_labels is None else self.max_labels, np.int32)

    def check_label(self, label: Label, name: str) -> None:
        """Raises UserError if a label, of the image `name`, is not one of the classes, or is missing and needed."""
        if not self.has_numbers:
            check_range(label_list(label), self.num_classes, name, self.needs_labels)
        elif self.needs_labels and not np.isfinite(label).all():
            raise UserError(f"{name} has no numbers to learn; choose only splits whose images have them")

    def labels(self) -> Shaped[np.ndarray, " n *labels"] | None:
        """Returns the labels of all examples, or None where they are not known without reading images."""
        if self.split_labels is None:
            return None
        return np.concatenate([splits.take_rows(self.split_labels(split), rows) for split, rows in self.parts])

    def count_rows(self, split: str, rows: splits.Rows) -> Int64[np.ndarray, " classes"]:
        """Returns the number of images of each class in some rows of a whole split; `class_counts` must not be None.

        An image with several labels counts for each of them.
        """
        if self.split_counts:
            return self.split_counts(split, rows)
        assert self.split_labels
        labels = splits.take_rows(self.split_labels(split), rows)
        return np.bincount(labels[labels >= 0].ravel(), minlength=self.num_classes)

    def class_counts(self) -> Int64[np.ndarray, " classes"] | None:
        """Returns the number of images of each class, or None where it is not known without reading images.

        It is None too where labels are numbers.
        """
        if self.has_numbers or (self.split_labels is None and self.split_counts is None):
            return None
        return np.sum([self.count_rows(split, rows) for split, rows in self.parts], axis=0)

    def stamp(self, indices: Iterable[int]) -> str:
        """Returns a short text that changes when the files of these examples do; empty: the digest covers them."""
        if self.file_stamp is None:
            return ""
        rows = dict[str, list[int]]()
        for index in indices:
            split, row = splits.locate_example(self.parts, index)
            rows.setdefault(split, []).append(row)
        return " ".join(itertools.starmap(self.file_stamp, rows.items()))

    def image_header(self, index: int) -> images.ImageHeader:
        """Returns the header of an image; `read_header` must not be None.

        Raises:
            DecodeError: the file is unreadable.
        """
        assert self.read_header
        return self.read_header(*splits.locate_example(self.parts, index))

    def example_name(self, index: int) -> str:
        """Returns the name that the image of an example has in the data, or else `<whole split>/<index in it>`."""
        split, row = splits.locate_example(self.parts, index)
        return self.read_name(split, row) if self.read_name else f"{split}/{row}"

    def example_key(self, index: int) -> str:
        """Returns the text that names an example in a list of images, see `image_lists`.

        That is its `example_name`, or `<whole split>/<index in it>` where names are known from the shards only.
        """
        return "/".join(map(str, splits.locate_example(self.parts, index))) if self.shards else self.example_name(index)

    def streamed(self) -> "Source":
        """Returns this source, whose examples must lie in shards, reading them from streamed shards.

        A streamed shard and its local copy stay only until `shards.close_streamed`, not while the process runs.
        """
        opening = {"open_shard": shards.streamed_reader}
        return dataclasses.replace(
            self,
            read_example=functools.partial(self.read_example, **opening),
            read_name=self.read_name and functools.partial(self.read_name, **opening),
        )

    def select(self, ranges: Sequence[range]) -> "Source":
        """Returns a source of the examples whose indices are in some ranges, which ascend and do not overlap."""
        selected = None
        if self.shards:
            runs = cut_ranges(self.shards.examples, ranges)
            selected = Shards(
                tuple(self.shards.runs[number] for number, _ in runs),
                tuple(len(rows) for _, rows in runs),
                self.shards.shuffled,
            )
        parts = cut_ranges([len(rows) for _, rows in self.parts], ranges)
        return dataclasses.replace(
            self,
            parts=tuple(
                (self.parts[number][0], self.parts[number][1][rows.start : rows.stop]) for number, rows in parts
            ),
            shards=selected,
            mixture=None,
        )

    def pick(self, indices: Int64[np.ndarray, " n"]) -> "Source":
        """Returns a source of the examples of some indices, which ascend, each once."""
        selected = None
        if self.shards:
            ends = np.searchsorted(indices, np.cumsum([0, *self.shards.examples]))
            runs = [(run, count) for run, count in zip(self.shards.runs, np.diff(ends).tolist(), strict=True) if count]
            selected = Shards(tuple(run for run, _ in runs), tuple(count for _, count in runs), self.shards.shuffled)
        starts = np.cumsum([0, *(len(rows) for _, rows in self.parts)]).tolist()
        cuts = [int(np.searchsorted(indices, start)) for start in starts]
        places = [indices[cuts[part] : cuts[part + 1]] - starts[part] for part in range(len(self.parts))]
        parts = tuple(
            (split, splits.pick_rows(rows, own))
            for (split, rows), own in zip(self.parts, places, strict=True)
            if len(own)
        )
        return dataclasses.replace(self, parts=parts, shards=selected)

    @contextlib.contextmanager
    def opened(self) -> Iterator["Source"]:
        """Yields the source, to read some of its examples. Shards that are opened for them are closed at the end."""
        if self.shards is None:
            yield self
            return
        try:
            yield self.streamed()
        finally:
            shards.close_streamed(())

    def check_cache_room(self, reserved_bytes: int = 0) -> None:
        """Raises UserError if copies of all remote shards, and `reserved_bytes` other bytes, do not fit into the cache.

        A copy stays while the process runs. Without this check, a run would fail only when it first reads a shard that
        does not fit.
        """
        size = self.shards.remote_bytes + reserved_bytes if self.shards and self.shards.remote_bytes else 0
        if self.shards and size > cache.max_bytes():
            remote = dict.fromkeys(run.path for run in self.shards.runs if filesystem.is_remote(run.path))
            raise UserError(
                f"the {len(remote)} shards to read, such as {next(iter(remote))}, need {size / 1e9:.3g} GB, more than "
                f"the {cache.max_bytes() / 1e9:.3g} GB that the cache may hold; set "
                f"VIT_JAX_CACHE_GB={format_rounded_up(size / 1e9, 3)} or more, and VIT_JAX_CACHE to a folder with "
                "enough room"
            )

    def overlaps(self, other: "Source") -> bool:
        """Returns whether two sources share examples."""
        return any(
            place == same and splits.share_rows(rows, others)
            for *place, rows in self.origins
            for *same, others in other.origins
        )

    @property
    def fingerprint(self) -> str:
        """A short text that differs when the data set, version, split, count, files or class names differ."""
        names = self.class_ids or self.class_names
        identity = repr((self.name, self.parts, len(self), self.num_classes, names, self.digest))
        identity += "numbers" if self.has_numbers else ""
        return hashlib.sha256(identity.encode()).hexdigest()[:16]


def cut_ranges(lengths: Sequence[int], ranges: Sequence[range]) -> list[tuple[int, range]]:
    """Returns (number of a part, range of indices in it) for ranges of indices in parts that follow each other.

    Args:
        lengths: the number of indices in each part.
        ranges: the ranges, which ascend and do not overlap.
    """
    cuts = []
    starts = [0, *itertools.accumulate(lengths)]
    for wanted in ranges:
        for number in range(max(bisect.bisect_right(starts, wanted.start) - 1, 0), len(lengths)):
            if starts[number] >= wanted.stop:
                break
            start, stop = max(wanted.start, starts[number]), min(wanted.stop, starts[number + 1])
            if start < stop:
                cuts.append((number, range(start - starts[number], stop - starts[number])))
    return cuts


def label_list(label: Label) -> list[int]:
    """Returns the labels of an image as a list, without padding."""
    return [label] if isinstance(label, int) else label[label >= 0].tolist()


def check_range(labels: Sequence[int], num_classes: int, name: str, needed: bool = False) -> None:
    """Raises UserError if a label of an image is not one of the classes.

    Args:
        labels: the labels; -1 says that the image has none.
        num_classes: the labels are 0 to num_classes - 1.
        name: what messages call the image.
        needed: whether -1 is refused too.
    """
    if wrong := [label for label in labels if not -1 <= label < num_classes]:
        raise UserError(f"{name} has the label {wrong[0]}, but there are {num_classes} classes")
    if needed and -1 in labels:
        raise UserError(f"{name} has no label (-1); choose only splits whose images have labels")


def stamp_files(paths: Iterable[str]) -> str:
    """Returns a short text that changes when files, local or remote, are replaced; see `filesystem.file_version`.

    The text is not part of a fingerprint, since a copy of the files is the same data.
    """
    paths = list(paths)
    if any(map(filesystem.is_remote, paths)):
        with ThreadPoolExecutor(filesystem.CONCURRENT_REQUESTS) as pool:
            return stamp_versions(pool.map(file_version, paths))
    return stamp_versions(map(file_version, paths))


def stamp_versions(versions: Iterable[str]) -> str:
    """Returns a short text that changes when one of the versions of files does."""
    digest = hashlib.sha256()
    for version in versions:
        digest.update(f"{version}\n".encode())
    return digest.hexdigest()[:16]


def file_version(path: str) -> str:
    """Returns the version of a file, or "none" if it cannot be read, which is reported when its content is read."""
    try:
        return filesystem.file_version(path)
    except UserError:
        return "none"


def sample_contents(source: Source, stretches: int = STRETCHES) -> str:
    """Returns a short text that differs between data of the same fingerprint if a sampled example differs.

    Fingerprints of sources cover only names and labels, which stay the same when files are replaced.
    The sample has 32 examples for each of the `stretches`, always the same ones, or all examples if there are no more.
    Copies of the data give the same text, whatever their times and places. The text is empty for data whose fingerprint
    covers the contents.

    Raises:
        UserError: a file or a store cannot be read.
    """
    if source.file_stamp is None:
        return ""
    with source.opened() as readable, ThreadPoolExecutor(SAMPLE_THREADS) as pool:
        digests = pool.map(lambda index: digest_example(readable, index), sample_indices(len(source), stretches))
        return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def sample_indices(count: int, stretches: int = STRETCHES) -> list[int]:
    """Returns the indices of the examples that are sampled from `count` examples; all of them if there are few.

    The examples are divided into `stretches` equal parts. In each part a stretch of `LENGTH` consecutive examples is
    sampled, at a random place that depends only on `count` and `stretches`.
    """
    if count <= stretches * LENGTH:
        return list(range(count))
    ends = [count * number // stretches for number in range(stretches + 1)]
    random = np.random.default_rng(count)
    starts = [random.integers(start, max(end - LENGTH, start) + 1) for start, end in itertools.pairwise(ends)]
    return [int(start) + offset for start in starts for offset in range(LENGTH)]


def digest_example(source: Source, index: int) -> bytes:
    """Returns a digest of the stored bytes of an image and of its label; all unreadable images have the same digest."""
    try:
        example = source[index]
    except images.DecodeError:
        return hashlib.sha256(b"unreadable").digest()
    image = example["image"]
    stored = image.data if isinstance(image, images.EncodedImage) else np.ascontiguousarray(image).tobytes()
    return hashlib.sha256(repr(np.asarray(example["label"]).tolist()).encode() + b" " + stored).digest()


def compose(name: str) -> str:
    """Returns a name with its accents composed (NFC), in which names are compared."""
    return unicodedata.normalize("NFC", name)


def kinds_of_names(source: Source) -> list[ClassNames]:
    """Returns the names of the classes of a source and, if these are words with ids, the ids; [] without names.

    Numbers, and ids that several classes share, tell classes of different sources apart no better than labels do: they
    are no ids.
    """
    names = source.class_names or ()
    matches = [ID_IN_BRACKETS.fullmatch(name) for name in names]
    ids = source.class_ids or tuple(match[1] if match else name for match, name in zip(matches, names, strict=True))
    if not names or ids == names or len({*ids}) < len(ids) or any(map(str.isdigit, ids)):
        return [names] if names else []
    return [names, ids]


def have_same_classes(one: Source, other: Source) -> bool:
    """Returns whether two sources have equally many classes, and equal names of them in equal order, or both none."""
    named = bool(one.class_names or other.class_names)
    same = any(
        tuple(map(compose, own)) == tuple(map(compose, theirs))
        for own, theirs in itertools.product(kinds_of_names(one), kinds_of_names(other))
    )
    return one.num_classes == other.num_classes and (same or not named)


def describe_classes(source: Source) -> str:
    """Returns the number of images and of classes of a split, and the names of the first classes, as one line."""
    if not source.num_classes:
        return f"{len(source):,} images without labels"
    names = source.class_names or ()
    first = ", ".join(printable(name, SHOWN_CHARACTERS) for name in names[:SHOWN_NAMES])
    shown = f": {first}{', ...' if len(names) > SHOWN_NAMES else ''}" if names else " without names"
    one, several = ("number", "numbers") if source.has_numbers else ("class", "classes")
    return f"{len(source):,} images of {source.num_classes:,} {one if source.num_classes == 1 else several}{shown}"
