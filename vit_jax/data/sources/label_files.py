"""Text files beside images: label files, which give each image its class, and names of the classes in words."""

import collections
import csv
import os
import re
from collections.abc import Collection, Iterable, Sequence

from vit_jax import UserError, user_errors

LabelLine = tuple[str, str]  # image, class


def is_label_file(path: str, split_names: Collection[str] | None = None) -> bool:
    """Returns whether a file is a label file by its name, which must contain one of `split_names` if these are given.

    The label file of Tiny-ImageNet is `val_annotations.txt`; ImageNet's is `LOC_val_solution.csv`.
    """
    stem, suffix = os.path.splitext(path.rpartition("/")[2].lower())
    words = re.findall(r"[a-z0-9]+", stem)
    fits = suffix in (".csv", ".tsv") or (suffix == ".txt" and words[-1:] == ["annotations"])
    return fits and (split_names is None or not set(split_names).isdisjoint(words))


def parse_label_file(text: str, name: str) -> list[LabelLine]:
    """Returns the first two columns of a label file: (image, class) of each line that is not empty.

    Columns are separated by commas in a .csv file and by tabs in others.

    Args:
        text: the content of the file.
        name: the name of the file, which decides about the separator.

    Raises:
        UserError: a line has only one column.
    """
    lines = csv.reader(text.splitlines(), delimiter="," if name.lower().endswith(".csv") else "\t")
    with user_errors(f"cannot read {name}", csv.Error):
        table = list(filter(None, lines))
    if short := [cells for cells in table if len(cells) < 2]:
        raise UserError(
            f"cannot read {name}: the line {short[0][0]:.60} must have at least two columns, image and class"
        )
    return [(cells[0].strip(), cells[1].strip()) for cells in table]


def match_images(
    rows: Sequence[LabelLine], paths: Sequence[str], *, folder: str, name: str, skipped: collections.Counter[str]
) -> dict[str, str]:
    """Returns path -> class of the images that a label file lists, and counts the other images.

    An image is listed by its path below the split's folder or by its name, with or without its suffix. The first row
    is taken for a header if it lists no existing image.

    Args:
        rows: the rows of the label file.
        paths: the paths of the images.
        folder: the folder that contains the images.
        name: the name of the label file, for messages.
        skipped: reason -> number of files skipped; changed in place.

    Raises:
        UserError: no image is listed, a row fits several images, or an image has two classes.
    """
    by_key: dict[str, set[str]] = collections.defaultdict(set)
    for path in paths:
        inner = path.removeprefix(f"{folder}/")
        for key in (path, inner, inner.rpartition("/")[2]):
            by_key[key].add(path)
            by_key[os.path.splitext(key)[0]].add(path)
    classes: dict[str, str] = {}
    for number, (key, label) in enumerate(rows):
        matches = by_key.get(key, set())
        if len(matches) > 1:
            raise UserError(f"{key} in {name} could be any of {', '.join(sorted(matches)[:3])}; write the path")
        if not matches and number:
            skipped[f"listed in {os.path.basename(name)} but missing"] += 1
        for path in matches:
            if classes.setdefault(path, label) != label:
                raise UserError(f"{name} gives {key} two classes, {classes[path]} and {label}")
    if not classes:
        raise UserError(f"none of the {len(rows):,} files that {name} lists exists")
    if unlisted := len(paths) - len(classes):
        skipped[f"not listed in {os.path.basename(name)}"] += unlisted
    return classes


def names_in_words(names: tuple[str, ...], texts: Iterable[str]) -> tuple[str, ...]:
    """Returns names of classes in words, with the original names in brackets: `tench, Tinca tinca [n01440764]`.

    Args:
        names: the names of the classes.
        texts: files with lines of a name and its words, separated by a tab or a space. The first line for a name
            counts; a name without a line stays as it is.
    """
    words: dict[str, str] = {}
    for line in (line for text in texts for line in text.splitlines()):
        name, _, described = line.partition("\t" if "\t" in line else " ")
        described = " ".join(described.encode("utf-8", "replace").decode("utf-8").split())
        if described:
            words.setdefault(name, described)
    return tuple(f"{words[name]} [{name}]" if name in words else name for name in names)
