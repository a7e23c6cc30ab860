"""Some of a data set's classes, as a command line lists them."""

import re
from collections.abc import Sequence

from vit_jax import UserError, choose

MANY = 20  # names that are too many for a sentence


def parse(text: str, names: Sequence[str] | None, total: int, where: str) -> list[int]:
    """Returns the numbers of the classes that a text lists, in its order.

    Args:
        text: names, numbers and ranges of numbers, both ends included: `cat,dog` or `3,0-1`. What is the name of a
            class is that class, even if it is a number.
        names: of all classes, or None.
        total: how many there are.
        where: they are, for messages.

    Raises:
        UserError: there is no such class, or one is listed twice.
    """
    numbers: list[int] = []
    known = list(names or [])
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if word in known:
            found = [known.index(word)]
        elif match:
            first, last = int(match[1]), int(match[2] or match[1])
            if not first <= last < total:
                raise UserError(f"{where} has no classes {word}: they are 0 to {total - 1}, and 0-1 are the first two")
            found = list(range(first, last + 1))
        elif not known:
            raise UserError(f"the classes of {where} have no names: write numbers in place of {word!r}, as in 0-4")
        else:
            choose("class", word, known, where=where if len(known) > MANY else "")
        for number in found:
            if number in numbers:
                raise UserError(f"class {known[number] if known else number} is listed twice in {text}")
            numbers.append(number)
    return numbers
