"""The names of classes, compared between sources.

A source may name its classes in words and by ids, such as WordNet's. Names are the same if they are in one Unicode
form: "é" may be one character or two, and file systems differ in what they make of it.
"""

import itertools
import unicodedata

from vit_jax import printable
from vit_jax.data.sources.source import Source

SHOWN_NAMES, SHOWN_CHARACTERS = 5, 40  # of the first classes, in the lines that a run prints


def compose(name: str) -> str:
    """Returns a name with its accents composed (NFC), in which names are compared."""
    return unicodedata.normalize("NFC", name)


def kinds_of_names(source: Source) -> list[tuple[str, ...]]:
    """Returns the names of the classes in words and by ids, composed; only those that the source has."""
    return [tuple(map(compose, names)) for names in (source.class_names, source.class_ids) if names]


def have_same_classes(one: Source, other: Source) -> bool:
    """Returns whether two sources have equally many classes, and equal names of them in equal order, or both none."""
    pairs = list(itertools.product(kinds_of_names(one), kinds_of_names(other)))
    named = bool(one.class_names or other.class_names)
    return one.num_classes == other.num_classes and (any(own == theirs for own, theirs in pairs) or not named)


def describe_classes(source: Source) -> str:
    """Returns the number of images and of classes of a split, and the names of the first classes, as one line."""
    names = source.class_names or ()
    first = ", ".join(printable(name, SHOWN_CHARACTERS) for name in names[:SHOWN_NAMES])
    shown = f": {first}{', ...' if len(names) > SHOWN_NAMES else ''}" if names else " without names"
    return (
        f"{len(source):,} images of {source.num_classes:,} {'class' if source.num_classes == 1 else 'classes'}{shown}"
    )
