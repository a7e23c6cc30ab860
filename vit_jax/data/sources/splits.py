"""Splits in the notation of TFDS, for every source: `train`, `train[:98%]`, `train[100:-1000]`, `train+test[:50%]`.

A split or a slice may be divided into folds, for cross-validation: `train[fold 2/5]` is the second of five folds, and
`train[not fold 2/5]` the other four. `folds` says which images a fold has.
"""

import functools
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, overload

import numpy as np
from jaxtyping import Int64

from vit_jax import UserError, choose

PART = re.compile(r"(?P<name>[\w-]+)(\[(?P<start>-?[\d_.]+%?)?:(?P<stop>-?[\d_.]+%?)?\])?")
BOUND = re.compile(r"(?=.{1,30}$)-?\d+(_\d+)*((\.\d*)?%)?")  # Python refuses to convert thousands of digits
FOLD = re.compile(r"\[(?P<negated>not )?fold (?P<number>-?\d{1,9})/(?P<folds>-?\d{1,9})\]$")
Part = tuple[str, str | None, str | None]  # name of a whole split, first boundary, second boundary
# Word in the name of a file or folder -> the split that it stands for.
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
}
AFFIX = re.compile(r"(set|data|dataset|images?|imgs?|folder|split)$")  # of the name of a split, or a word of it


class UnknownSplit(UserError):
    """The data have no split of the name that was asked for.

    Attributes:
        existing: the sorted names of the splits that they have.
    """

    def __init__(self, sentence: str, existing: Collection[str]):
        """Takes the message and the names of the existing splits."""
        super().__init__(sentence)
        self.existing = sorted(existing)


class Fold(NamedTuple):
    """One fold of a split, or all others.

    Attributes:
        number: the number of the fold, from 1.
        folds: the number of folds.
        negated: whether all other folds are meant.
    """

    number: int
    folds: int
    negated: bool = False

    def __str__(self) -> str:
        """Returns the fold as it is written in brackets."""
        return f"{'not ' if self.negated else ''}fold {self.number}/{self.folds}"


