"""Tables from our parameters to the arrays of another layout, by which files are both read and written."""

import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from vit_jax import UserError
from vit_jax.interop.archives import Archive

READ_THREADS = min(os.cpu_count() or 1, 4)
MAX_NAMES = 1000  # in one message
MAX_ELEMENTS = 2**40  # of an array


class Leaf(NamedTuple):
    """One array of the file that is one of ours, with `ones` leading dimensions of 1 that ours lacks."""

    name: str
    ones: int = 0


class Stack(NamedTuple):
    """Several arrays of the file that are one of ours, stacked along an axis."""

    axis: int
    parts: list[Any]  # of Leaf or Stack


Part = Leaf | Stack
ParameterTable = dict[str, Part]  # our name -> the arrays of the file
Shapes = dict[str, tuple[int, ...]]


def read_parameters(archive: Archive, table: ParameterTable, shapes: Shapes, prefix: str) -> dict[str, np.ndarray]:
    """Returns our parameters by name, in float32. Each value is copied once, from the file to its final place.

    Args:
        archive: the file.
        table: the arrays of the file that our parameters consist of.
        shapes: of our parameters.
        prefix: of all names in the file; arrays without it (an optimizer's state) are ignored.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    wanted: dict[str, np.ndarray] = {}
    for name, part in table.items():
        if math.prod(shapes[name]) > MAX_ELEMENTS:
            raise UserError(f"the model is too large: {name} would be {list(shapes[name])}")
        wanted |= dict(_views_of_part(part, np.broadcast_to(np.float32(0), shapes[name]), prefix))
    found = {name: archive[name] for name in archive if name.startswith(prefix)}
    wrong = [f"missing {name}" for name in wanted if name not in found]
    wrong += [f"unexpected {name}" for name in found if name not in wanted]
    for name in [name for name in wanted if name in found]:
        shape = found[name].shape
        if _without_leading_ones(shape) != _without_leading_ones(wanted[name].shape):
            wrong.append(f"{name} is {list(shape)}, not {list(wanted[name].shape)}")
        elif not found[name].is_weights:
            wrong.append(f"{name} is {found[name].dtype}, not float32")
    if wrong:
        more = f"; and {len(wrong) - MAX_NAMES:,} more" if len(wrong) > MAX_NAMES else ""
        raise UserError("; ".join(wrong[:MAX_NAMES]) + more)
    parameters: dict[str, np.ndarray] = {name: np.empty(shapes[name], np.float32) for name in table}
    views = file_views(table, parameters, prefix)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        list(pool.map(archive.read_array, views.keys(), views.values()))
    return parameters


def file_views(table: ParameterTable, parameters: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Returns the arrays of the file by name, as views of our parameters."""
    parts = ((part, np.asarray(parameters[ours])) for ours, part in table.items())
    return {name: view for part, array in parts for name, view in _views_of_part(part, array, prefix)}


def _views_of_part(part: Part, array: np.ndarray, prefix: str) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(part, Stack):
        for inner, view in zip(part.parts, np.moveaxis(array, part.axis, 0), strict=True):
            yield from _views_of_part(inner, view, prefix)
    else:
        yield prefix + part.name, array[(np.newaxis,) * part.ones]


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without leading dimensions of 1, of which old files have more."""
    while shape[:1] == (1,):
        shape = shape[1:]
    return shape
