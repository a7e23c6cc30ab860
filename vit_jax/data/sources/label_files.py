"""Text files beside images: label files, which give each image its class, and names of the classes in words."""

import collections
import csv
import io
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from vit_jax import UserError, user_errors
from vit_jax.data import images
from vit_jax.data.sources.source import compose

# Names of columns, in which only letters and digits count: `File_Name` is filename.
IMAGE_COLUMNS = ("filename", "file", "filepath", "path", "image", "imagename", "imagepath", "imagefile", "img")
ID_COLUMNS = ("imageid", "imgid", "id", "name")  # of images, where no column has one of the names above
CLASS_COLUMNS = ("label", "labels", "class", "classes", "classname", "labelname", "category", "categoryname", "target")
NUMBER_COLUMNS = ("", "unnamed0", "index")
CLASSES_AN_IMAGE = 0.9  # with more, the column is not one of classes


def is_label_file(path: str, split_names: Collection[str] | None = None) -> bool:
    """Returns whether a file is a label file by its name, which must contain one of `split_names` if these are given.

    The label file of Tiny-ImageNet is `val_annotations.txt`; ImageNet's is `LOC_val_solution.csv`.
    """
    stem, suffix = os.path.splitext(path.rpartition("/")[2].lower())
    words = re.findall(r"[a-z0-9]+", stem)
    fits = suffix in (".csv", ".tsv") or (suffix == ".txt" and words[-1:] == ["annotations"])
    return fits and (split_names is None or not set(split_names).isdisjoint(words))


def parse_label_file(text: str, name: str) -> list[list[str]]:
    """Returns the cells of each line of a label file that is not empty.

    Columns are separated by commas in a .csv file and by tabs in others.

    Args:
        text: the content of the file.
        name: the name of the file, which decides about the separator.

    Raises:
        UserError: the text is not of this form.
    """
    lines = csv.reader(io.StringIO(text, newline=""), delimiter="," if name.lower().endswith(".csv") else "\t")
    with user_errors(f"cannot read {name}", csv.Error):
        return [[cell.strip() for cell in cells] for cells in lines if cells]


def normalise(cell: str) -> str:
    """Returns the name of a column as the lists above have it."""
    return re.sub(r"[\W_]+", "", cell.lower())


def choose_columns(header: Sequence[str], files: Collection[int]) -> tuple[int, int] | None:
    """Returns the numbers of the columns of images and of classes, by the names in the first line of a label file.

    A column is one of images or of classes by its name, see `IMAGE_COLUMNS`; of several the first is taken. Without
    such a name, the only column of existing files is that of images. Columns of line numbers, as pandas writes them,
    are left out; if two columns are left, one known name tells the other. Returns None if this does not tell, also
    where the line is no header.

    Args:
        header: the cells of the first line.
        files: the numbers of the columns in which the names of existing files stand.
    """
    words = [*map(normalise, header)]
    left = [number for number, word in enumerate(words) if word not in NUMBER_COLUMNS]

    def first(names: Collection[str], other: int | None = None) -> int | None:
        return next((number for number in left if words[number] in names and number != other), None)

    named = first(IMAGE_COLUMNS)
    image = next(iter(files)) if named is None and len(files) == 1 else named
    image = first(ID_COLUMNS) if image is None else image
    label = first(CLASS_COLUMNS, image)
    if image is not None and label is not None:
        return image, label
    if len(left) != 2 or (image is None and label is None and len(left) == len(words)):
        return None
    image = next(number for number in left if number != label) if image is None else image
    return image, next(number for number in left if number != image)


def check_single_class(table: Sequence[Sequence[str]], columns: tuple[int, int], name: str) -> None:
    """Raises UserError if the class is read from one of several columns of 0 and 1, each of which stands for a class.

    Args:
        table: the cells of the lines below the header.
        columns: the numbers of the columns of images and of classes.
        name: the name of the label file, for messages.
    """
    width = min(map(len, table), default=0)
    flags = [
        number
        for number in range(width)
        if number != columns[0] and {cells[number] for cells in table} <= {"0", "1", "0.0", "1.0"}
    ]
    if columns[1] in flags and len(flags) > 1:
        raise UserError(
            f"{name} has {len(flags)} columns of 0 and 1, so that its classes may have a column each; if an image may "
            f"have several, write ,table={name} after the data source; else write one column label with the name of "
            "the class of each image"
        )


