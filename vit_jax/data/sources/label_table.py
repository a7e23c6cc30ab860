"""A CSV file with several answers for each image: a column of 0 and 1 for each class, lists of classes, or numbers.

The first line names the columns. One of them is the path of the image, relative to the folder of the images, with or
without its suffix. Columns are separated by commas, in a .tsv file by tabs.
"""

import csv
import io
import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from vit_jax import UserError, choose, first_names, printable, user_errors
from vit_jax.data.sources.label_files import CLASS_COLUMNS, ID_COLUMNS, IMAGE_COLUMNS, NUMBER_COLUMNS, normalise
from vit_jax.data.sources.parquet import read_class_names
from vit_jax.data.sources.source import compose
from vit_jax.storage import filesystem

# Word of `,separator=` -> what stands between two classes of a list.
SEPARATORS = {"comma": ",", "semicolon": ";", "pipe": "|", "space": " ", "slash": "/"}
OPTIONS = ("table", "image", "label", "separator", "classes", "targets")
PLUS = "+"  # between two columns of `,label=` and `,targets=`


class LabelTable(NamedTuple):
    """The answers that a file gives for images.

    Attributes:
        names: the names of the classes in the order of the labels, or of the numbers.
        lines: path of an image as the file has it, accents composed -> the line of the file.
        answers: path -> the labels of its classes, in ascending order, or its numbers.
        has_numbers: whether the answers are numbers.
    """

    names: tuple[str, ...]
    lines: Mapping[str, int]
    answers: Mapping[str, Sequence[int] | Sequence[float]]
    has_numbers: bool

    @property
    def max_labels(self) -> int | None:
        """The most classes of an image, at least 1; None: the answers are numbers."""
        return None if self.has_numbers else max([1, *map(len, self.answers.values())])

    def rows(self, paths: Sequence[str | None]) -> Int32[np.ndarray, "n max_labels"] | Float32[np.ndarray, "n targets"]:
        """Returns the answers for images, given by their paths in `lines`; None: there is no answer.

        Classes are padded with -1. Where there is no answer, numbers are NaN.
        """
        if self.has_numbers:
            unknown = [np.nan] * len(self.names)
            return np.array([self.answers[path] if path else unknown for path in paths], np.float32).reshape(
                len(paths), len(self.names)
            )
        labels: Int32[np.ndarray, "n max_labels"] = np.full((len(paths), self.max_labels or 1), -1, np.int32)
        for row, path in zip(labels, paths, strict=True):
            own = self.answers[path] if path else ()
            row[: len(own)] = own
        return labels

    def find(self, images: Sequence[str], file: str, folder: str) -> dict[str, str]:
        """Returns image -> its path in the file, for the images that the file lists.

        Args:
            images: the paths of all images of the folder, relative to it.
            file: the name of the file, for messages.
            folder: the folder, for messages.

        Raises:
            UserError: the file lists an image that the folder lacks, or twice, or a path without its suffix could be
                one of several images.
        """
        exact, stems = dict[str, str](), dict[str, list[str]]()
        for image in images:
            key = compose(image)
            exact[key] = image
            stems.setdefault(os.path.splitext(key)[0], []).append(image)
        found = dict[str, str]()
        for path, line in self.lines.items():
            several = [exact[path]] if path in exact else stems.get(path, [])
            if not several:
                raise UserError(
                    f"there is no image {printable(path, 100)} in {folder}, which line {line} of {file} names; paths "
                    "are relative to that folder"
                )
            if len(several) > 1:
                raise UserError(f"line {line} of {file} could be any of {first_names(several)}; write the suffix")
            if several[0] in found:
                again = self.lines[found[several[0]]]
                raise UserError(f"lines {again} and {line} of {file} are of the same image, {printable(path, 100)}")
            found[several[0]] = path
        return found


