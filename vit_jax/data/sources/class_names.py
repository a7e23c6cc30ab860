"""The names of classes, compared between sources.

A source may name its classes in words and by ids, such as WordNet's; packed words have the id in brackets, as in
`tench, Tinca tinca [n01440764]`. Names are compared in one Unicode form: "é" may be one character or two, and file
systems differ in what they make of it.
"""

import itertools
import re
import unicodedata
from collections.abc import Sequence
from typing import TypeAlias

from vit_jax import printable
from vit_jax.data.sources.source import Source

Names: TypeAlias = tuple[str, ...]
ID_IN_BRACKETS = re.compile(r".* \[(\S+)\]")

SHOWN_NAMES, SHOWN_CHARACTERS = 5, 40  # of the first classes, in the lines that a run prints


def compose(name: str) -> str:
    """Returns a name with its accents composed (NFC), in which names are compared."""
    return unicodedata.normalize("NFC", name)


def kinds_of_names(source: Source) -> list[Names]:
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


def choose_names(kinds: Sequence[Sequence[Names]]) -> list[Names | None]:
    """Returns, for each of several sources, those of its kinds of names of which most are also names in other sources.

    Of several such kinds it is the first. A kind in which several classes have the same name is chosen only if there is
    no other. The result for a source without names is None.
    """
    composed = [{compose(name) for names in of_source for name in names} for of_source in kinds]
    chosen: list[Names | None] = []
    for number, of_source in enumerate(kinds):
        others = {name for other, names in enumerate(composed) if other != number for name in names}
        shared = {names: (len({*names}) == len(names), len(others & {*map(compose, names)})) for names in of_source}
        chosen.append(max(shared, key=lambda names: shared[names], default=None))
    return chosen


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
    names = source.class_names or ()
    first = ", ".join(printable(name, SHOWN_CHARACTERS) for name in names[:SHOWN_NAMES])
    shown = f": {first}{', ...' if len(names) > SHOWN_NAMES else ''}" if names else " without names"
    return (
        f"{len(source):,} images of {source.num_classes:,} {'class' if source.num_classes == 1 else 'classes'}{shown}"
    )