def match_images(
    table: Sequence[Sequence[str]], paths: Sequence[str], *, folder: str, name: str, skipped: collections.Counter[str]
) -> dict[str, str]:
    """Returns path -> class of the images that a label file lists, and counts the other images.

    An image is listed by its path below the split's folder or by its name, with or without its suffix. The first line
    is taken for a header if it lists no existing image. It names the columns of images and classes, see
    `choose_columns`; if these do not tell, they are the first two.

    Args:
        table: the cells of the lines of the label file.
        paths: the paths of the images.
        folder: the folder that contains the images.
        name: the name of the label file, for messages.
        skipped: reason -> number of files skipped; changed in place.

    Raises:
        UserError: no image is listed, a line is too short or fits several images, or an image has two classes.
    """
    by_key: dict[str, set[str]] = collections.defaultdict(set)
    for path in paths:
        inner = path.removeprefix(f"{folder}/")
        for key in (path, inner, inner.rpartition("/")[2]):
            by_key[key].add(path)
            by_key[os.path.splitext(key)[0]].add(path)
    has_header = bool(table) and by_key.keys().isdisjoint(table[0])
    files = {
        number
        for cells in table[1:]
        for number, cell in enumerate(cells)
        if cell in by_key and cell.lower().endswith(images.IMAGE_SUFFIXES)
    }
    columns = (choose_columns(table[0], files) if has_header else None) or (0, 1)
    if short := [cells for cells in table if len(cells) <= max(columns)]:
        raise UserError(
            f"cannot read {name}: the line {short[0][0]:.60} must have at least {max(columns) + 1} columns, with image "
            "and class"
        )
    if not (has_header and normalise(table[0][columns[1]]) in CLASS_COLUMNS):
        check_single_class(table[has_header:], columns, name)
    classes: dict[str, str] = {}
    for number, (key, label) in enumerate((cells[columns[0]], cells[columns[1]]) for cells in table):
        matches = by_key.get(key, set())
        if len(matches) > 1:
            raise UserError(f"{key} in {name} could be any of {', '.join(sorted(matches)[:3])}; write the path")
        if not matches and number:
            skipped[f"listed in {os.path.basename(name)} but missing"] += 1
        for path in matches:
            if classes.setdefault(path, label) != label:
                raise UserError(f"{name} gives {key} two classes, {classes[path]} and {label}")
    if not classes:
        raise UserError(f"none of the {len(table):,} files that {name} lists exists")
    if unlisted := len(paths) - len(classes):
        skipped[f"not listed in {os.path.basename(name)}"] += unlisted
    return classes


def names_its_columns(text: str) -> bool:
    """Returns whether the first line of a label file has a known name for the column of images and for that of classes.

    Its classes are then believed, though each may have one image.
    """
    words = {*map(normalise, re.split("[,\t]", (text.splitlines() or [""])[0]))}
    return not words.isdisjoint(IMAGE_COLUMNS) and not words.isdisjoint(CLASS_COLUMNS)


def check_classes(classes: Mapping[str, str], name: str) -> None:
    """Raises UserError if nearly every image has a class of its own.

    Args:
        classes: image -> class.
        name: the name of the label file, for messages.
    """
    count = len(set(classes.values()))
    if count > CLASSES_AN_IMAGE * len(classes) and len(classes) > 1:
        raise UserError(
            f"{name} gives {len(classes):,} images {count:,} classes, such as {next(iter(classes.values()))!r:.60}, so "
            "the column that was read is not one of classes; write file_name and label above the columns to read"
        )


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
            words.setdefault(compose(name), described)
    return tuple(f"{words[compose(name)]} [{name}]" if compose(name) in words else name for name in names)
