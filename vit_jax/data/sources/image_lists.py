"""Lists of images that a user keeps beside the data: those to leave out, and the group of each image.

A list names an image by its path below the folder of the images; for its group also, as label files may, by the end of
this path, with or without its suffix. Other data have no paths: `train/17` is image 17 of the split train, counted from
0. This holds for data in shards too, where images may have names, but only within the shards.
"""

import collections
import os
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vit_jax import UserError, first_names
from vit_jax.data.sources.label_files import ID_COLUMNS, IMAGE_COLUMNS, normalise, parse_label_file
from vit_jax.data.sources.source import Source
from vit_jax.data.sources.splits import canonical_name, row_indices
from vit_jax.storage import filesystem

GROUP_COLUMNS = ("group", "groups", "groupid")
POSITION = re.compile(r"(?P<split>[\w-]+)/(?P<row>\d{1,18})")
Place = tuple[str, int]  # whole split, index in it


class ImageNames:
    """Finds the images of a source by their names in a list."""

    def __init__(self, source: Source, field: str):
        """Takes the source, and the field that names the list.

        Raises:
            UserError: the images of the source can have no names in a list.
        """
        if not source.sizes:
            raise UserError(f"{field} needs images that a list can name, which {source.name} does not have")
        self.sizes = {canonical_name(split): size for split, size in source.sizes.items()}
        read_name = None if source.shards else source.read_name
        self.by_path = (
            {read_name(split, row): (split, row) for split, size in self.sizes.items() for row in range(size)}
            if read_name
            else {}
        )
        self._by_end = dict[str, set[str]]()

    def find(self, name: str) -> Place | None:
        """Returns the place of the image of a name, which is its whole path or its position; None: there is none."""
        if not self.by_path:
            match = POSITION.fullmatch(name)
            split, row = (canonical_name(match["split"]), int(match["row"])) if match else ("", 0)
            return (split, row) if row < self.sizes.get(split, 0) else None
        return self.by_path.get(name)

    def find_by_end(self, name: str, path: str) -> Place | None:
        """Returns the place of the image that a list names, also by the end of its path; None: there is none.

        Args:
            name: the name in the list.
            path: the path of the list, for messages.

        Raises:
            UserError: several images may be meant.
        """
        if (place := self.find(name)) or not self.by_path:
            return place
        if not self._by_end:
            self._by_end = collections.defaultdict(set)
            for whole in self.by_path:
                parts = whole.split("/")
                for start in range(len(parts)):
                    end = "/".join(parts[start:])
                    self._by_end[end].add(whole)
                    self._by_end[os.path.splitext(end)[0]].add(whole)
        matches = self._by_end.get(name, set())
        if len(matches) > 1:
            raise UserError(f"{name} in {path} could be any of {', '.join(sorted(matches)[:3])}; write the path")
        return self.by_path[next(iter(matches))] if matches else None


def leave_out(source: Source, path: str, list_splits: Callable[[], Sequence[str]]) -> Source:
    """Returns the images of a source that a list does not name.

    Args:
        source: the images.
        path: the list, a text with the name of an image in each line, or a table with a column for it, see
            `read_table`. Other columns say nothing here. What it lists of splits that are not opened is not looked for.
        list_splits: returns the names of all whole splits of the data.

    Raises:
        UserError: the list cannot be read or names an image that does not exist, or no image is left.
    """
    header, rows = read_table(path)
    column = image_column(header) if header else 0
    names, listed = ImageNames(source, "data.exclude"), collections.defaultdict[str, set[int]](set)
    missing = list[str]()
    for name in dict.fromkeys(cells[column] for cells in rows):
        if place := names.find(name):
            listed[place[0]].add(place[1])
        else:
            missing.append(name)
    if missing:
        others = {*map(canonical_name, list_splits())} - names.sizes.keys()
        missing = [name for name in missing if canonical_name(name.partition("/")[0]) not in others]
    if missing:
        kind = "paths as in the data" if names.by_path else "positions such as train/0"
        raise UserError(
            f"{path} lists images that the data do not have ({len(missing):,} in all): {first_names(missing)}; write "
            f"{kind}"
        )
    kept = [
        ~np.isin(row_indices(rows), np.fromiter(listed.get(canonical_name(split), ()), np.int64))
        for split, rows in source.parts
    ]
    indices = np.flatnonzero(np.concatenate(kept))
    if not len(indices):
        raise UserError(f"{path} lists all {len(source):,} images of the split; leave some")
    return source if len(indices) == len(source) else source.pick(indices)


def read_groups(source: Source, path: str, column: str | None) -> dict[Place, str]:
    """Returns the groups of the images of the whole splits of a source; images that the list does not name are absent.

    Args:
        source: the images.
        path: the list, a table with a line above it that names its columns, see `read_table`.
        column: the name of the column with the groups; None: it is `group`, or the only one beside that of images.

    Raises:
        UserError: the list cannot be read or has no such column, or gives an image two groups.
    """
    header, rows = read_table(path)
    if not header:
        raise UserError(f"{path} needs a first line that names its columns, such as image,group")
    at, image = group_column(header, column, path), image_column(header)
    names, group_of = ImageNames(source, "data.groups"), dict[Place, str]()
    for cells in rows:
        place = names.find_by_end(cells[image], path)
        if place and group_of.setdefault(place, cells[at]) != cells[at]:
            raise UserError(f"{path} gives {cells[image]} two groups, {group_of[place]} and {cells[at]}")
    return {place: group for place, group in group_of.items() if group}


def groups_of(source: Source, stated: Mapping[Place, str]) -> list[str | None]:
    """Returns the group of each image of a source, or None where `read_groups` has found none."""
    return [stated.get((canonical_name(split), row)) for split, rows in source.parts for row in rows]


def read_table(path: str) -> tuple[list[str], list[list[str]]]:
    """Returns the names of the columns of a list, or [] without them, and the cells of its lines.

    Columns are separated by commas in a .csv file and by tabs in others. The first line names the columns if one of
    them is a usual name for images, as in label files.

    Raises:
        UserError: the file cannot be read, or a line has not as many columns as the first.
    """
    text = filesystem.read_bytes(filesystem.absolute_path(path)).decode("utf-8-sig", "surrogateescape")
    table = parse_label_file(text, path)
    if wrong := [cells for cells in table if len(cells) != len(table[0])]:
        raise UserError(
            f"cannot read {path}: the line {wrong[0][0]:.60} has {len(wrong[0])} columns, the first {len(table[0])}"
        )
    has_header = bool(table) and not {*map(normalise, table[0])}.isdisjoint((*IMAGE_COLUMNS, *ID_COLUMNS))
    return (table[0], table[1:]) if has_header else ([], table)


def image_column(header: Sequence[str]) -> int:
    """Returns the number of the column of images; one of them has a usual name, see `read_table`."""
    words = [*map(normalise, header)]
    return next(words.index(name) for name in (*IMAGE_COLUMNS, *ID_COLUMNS) if name in words)


def group_column(header: Sequence[str], column: str | None, path: str) -> int:
    """Returns the number of the column with the groups; see `read_groups`."""
    others = [number for number in range(len(header)) if number != image_column(header)]
    if column is not None and column in header:
        return header.index(column)
    named = [number for number in others if normalise(header[number]) in GROUP_COLUMNS]
    if column is None and (named or len(others) == 1):
        return (named or others)[0]
    what = "group" if column is None else column
    raise UserError(f"{path} has no column {what}, but {', '.join(header)}; set data.group_column to one of these")
