"""Splits, written as in TFDS for every source: `train`, `train[:98%]`, `train[100:-1000]`, `train+test[:50%]`."""

import re
from collections.abc import Collection, Mapping, Sequence

from vit_jax import UserError, choose

PART = re.compile(r"(?P<name>[\w-]+)(\[(?P<start>-?[\d_.]+%?)?:(?P<stop>-?[\d_.]+%?)?\])?")
Part = tuple[str, str | None, str | None]  # name of a whole split, first boundary, second boundary


def parse(split: str) -> tuple[Part, ...]:
    """Parses a split into its parts: (name, start, stop), boundaries as written or None.

    Raises:
        UserError: it is not written as TFDS writes splits.
    """
    matches = [PART.fullmatch(part.strip()) for part in split.split("+")]
    parts = [(match["name"], match["start"], match["stop"]) for match in matches if match]
    for name, start, stop in parts:
        bounds = [bound for bound in (start, stop) if bound]
        numbers = all(re.fullmatch(r"-?\d[\d_]*(\.\d*)?%|-?\d[\d_]*", bound) for bound in bounds)
        if not numbers or len({bound.endswith("%") for bound in bounds}) > 1:
            raise UserError(
                f"cannot read the slice {name}[{start or ''}:{stop or ''}] of the split {split!r}; its ends are whole "
                "numbers, as in train[:1000], or both percents, as in train[98%:]"
            )
    if len(parts) < len(matches):
        raise UserError(f"cannot read the split {split!r}; write train, train[:98%], train[-1000:] or train+test")
    return tuple(parts)


def names(split: str) -> list[str]:
    """Returns the names of the whole splits that `split` uses, each once."""
    return list(dict.fromkeys(name for name, _, _ in parse(split)))


def whole(name: str) -> str:
    """Returns the longer name of a split: `val` and `validation` are one."""
    return "validation" if name == "val" else name


def resolve(name: str, have: Collection[str], what: str = "split") -> str:
    """Returns the one of some whole splits that a name means, by itself or as `val` means `validation`.

    Raises:
        UserError: there is none; `what` they are.
    """
    same = [one for one in have if whole(one) == whole(name)]
    return choose(what, name, have) if name in have or not same else same[0]


def boundary(bound: str, count: int) -> int:
    """Returns the example at which a slice ends; percents round to the nearest, halves to the even, as in TFDS."""
    if bound.endswith("%"):
        return round(float(bound[:-1]) * count / 100.0)
    return int(bound)


def select_examples(split: str, counts: Mapping[str, int]) -> list[tuple[str, range]]:
    """Returns (name, range of its examples) for each part of `split`.

    Args:
        split: the text.
        counts: number of examples of every whole split that exists.

    Raises:
        UserError: a name is none of the splits, or a split or slice is empty or reaches beyond its split.
    """
    selected = []
    for name, start, stop in parse(split):
        count = counts[resolve(name, counts)]
        if not count:
            raise UserError(f"the split {name} holds no examples")
        first, last = boundary(start, count) if start else 0, boundary(stop, count) if stop else count
        if max(abs(first), abs(last)) > count:
            raise UserError(f"the slice {name}[{start or ''}:{stop or ''}] reaches beyond its {count} examples")
        rows = range(count)[first:last]
        if not rows:
            raise UserError(f"the slice {name}[{start or ''}:{stop or ''}] of {count} examples is empty")
        selected.append((name, rows))
    return selected


def locate(selected: Sequence[tuple[str, range]], index: int) -> tuple[str, int]:
    """Returns the whole split and the position in it of example `index` of the selection.

    Raises:
        IndexError: the selection has no such example; negative numbers do not count from the end.
    """
    if index < 0:
        raise IndexError(index)
    for name, rows in selected:
        if index < len(rows):
            return name, rows[index]
        index -= len(rows)
    raise IndexError(index)