def read_label_table(options: Mapping[str, str]) -> LabelTable:
    """Reads the file that the options of a data source name.

    Args:
        options: `table`, the file; `image`, its column of images; and what the answers are: with `targets`, numbers in
            these columns; with `separator`, lists of classes in the column `label`, of which `classes` is a file with
            the names, one a line; with neither, 0 and 1 in the columns `label`, or in all others.

    Raises:
        UserError: an option, a column, a line or a cell is wrong; the message names the line.
    """
    file = options["table"]
    if "targets" in options and options.keys() & {"label", "separator", "classes"}:
        raise UserError("targets= names columns of numbers; leave out label=, separator= and classes= beside it")
    if "classes" in options and "separator" not in options:
        raise UserError("classes= names the classes of lists, which need separator=; columns of 0 and 1 name their own")
    text = filesystem.read_bytes(file).decode("utf-8-sig", "surrogateescape")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if file.lower().endswith(".tsv") else ",")
    with user_errors(f"cannot read {file}", csv.Error):
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(map(str.strip, cells))]
    if len(lines) < 2:
        raise UserError(f"cannot read {file}: it needs a line that names its columns, and a line for each image")
    header = lines.pop(0)[1]
    if repeated := [name for number, name in enumerate(header) if name in header[:number]]:
        raise UserError(f"cannot read {file}: it has two columns {printable(repeated[0], 40)!r}; rename one of them")
    image = find_image_column(header, options.get("image"), file)
    others = [name for name in header if name != header[image] and normalise(name) not in NUMBER_COLUMNS]
    numbers = {name: header.index(name) for name in others}
    rows = dict[str, tuple[int, list[str]]]()
    for line, cells in lines:
        if len(cells) != len(header):
            raise UserError(
                f"cannot read {file}: line {line} has {len(cells)} cells, but there are {len(header)} columns"
            )
        path = compose(posixpath.normpath(cells[image])) if cells[image] else ""
        if not path:
            raise UserError(f"cannot read {file}: line {line} names no image")
        if path in rows:
            raise UserError(f"lines {rows[path][0]} and {line} of {file} are of the same image, {printable(path, 100)}")
        rows[path] = line, cells
    stated = options.get("targets", options.get("label"))
    columns = stated.split(PLUS) if stated else others
    if repeated := [name for number, name in enumerate(columns) if name in columns[:number]]:
        raise UserError(f"the data source names the column {repeated[0]!r} twice; name it once")
    if missing := [name for name in columns if name not in numbers]:
        raise UserError(f"{file} has no column {missing[0]!r}; choose from {first_names(others)}")
    read: Callable[[int, list[str]], Sequence[int] | Sequence[float]]
    if "separator" in options:
        column = columns[0] if len(columns) == 1 else find_class_column(columns, file, bool(stated))
        names, read = lists_of_classes(rows, numbers[column], options, file)
    else:
        parse, names = (parse_number if "targets" in options else parse_flag), tuple(columns)
        if not names:
            raise UserError(f"{file} has no column beside that of the images, {header[image]!r}")

        def read_columns(line: int, cells: list[str]) -> Sequence[int] | Sequence[float]:
            values = [parse(cells[numbers[name]], f"line {line} of {file}, column {name}") for name in names]
            return values if "targets" in options else [label for label, value in enumerate(values) if value]

        read = read_columns
    answers = {path: read(line, cells) for path, (line, cells) in rows.items()}
    return LabelTable(names, {path: line for path, (line, _) in rows.items()}, answers, "targets" in options)


def find_image_column(header: Sequence[str], stated: str | None, file: str) -> int:
    """Returns the number of the column with the paths of the images; raises UserError if there is none."""
    if stated is not None:
        if stated not in header:
            raise UserError(f"{file} has no column {stated!r}; choose from {first_names(header)}")
        return header.index(stated)
    words = [*map(normalise, header)]
    known = [words.index(name) for name in (*IMAGE_COLUMNS, *ID_COLUMNS) if name in words]
    if not known:
        raise UserError(
            f"the first line of {file} must name the column of the images image, file_name or path; or write "
            ",image=COLUMN after the data source"
        )
    return known[0]


def find_class_column(columns: Sequence[str], file: str, is_stated: bool) -> str:
    """Returns the column of lists of classes among several columns; raises UserError if none is known to be it."""
    known = [] if is_stated else [name for name in columns if normalise(name) in CLASS_COLUMNS]
    if len(known) != 1:
        raise UserError(f"say which column of {file} has the lists of classes: ,label=COLUMN after the data source")
    return known[0]


def lists_of_classes(
    rows: Mapping[str, tuple[int, list[str]]], column: int, options: Mapping[str, str], file: str
) -> tuple[tuple[str, ...], Callable[[int, list[str]], Sequence[int]]]:
    """Returns the names of the classes, and the function (line, cells) -> sorted labels, of a column of lists.

    Raises:
        UserError: the separator is unknown, a list names a class twice, or one that the file of classes lacks.
    """
    word = options["separator"]
    between = word if word in SEPARATORS.values() else SEPARATORS[choose("separator", word, SEPARATORS)]
    lists = dict[int, list[str]]()
    for line, cells in rows.values():
        lists[line] = [compose(name.strip()) for name in cells[column].split(between) if name.strip()]
        if repeated := [name for number, name in enumerate(lists[line]) if name in lists[line][:number]]:
            raise UserError(f"line {line} of {file} names the class {printable(repeated[0], 40)!r} twice")
    if path := options.get("classes"):
        names = tuple(map(compose, read_class_names(path)))
    else:
        names = tuple(sorted({name for of_line in lists.values() for name in of_line}))
    if not names:
        raise UserError(f"no line of {file} names a class")
    numbers = {name: number for number, name in enumerate(names)}
    if path:
        for line, of_line in lists.items():
            if unknown := [name for name in of_line if name not in numbers]:
                raise UserError(f"line {line} of {file} has the class {unknown[0]!r}, which {path} does not name")
    return names, lambda line, cells: sorted(numbers[name] for name in lists[line])


def parse_flag(cell: str, where: str) -> int:
    """Returns 1 or 0; raises UserError if the cell is neither."""
    if cell not in ("0", "1", "0.0", "1.0"):
        raise UserError(
            f"{where}: {printable(cell, 40)!r} is neither 0 nor 1; choose columns with ,label=COLUMN+COLUMN after the "
            "data source, or write ,separator=semicolon for lists of classes, ,targets=COLUMN for numbers"
        )
    return int(float(cell))


def parse_number(cell: str, where: str) -> float:
    """Returns a finite number; raises UserError if the cell is none."""
    try:
        number = float(cell.replace("_", "?"))
    except ValueError:
        number = np.nan
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise UserError(
            f"{where}: {printable(cell, 40)!r} is not a finite number; write one, or remove the line and its image"
        )
    return number
