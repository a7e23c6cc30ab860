"""Splits in the notation of TFDS, for every source: `train`, `train[:98%]`, `train[100:-1000]`, `train+test[:50%]`."""

import re
from collections.abc import Collection, Mapping, Sequence

from vit_jax import UserError, choose

PART = re.compile(r"(?P<name>[\w-]+)(\[(?P<start>-?[\d_.]+%?)?:(?P<stop>-?[\d_.]+%?)?\])?")
BOUND = re.compile(r"(?=.{1,30}$)-?\d+(_\d+)*((\.\d*)?%)?")  # Python refuses to convert thousands of digits
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
        raise UserError(f"cannot read the split {split!r}; write train, train[:98%], train[-1000:] or train+test")
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


def locate_example(selected: Sequence[tuple[str, range]], index: int) -> tuple[str, int]:
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
