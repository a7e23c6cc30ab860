"""The choice of some of a data set's classes on a command line."""

import re
from collections.abc import Sequence

from vit_jax import UserError, choose
from vit_jax.data.sources import compose

MAX_LISTED = 20  # names of classes in a message


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
