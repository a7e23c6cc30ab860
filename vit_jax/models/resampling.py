"""Weights resampled for another resolution or patch size: position tables and the kernel that projects patches."""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Array, Float

from vit_jax import UserError, choose


def linear_matrix(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of the authors' interpolation, `scipy.ndimage.zoom(order=1)`.

    The centres of the outermost patches keep their places (align-corners), and nothing is smoothed before shrinking.
    """
    source = np.arange(new) * (old - 1) / max(new - 1, 1)
    return np.maximum(0, 1 - np.abs(source[:, None] - np.arange(old)))


def bicubic_matrix(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of timm's interpolation: PyTorch's bicubic with `antialias=True`, which is Keys'
    cubic with a = -1/2.
    """
    x = _distances(old, new)
    near, far = (1.5 * x - 2.5) * x**2 + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    return _rows_of_sum_1(np.where(x < 1, near, np.where(x < 2, far, 0)))


def bicubic_no_antialias_matrix(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of transformers' interpolation: PyTorch's bicubic without antialias, which is Keys'
    cubic with a = -3/4: four neighbours for each sample, half-pixel centres, the edges repeated.
    """
    places = (np.arange(new) + 0.5) * old / new - 0.5
    matrix = np.zeros((new, old))
    for neighbour in range(-1, 3):
        columns = np.floor(places).astype(int) + neighbour
        x = np.abs(places - columns)
        near, far = (1.25 * x - 2.25) * x**2 + 1, ((3.75 - 0.75 * x) * x - 6) * x + 3
        np.add.at(matrix, (np.arange(new), np.clip(columns, 0, old - 1)), np.where(x < 1, near, far))
    return matrix


def geometric_matrix(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of BEiT's interpolation of biases, as timm computes it: linear, between offsets
    whose distances grow geometrically from 1, so that the farthest old offset is about the farthest new one.

    Raises:
        UserError: these are not numbers of offsets of a relative_bias.
    """
    if not (old % 2 and new % 2):
        raise UserError("the method geometric resamples tables of position=relative_bias only; choose another method.")
    powers = np.arange(old // 2)
    low, high = 1.01, 1.5  # the ratio of the distances is found between these
    while high - low > 1e-6:
        ratio = (low + high) / 2
        low, high = (low, ratio) if (ratio**powers).sum() > new // 2 else (ratio, high)
    distances = np.cumsum(ratio**powers)
    places = np.concatenate([-distances[::-1], [0], distances])
    wanted: np.ndarray = np.arange(new) - new // 2
    return np.stack([np.interp(wanted, places, one) for one in np.eye(old)], axis=1)


def flexi_matrix(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of FlexiViT's interpolation: `jax.image.resize(method="linear")`, which smooths
    before it shrinks.
    """
    return _rows_of_sum_1(np.maximum(0, 1 - _distances(old, new)))


def bilinear_matrix(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] matrix of `tf.image.resize`, bilinear without antialias: two neighbours for each sample,
    half-pixel centres, the edges repeated.
    """
    places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(old)))


def _distances(old: int, new: int) -> np.ndarray:
    """Returns the distance of each new centre from each old one, [new, old].

    The unit is the step of the old grid, or that of the new grid if the grid shrinks. The outermost edges keep their
    places (half-pixel centres).
    """
    centres = (np.arange(new) + 0.5) * old / new
    return np.abs(np.arange(old) + 0.5 - centres[:, None]) / max(old / new, 1)


def _rows_of_sum_1(matrix: np.ndarray) -> np.ndarray:
    """Returns the matrix with each row divided by its sum, as rows near the edges lack a part of their weights."""
    return matrix / matrix.sum(axis=1, keepdims=True)


RESAMPLINGS = {
    "linear": linear_matrix,
    "bicubic": bicubic_matrix,
    "bicubic_no_antialias": bicubic_no_antialias_matrix,
    "flexi": flexi_matrix,
    "bilinear": bilinear_matrix,
    "geometric": geometric_matrix,
}
Table: TypeAlias = Float[np.ndarray, "rows channels"]
NewTable: TypeAlias = Float[np.ndarray, "new_rows channels"]


def resample_positions(
    position: Float[Array | np.ndarray, "tokens width"],
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    class_rows: int,
    method: str = "linear",
) -> Float[np.ndarray, "new_tokens width"]:
    """Returns a position table for another grid of patches (section 3.2). Class rows are unchanged.

    Args:
        position: class rows, then one row per patch in raster order.
        old_grid: (rows, columns) of patches in `position`.
        new_grid: (rows, columns) of patches in the result.
        class_rows: the number of rows at the start that belong to no patch.
        method: linear, as published; bicubic, as in timm; bicubic_no_antialias, as in transformers; flexi, as in
            FlexiViT; or bilinear, as in transformers' BEiT.

    Raises:
        ValueError: the table does not have `class_rows + rows * columns` rows.
        UserError: the method is unknown.
    """
    make_matrix = RESAMPLINGS[choose("method of resampling", method, RESAMPLINGS)]
    table = np.asarray(position)
    if len(table) != class_rows + old_grid[0] * old_grid[1]:
        raise ValueError(f"{len(table)} rows are not {class_rows} class rows and a grid of {old_grid}")
    if old_grid == new_grid:
        return table
    patches = table[class_rows:].reshape(*old_grid, -1).astype(np.float64)
    down, across = (make_matrix(old, new) for old, new in zip(old_grid, new_grid, strict=True))
    patches = np.einsum("yr,xc,rcd->yxd", down, across, patches, optimize=True)
    return np.concatenate([table[:class_rows], patches.reshape(-1, table.shape[1]).astype(table.dtype)])


def resample_parameters(params: Mapping[str, Any], old: Any, new: Any, method: str = "linear") -> dict[str, Any]:
    """Returns the parameters of a model for another resolution or patch size.

    All tables of positions are resampled, and so is the kernel that projects patches of pixels. Other parameters are
    returned as they are.

    Args:
        params: parameter name -> parameter of a model with the spec `old`; further entries are allowed.
        old: the spec of the model.
        new: the spec of the same model at another resolution or with another patch size.
        method: the interpolation of positions, see `resample_positions`.
    """
    if old.tile != new.tile:
        params = dict(params) | {"embed/kernel": resize_patches(params["embed/kernel"], new.tile)}

    def resample(name: str, leaf: Any) -> Any:
        if line := re.fullmatch(r"stage(\d+)/unit(\d+)/(\w+/relative_\w+)", name):
            place = int(line[1]), int(line[2]), LINE_AXES[line[3]]
            offsets, new_offsets = (2 * spec.line_length(*place) - 1 for spec in (old, new))  # 0 stays in the middle
            return resample_positions(leaf, (1, offsets), (1, new_offsets), 0, method)
        one = TABLES.get(name.rpartition("/")[2])
        if one is None or old.grid == new.grid:
            return leaf
        tables = np.asarray(leaf)  # of layers or heads, which are leading axes
        resampled = np.stack([one(table, old, new, method) for table in tables.reshape(-1, *tables.shape[-2:])])
        return resampled.reshape(*tables.shape[:-2], *resampled.shape[1:])

    return {name: resample(name, leaf) for name, leaf in params.items()}


def resample_relative(table: Table, old: Any, new: Any, method: str = "linear") -> NewTable:
    """Returns a table of relative positions for another grid of patches.

    An offset in raster order stands for at most two displacements (rows, columns): in a grid of 14 columns, the offset
    13 is 13 columns to the right, or 1 row down and 1 column to the left. So the table is first spread over the plane
    of all displacements. The plane is resampled on each axis as positions are, with the displacement 0 in the middle.
    Each new offset then gets the mean over its displacements, weighted by the number of patch pairs that have each.

    The rows at both ends, which only tokens before the patches use, are unchanged. A table of clipped offsets
    (`relative_clip`) is unchanged: its offsets count patches of the new grid.

    Args:
        table: a row for every offset, the lowest first.
        old: the spec of the model that the table belongs to.
        new: the spec of the same model at another resolution.
        method: the interpolation, see `resample_positions`.
    """
    if old.position.relative_clip:
        return table
    (rows, columns), (new_rows, new_columns), ends = old.grid, new.grid, old.position_rows
    make_matrix = RESAMPLINGS[choose("method of resampling", method, RESAMPLINGS)]
    down, across = make_matrix(2 * rows - 1, 2 * new_rows - 1), make_matrix(2 * columns - 1, 2 * new_columns - 1)
    middle = table[ends : len(table) - ends].astype(np.float64)
    plane = np.einsum("yr,xc,rcd->yxd", down, across, middle[_offsets(rows, columns)], optimize=True)
    pairs = np.multiply.outer(*(side - np.abs(np.arange(1 - side, side)) for side in new.grid))
    sums, weights = (np.zeros((2 * new_rows * new_columns - 1, channels)) for channels in (table.shape[1], 1))
    for total, values in ((sums, plane * pairs[..., None]), (weights, pairs[..., None])):
        np.add.at(total, _offsets(new_rows, new_columns), values)
    return np.concatenate([table[:ends], (sums / weights).astype(table.dtype), table[len(table) - ends :]])


def _resample_bias(table: Table, old: Any, new: Any, method: str) -> NewTable:
    """Returns biases for another grid: a plane of displacements, resampled on each axis; other rows are unchanged."""
    make_matrix = RESAMPLINGS[choose("method of resampling", method, RESAMPLINGS)]
    sizes, new_sizes = ([2 * side - 1 for side in spec.grid] for spec in (old, new))
    down, across = map(make_matrix, sizes, new_sizes)
    count = sizes[0] * sizes[1]
    plane = table[:count].reshape(*sizes, -1).astype(np.float64)
    plane = np.einsum("yr,xc,rch->yxh", down, across, plane, optimize=True)
    return np.concatenate([plane.reshape(-1, table.shape[1]).astype(table.dtype), table[count:]])


# Positions of a ResNet's unit -> the axis of the feature map (0: height, 1: width) along which they count offsets.
LINE_AXES = {
    "columns/relative_line": 0,
    "rows/relative_line": 1,
    "attention/relative_rows": 0,
    "attention/relative_columns": 1,
}


def _offsets(rows: int, columns: int) -> np.ndarray:
    """Returns the offset in raster order of each displacement (down, right), where the lowest offset counts as 0."""
    down, right = np.arange(1 - rows, rows), np.arange(1 - columns, columns)
    return down[:, None] * columns + right + rows * columns - 1


def _resample_learned(table: Table, old: Any, new: Any, method: str) -> NewTable:
    return resample_positions(table, old.grid, new.grid, old.position_rows, method)


def _resample_columns(table: Table, old: Any, new: Any, method: str) -> NewTable:
    return resample_positions(table, (1, old.grid[1]), (1, new.grid[1]), 0, method)


def _resample_rows(table: Table, old: Any, new: Any, method: str) -> NewTable:
    return resample_positions(table, (old.grid[0], 1), (new.grid[0], 1), 0, method)


# Last part of a parameter's name -> (table, old spec, new spec, method) -> the table for the new grid.
TABLES: dict[str, Callable[[Table, Any, Any, str], NewTable]] = {
    "position": _resample_learned,
    "position_x": _resample_columns,
    "position_y": _resample_rows,
    "relative": resample_relative,
    "relative_heads": resample_relative,
    "relative_bias": _resample_bias,
}


def resize_patches(
    kernel: Float[Array | np.ndarray, "rows columns channels width"], size: int
) -> Float[np.ndarray, "new_rows new_columns channels width"]:
    """Returns the kernel for patches of `size` x `size` pixels, as FlexiViT does (arXiv 2212.08013, section 3.4).

    The kernel is multiplied by the pseudo-inverse of the bilinear resize of patches. Where that resize loses nothing, a
    resized patch has the embedding of the original patch. Resizing there and back loses information: start from the
    kernel as it was trained.
    """
    kernel = np.asarray(kernel)
    if kernel.shape[:2] == (size, size):
        return kernel
    # The pseudo-inverse of a Kronecker product is that of its factors: one for the rows, one for the columns.
    down, across = (np.linalg.pinv(bilinear_matrix(old, size).T) for old in kernel.shape[:2])
    resized = np.einsum("yr,xc,rcio->yxio", down, across, kernel.astype(np.float64), optimize=True)
    return resized.astype(kernel.dtype)
