"""Where the values of our arrays lie in a file of another layout: read and written by the same table."""

import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from vit_jax import UserError
from vit_jax.interop.npz import Archive

READERS = min(os.cpu_count() or 1, 4)  # threads
MOST = 1000  # names in one message
LARGEST = 2**40  # elements of an array: no file holds more


class Leaf(NamedTuple):
    """An array of theirs; `ones` dimensions of 1 stand before ours."""

    name: str
    ones: int = 0


class Stack(NamedTuple):
    """Arrays of theirs that are one of ours, side by side along an axis."""

    axis: int
    parts: list[Any]  # of Leaf or Stack


Part = Leaf | Stack
Table = dict[str, Part]  # our name -> where its values lie
Shapes = dict[str, tuple[int, ...]]


def read(archive: Archive, table: Table, shapes: Shapes, prefix: str) -> dict[str, np.ndarray]:
    """Returns our arrays by name, in float32. Each value is copied once, from the file to where it stays.

    Args:
        archive: the file.
        table: where the values lie.
        shapes: of our arrays.
        prefix: of all names of theirs; what lies beside it (an optimizer's state) is left alone.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    wanted: dict[str, np.ndarray] = {}
    for name, part in table.items():
        if math.prod(shapes[name]) > LARGEST:
            raise UserError(f"no model is so large: {name} would be {list(shapes[name])}")
        wanted |= dict(pieces(part, np.broadcast_to(np.float32(0), shapes[name]), prefix))
    found = {name: archive[name] for name in archive if name.startswith(prefix)}
    wrong = [f"missing {name}" for name in wanted if name not in found]
    wrong += [f"unexpected {name}" for name in found if name not in wanted]
    for name in [name for name in wanted if name in found]:
        shape = found[name].shape
        if _bare(shape) != _bare(wanted[name].shape):
            wrong.append(f"{name} is {list(shape)}, not {list(wanted[name].shape)}")
        elif not found[name].is_weights:
            wrong.append(f"{name} is {found[name].dtype}, not float32")
    if wrong:
        more = f"; and {len(wrong) - MOST:,} more" if len(wrong) > MOST else ""
        raise UserError("; ".join(wrong[:MOST]) + more)
    arrays: dict[str, np.ndarray] = {name: np.empty(shapes[name], np.float32) for name in table}
    parts = split(table, arrays, prefix)
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(archive.read, parts.keys(), parts.values()))
    return arrays


def pieces(part: Part, array: np.ndarray, prefix: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields their names, and the views of an array of ours that are their values."""
    if isinstance(part, Stack):
        for one, view in zip(part.parts, np.moveaxis(array, part.axis, 0), strict=True):
            yield from pieces(one, view, prefix)
    else:
        yield prefix + part.name, array[(np.newaxis,) * part.ones]


def split(table: Table, arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Returns arrays of theirs by name: views of ours."""
    return {name: view for ours, part in table.items() for name, view in pieces(part, arrays[ours], prefix)}


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without dimensions of 1 before it: old files have more of them."""
    while shape[:1] == (1,):
        shape = shape[1:]
    return shape
