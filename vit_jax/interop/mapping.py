"""Tables from our parameters to the arrays of another layout, by which files are both read and written."""

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from vit_jax import UserError
from vit_jax.config import Affects, model_fields
from vit_jax.interop.archives import Archive
from vit_jax.model import Model
from vit_jax.models import ModelSpec

READ_THREADS = min(os.cpu_count() or 1, 4)
OTHER_LAYOUT = "use --layout=ours"  # our own layout supports every model
MAX_NAMES = 1000  # the most names in one message
MAX_ELEMENTS = 2**40  # of an array


class Leaf(NamedTuple):
    """An array of the file that holds one of our parameters, or several.

    If several leaves have the same name, the array of that name holds all of them: they are joined along its first
    axis, in the order of the table.
    """

    name: str
    ones: int = 0  # leading dimensions of 1 that the array has and our parameter lacks
    arrange: Callable[[np.ndarray], np.ndarray] | None = None  # our parameter -> a view with the axes of the file


class Stack(NamedTuple):
    """Several arrays of the file that, stacked along an axis, are one of our parameters."""

    axis: int
    parts: list[Any]  # of Leaf or Stack


Part = Leaf | Stack
ParameterTable = dict[str, Part]  # our name -> the arrays of the file
Shapes = dict[str, tuple[int, ...]]


def read_parameters(archive: Archive, table: ParameterTable, shapes: Shapes, prefix: str) -> dict[str, np.ndarray]:
    """Returns our name -> parameter, in float32.

    An array that holds one parameter is read from the file straight to its final place.

    Args:
        archive: the open file, an `archives.Archive`.
        table: the arrays of the file that our parameters consist of.
        shapes: the shapes of our parameters.
        prefix: the prefix of the names in the file, which `table` lacks. Arrays without it are ignored, such as an
            optimizer's state.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type; or the model has no
            parameter for an array that all files of the layout hold; or an array is not finite.
    """
    if absent := [name for name in table if name not in shapes]:
        raise UserError(
            f"every file of this layout holds {absent[0]}, but a model with the given fields has no such parameter; "
            "leave out the field that removes it"
        )
    for name in table:
        if math.prod(shapes[name]) > MAX_ELEMENTS:
            raise UserError(f"the model is too large: {name} would be {list(shapes[name])}")
    zeros = {name: np.broadcast_to(np.float32(0), shapes[name]) for name in table}
    wanted = {name: _joined_shape(views) for name, views in _views(table, zeros, prefix).items()}
    headers = {name: archive[name] for name in archive if name.startswith(prefix)}
    wrong = [f"missing {name}" for name in wanted if name not in headers]
    wrong += [f"unexpected {name}" for name in headers if name not in wanted]
    for name in [name for name in wanted if name in headers]:
        shape = headers[name].shape
        if _without_leading_ones(shape) != _without_leading_ones(wanted[name]):
            wrong.append(f"{name} is {list(shape)}, not {list(wanted[name])}")
        elif not headers[name].is_weights:
            wrong.append(f"{name} is {headers[name].dtype}, not float32")
    if wrong:
        more = f"; and {len(wrong) - MAX_NAMES:,} more" if len(wrong) > MAX_NAMES else ""
        raise UserError("; ".join(wrong[:MAX_NAMES]) + more)
    parameters: dict[str, np.ndarray] = {name: np.empty(shapes[name], np.float32) for name in table}
    views = _views(table, parameters, prefix)

    def read_views(name: str, views: list[np.ndarray]) -> None:
        joined = views[0] if len(views) == 1 else np.empty(_joined_shape(views), np.float32)
        archive.read_array(name, joined)
        check_finite(name, joined)
        if len(views) > 1:
            starts = np.cumsum([len(view) for view in views])[:-1]
            for view, values in zip(views, np.split(joined, starts), strict=True):
                view[...] = values

    with ThreadPoolExecutor(READ_THREADS) as pool:
        list(pool.map(read_views, views.keys(), views.values()))
    return parameters


