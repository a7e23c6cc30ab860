"""Text beside images: which class each file is of, and what classes are called in words."""

import collections
import csv
import os
import re
from collections.abc import Collection, Iterable, Sequence

from vit_jax import UserError

Row = tuple[str, str]  # file, class


def is_list(path: str, called: Collection[str] | None = None) -> bool:
    """Returns whether a file is a list of files and classes, by its name; with `called`, one of a split of that name.

    Tiny-ImageNet's is `val_annotations.txt`, ImageNet's `LOC_val_solution.csv`.
    """
    stem, ending = os.path.splitext(path.rpartition("/")[2].lower())
    words = re.findall(r"[a-z0-9]+", stem)
    fits = ending in (".csv", ".tsv") or (ending == ".txt" and words[-1:] == ["annotations"])
    return fits and (called is None or not set(called).isdisjoint(words))


def rows(text: str, name: str) -> list[Row]:
    """Returns the first two columns of a list, which are apart by commas in a .csv, by tabs in any other.

    Raises:
        UserError: a line has one column only.
    """
    lines = text.splitlines()
    try:
        table = [
            cells for cells in csv.reader(lines, delimiter="," if name.lower().endswith(".csv") else "\t") if cells
        ]
    except csv.Error as error:
        raise UserError(f"cannot read {name}: {error}") from error
    if short := [cells for cells in table if len(cells) < 2]:
        raise UserError(f"cannot read {name}: {short[0][0]:.60} is not a line of file and class")
    return [(cells[0].strip(), cells[1].strip()) for cells in table]


def match(
    listed: Sequence[Row], paths: Sequence[str], *, below: str, name: str, left_out: collections.Counter[str]
) -> dict[str, str]:
    """Returns file -> class of those that are both listed and there, and counts those that are not.

    A file is listed by its path below the split's folder or by its name, with or without its ending. The first row is a
    header if there is no such file.

    Args:
        listed: the rows.
        paths: of the images.
        below: the folder that the paths lie in.
        name: of the list, for messages.
        left_out: reason -> files; what is found here is added.

    Raises:
        UserError: none is, a name means several files, or one has two classes.
    """
    places: dict[str, set[str]] = collections.defaultdict(set)
    for path in paths:
        inner = path.removeprefix(f"{below}/")
        for key in (path, inner, inner.rpartition("/")[2]):
            places[key].add(path)
            places[os.path.splitext(key)[0]].add(path)
    classes: dict[str, str] = {}
    for number, (file, label) in enumerate(listed):
        found = places.get(file, set())
        if len(found) > 1:
            raise UserError(f"{file} in {name} may be any of {', '.join(sorted(found)[:3])}: write the path")
        if not found and number:
            left_out[f"of {os.path.basename(name)} but not there"] += 1
        for path in found:
            if classes.setdefault(path, label) != label:
                raise UserError(f"{name} gives {file} two classes, {classes[path]} and {label}")
    if not classes:
        raise UserError(f"none of the {len(listed):,} files that {name} lists is there")
    if unlisted := len(paths) - len(classes):
        left_out[f"not in {os.path.basename(name)}"] += unlisted
    return classes


def in_words(names: tuple[str, ...], texts: Iterable[str]) -> tuple[str, ...]:
    """Returns names of classes in words with their own in brackets, `tench, Tinca tinca [n01440764]`.

    Args:
        names: of the classes.
        texts: lines of name and words, a tab or a space between; the first that knows a name counts. A name that is in
            none stays.
    """
    words: dict[str, str] = {}
    for line in (line for text in texts for line in text.splitlines()):
        name, _, said = line.partition("\t" if "\t" in line else " ")
        said = " ".join(said.encode("utf-8", "replace").decode("utf-8").split())
        if said:
            words.setdefault(name, said)
    return tuple(f"{words[name]} [{name}]" if name in words else name for name in names)