class RowList(Sequence[int]):
    """The indices of some examples of a whole split, ascending and each once, where they are no range.

    Attributes:
        indices: the indices.
    """

    def __init__(self, indices: Int64[np.ndarray, " n"]):
        """Takes the indices."""
        self.indices = indices

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self.indices)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> "RowList": ...
    def __getitem__(self, place: int | slice) -> "int | RowList":
        """Returns one of the indices, or the list of some."""
        return RowList(self.indices[place]) if isinstance(place, slice) else int(self.indices[place])

    def __iter__(self) -> Iterator[int]:
        """Iterates over the indices."""
        return iter(self.indices.tolist())

    def __eq__(self, other: object) -> bool:
        """Returns whether another list has the same indices."""
        return isinstance(other, RowList) and np.array_equal(self.indices, other.indices)

    def __hash__(self) -> int:
        """Returns a hash of the indices."""
        return hash(self.digest)

    def __repr__(self) -> str:
        """Returns a short text that differs from that of other lists."""
        return f"{len(self):,} of {self.indices[0]}:{self.indices[-1] + 1} {self.digest}" if len(self) else "none"

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the indices."""
        return hashlib.sha256(self.indices.astype("<i8").tobytes()).hexdigest()[:16]


Rows: TypeAlias = range | RowList  # of a whole split, ascending and each once


def row_indices(rows: Rows) -> Int64[np.ndarray, " n"]:
    """Returns the indices of rows as an array."""
    return rows.indices if isinstance(rows, RowList) else np.arange(rows.start, rows.stop, dtype=np.int64)


def take_rows(array: np.ndarray, rows: Rows) -> np.ndarray:
    """Returns the elements of an array of a whole split at some rows."""
    return array[rows.indices] if isinstance(rows, RowList) else array[rows.start : rows.stop]


def pick_rows(rows: Rows, places: Int64[np.ndarray, " n"]) -> Rows:
    """Returns the rows at some places among `rows`; the places ascend, each once, and are at least one."""
    if places[-1] - places[0] + 1 == len(places):
        return rows[int(places[0]) : int(places[-1]) + 1]
    return RowList(row_indices(rows)[places])


def share_rows(one: Rows, other: Rows) -> bool:
    """Returns whether two sets of rows of the same whole split have a row in common."""
    if isinstance(one, range) and isinstance(other, range):
        return max(one.start, other.start) < min(one.stop, other.stop)
    return np.intersect1d(row_indices(one), row_indices(other), assume_unique=True).size > 0


def describe_rows(name: str, rows: Rows) -> str:
    """Returns rows of a whole split in words, such as `train[0:90]`; other rows have another text."""
    return f"{name}[{rows!r}]" if isinstance(rows, RowList) else f"{name}[{rows.start}:{rows.stop}]"


def divide_folds(split: str) -> tuple[str, tuple[Fold | None, ...]]:
    """Returns a split without its folds, and the fold of each of its parts or None.

    Raises:
        UserError: there are fewer than two folds, or no fold of a number.
    """
    plain, folds = list[str](), list[Fold | None]()
    for part in (text.strip() for text in split.split("+")):
        match = FOLD.search(part)
        plain.append(part[: match.start()] if match else part)
        fold = match and Fold(int(match["number"]), int(match["folds"]), bool(match["negated"]))
        if fold and fold.folds < 2:
            raise UserError(f"there is no {part}; a split is divided into 2 folds or more, as in train[fold 2/5]")
        if fold and not 1 <= fold.number <= fold.folds:
            raise UserError(f"there is no {part}; the {fold.folds} folds have the numbers 1 to {fold.folds}")
        folds.append(fold)
    return "+".join(plain), tuple(folds)


def parse_split(split: str) -> tuple[Part, ...]:
    """Parses a split into its parts: (name, start, stop). A boundary is a text as written, or None if there is none.

    Raises:
        UserError: the text is not in the notation of TFDS, or a percentage is above 100.
    """
    matches = [PART.fullmatch(part.strip()) for part in split.split("+")]
    parts = [(match["name"], match["start"], match["stop"]) for match in matches if match]
    for name, start, stop in parts:
        bounds = [bound for bound in (start, stop) if bound]
        numbers = all(BOUND.fullmatch(bound) for bound in bounds)
        if not numbers or len({bound.endswith("%") for bound in bounds}) > 1:
            raise UserError(
                f"cannot read the slice {name}[{start or ''}:{stop or ''}] of the split {split!r}; its ends must be "
                "whole numbers, as in train[:1000], or both percentages, as in train[98%:]"
            )
        if any(bound.endswith("%") and abs(float(bound[:-1])) > 100 for bound in bounds):
            raise UserError(
                f"the slice {name}[{start or ''}:{stop or ''}] of the split {split!r} reaches beyond the split; "
                "percentages must be from -100% to 100%"
            )
    if len(parts) < len(matches):
        raise UserError(
            f"cannot read the split {split!r}; write train, train[:98%], train[-1000:], train+test or train[fold 2/5]"
        )
    return tuple(parts)


def split_names(split: str) -> list[str]:
    """Returns the names of the whole splits that `split` uses, each once."""
    return list(dict.fromkeys(name for name, _, _ in parse_split(split)))


def canonical_name(name: str) -> str:
    """Returns `validation` for `val` and `valid`, since these are the same split, and any other name as it is."""
    return "validation" if name in ("val", "valid") else name


def name_splits(names: Sequence[str]) -> dict[str, str]:
    """Returns name of a folder -> the split that it stands for, for those of the names that stand for one.

    A name stands for a split if one of its words does, in any case. Its other words must be usual ones, as in
    `training_set` and `TestImages`, or the same in all these names, as in `seg_train` and `seg_test`.
    """
    found = {}
    for name in names:
        words = [AFFIX.sub("", word.lower()) for word in re.findall(r"[^\W\d_]+", name)]
        meant = [SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS]
        if len(meant) == 1:
            found[name] = meant[0], [word for word in words if word and word not in SPLIT_WORDS]
    rests = [rest for _, rest in found.values()]
    alike = (len(rests) > 1 or len(names) == 1) and all(rest == rests[0] for rest in rests)
    return {name: split for name, (split, rest) in found.items() if alike or not rest}


def resolve_name(name: str, existing: Collection[str], what: str = "split") -> str:
    """Returns the existing whole split that a name stands for; `val`, `valid` and `validation` are the same split.

    Args:
        name: the name that the user gave.
        existing: the names of the existing splits.
        what: the noun for the message, such as "split".

    Raises:
        UnknownSplit: there is no such split.
    """
    same = [one for one in existing if canonical_name(one) == canonical_name(name)]
    if name in existing or same:
        return name if name in existing else same[0]
    try:
        return choose(what, name, existing)
    except UserError as error:
        raise UnknownSplit(str(error), existing) from None


def slice_boundary(bound: str, count: int) -> int:
    """Returns the index of a boundary in a split of `count` examples; a negative boundary stays negative.

    Percentages are rounded to the nearest index, halves to the even one, as in TFDS.
    """
    if bound.endswith("%"):
        return round(float(bound[:-1]) * count / 100.0)
    return int(bound)


def select_examples(split: str, counts: Mapping[str, int]) -> list[tuple[str, range]]:
    """Returns (name as written, range of its examples) for each part of `split`.

    Args:
        split: the text.
        counts: number of examples of every existing whole split.

    Raises:
        UserError: there is no split of a name, or a split or slice is empty or reaches beyond its split.
    """
    selected = []
    for name, start, stop in parse_split(split):
        count = counts[resolve_name(name, counts)]
        if not count:
            raise UserError(f"the split {name} has no examples")
        first = slice_boundary(start, count) if start else 0
        last = slice_boundary(stop, count) if stop else count
        if max(abs(first), abs(last)) > count:
            raise UserError(
                f"the slice {name}[{start or ''}:{stop or ''}] reaches beyond the {count} examples of the split"
            )
        rows = range(count)[first:last]
        if not rows:
            raise UserError(f"the slice {name}[{start or ''}:{stop or ''}] is empty: the split has {count} examples")
        selected.append((name, rows))
    return selected


def locate_example(selected: Sequence[tuple[str, Rows]], index: int) -> tuple[str, int]:
    """Returns the whole split of example `index` of the selection, and the example's index in it.

    Raises:
        IndexError: the selection has no such example; negative indices are not allowed.
    """
    if index < 0:
        raise IndexError(index)
    for name, rows in selected:
        if index < len(rows):
            return name, rows[index]
        index -= len(rows)
    raise IndexError(index)