def check_finite(name: str, array: np.ndarray) -> None:
    """Raises UserError if a value of an array of weights is NaN or infinite; `name` is the array's name in the file."""
    with np.errstate(over="ignore", invalid="ignore"):
        is_finite = np.isfinite(array.sum()) or np.isfinite(array).all()  # the first is fast, but a sum may overflow
    if not is_finite:
        raise UserError(f"{name} contains values that are not finite; the training had failed, or the file is damaged")


def file_views(table: ParameterTable, parameters: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Returns name -> array of the file: a view of one of our parameters, or a copy that joins several of them."""
    views = _views(table, parameters, prefix)
    return {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in views.items()}


def refuse(layout: str, unsupported: Mapping[str, bool]) -> None:
    """Refuses a model that a layout cannot hold.

    Args:
        layout: the name of the layout.
        unsupported: feature that the layout does not support -> whether the model has the feature.

    Raises:
        UserError: the model has any of these features.
    """
    if has := [what for what, present in unsupported.items() if present]:
        raise UserError(f"the {layout} layout does not support {', '.join(has)}; {OTHER_LAYOUT}")


def unstated_fields(stated: Collection[str]) -> dict[str, Any]:
    """Returns field -> default, for the fields that decide a ViT's arrays but that a layout's files do not state.

    The layout can hold only a model with these values. `stated` are the fields that the files state.
    """
    names = {*model_fields(Affects.WEIGHTS), "stem", "block", "head", "distilled_head"} - set(stated)
    return {name: value for name, value in Model("", ModelSpec()).values.items() if name in names}


def unstated_values(spec: ModelSpec, stated: Collection[str]) -> dict[str, bool]:
    """Returns `FIELD VALUE` -> whether the model's value differs from the default, for the `unstated_fields`."""
    value = Model("", spec).field
    return {f"{name} {value(name)}": value(name) != default for name, default in unstated_fields(stated).items()}


def convolutions(stages: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """Yields (stage, unit, suffix of the name) of every convolution of a ResNet; `stages` are the units in each stage.

    Stages and units are counted from 1. The suffix is 1, 2, 3 or, in the first unit of a stage, also `_proj`.
    """
    for stage, units in enumerate(stages, 1):
        for unit in range(1, units + 1):
            yield from ((stage, unit, suffix) for suffix in (("1", "2", "3", "_proj") if unit == 1 else "123"))


def of_blocks(part: Part, blocks: Sequence[str] | str) -> Part:
    """Returns the arrays of all blocks that make up one of our stacked parameters, given the arrays of one block.

    Args:
        part: the arrays of one block, without the block's name. The axis of a `Stack` in it is an axis of the parameter
            of one block.
        blocks: the prefix of the names in each block. A single text is the prefix in a file whose arrays are stacked
            too: their axis 0 is the layers.
    """
    if isinstance(blocks, str):
        return _of_block(part, blocks, layer_axes=1)
    return Stack(0, [_of_block(part, block, layer_axes=0) for block in blocks])


def _of_block(part: Part, block: str, layer_axes: int) -> Part:
    if isinstance(part, Stack):
        return Stack(part.axis + layer_axes, [_of_block(inner, block, layer_axes) for inner in part.parts])
    return part._replace(name=f"{block}{part.name}")


def _views(table: ParameterTable, parameters: Mapping[str, np.ndarray], prefix: str) -> dict[str, list[np.ndarray]]:
    """Returns name in the file -> the views of our parameters that the array of this name consists of."""
    views: dict[str, list[np.ndarray]] = {}
    for ours, part in table.items():
        for name, view in _views_of_part(part, np.asarray(parameters[ours]), prefix):
            views.setdefault(name, []).append(view)
    return views


def _joined_shape(views: list[np.ndarray]) -> tuple[int, ...]:
    first = views[0].shape
    return first if len(views) == 1 else (sum(len(view) for view in views), *first[1:])


def _views_of_part(part: Part, array: np.ndarray, prefix: str) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(part, Stack):
        for inner, view in zip(part.parts, np.moveaxis(array, part.axis, 0), strict=True):
            yield from _views_of_part(inner, view, prefix)
    else:
        arranged = part.arrange(array) if part.arrange else array
        yield prefix + part.name, arranged[(np.newaxis,) * part.ones]


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without leading dimensions of 1, of which old files have more."""
    while shape[:1] == (1,):
        shape = shape[1:]
    return shape
