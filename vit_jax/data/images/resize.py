"""Resizing as the libraries do in which models were trained.

`resize_pixels` gives the pixels of `tf.image.resize`, which the published results used, and `pillow_resize` those of
PyTorch's libraries, which resize with Pillow.
"""

import functools
import threading
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
from jaxtyping import Shaped, UInt8
from PIL import Image

from vit_jax import UserError
from vit_jax.data.images.decode import MAX_PIXELS

RESIZE_METHODS = ("bilinear", "bicubic", "fast", "area")  # of `resize_pixels`
# Of `pillow_resize`. They smooth before they shrink, except "nearest".
FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
    "nearest": Image.Resampling.NEAREST,
}
BAND = 75  # rows of a result that are computed together: so few that a core's cache holds them


class TooNarrow(UserError):
    """An image that keeps its aspect ratio is so narrow that it would have too many pixels; the message says so."""


@functools.lru_cache(1024)
def neighbours(old: int, new: int, channels: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns how a line of `old` samples is linearly interpolated at `new` samples.

    The arithmetic is TensorFlow's, in float32: the double precision of OpenCV moves a sample by up to 3e-5 pixels, and
    one value in a thousand to the other side of a whole number.

    Returns:
        For each new sample: the index of its first neighbour, the index of its second neighbour, and the weight of the
        second. The weights are float32 [new * channels]: each one is repeated `channels` times.
    """
    position = (np.arange(new, dtype=np.float32) + np.float32(0.5)) * (np.float32(old) / np.float32(new))
    position -= np.float32(0.5)
    floor = np.floor(position)
    first, second = np.maximum(floor, 0).astype(np.intp), np.minimum(floor + 1, old - 1).astype(np.intp)
    return first, second, np.repeat(position - floor, channels)


class RowBand(NamedTuple):
    """Rows of the result that are computed together.

    Attributes:
        rows: the rows of the result.
        lines: the lines of the image that these rows need.
        above: the upper neighbour of each row, as an index into `image[lines]`.
        below: the lower neighbour of each row, as an index into `image[lines]`.
        down: the weight of the lower neighbour of each row, float32 [rows, 1].
    """

    rows: slice
    lines: slice | np.ndarray
    above: np.ndarray
    below: np.ndarray
    down: np.ndarray


@functools.lru_cache(1024)
def row_bands(old: int, new: int) -> list[RowBand]:
    """Returns the bands of a result of `new` rows; each band needs at most `2 * BAND` of the image's `old` lines."""
    above, below, down = neighbours(old, new)
    bands = []
    for top in range(0, new, BAND):
        rows = slice(top, min(top + BAND, new))
        first, second = above[rows], below[rows]
        count, start, stop = len(first), int(first[0]), int(second[-1]) + 1
        if stop - start > 2 * count:  # most lines are not needed
            lines, order = np.concatenate([first, second]), np.arange(2 * count)
            bands.append(RowBand(rows, lines, order[:count], order[count:], down[rows, None]))
        else:
            bands.append(RowBand(rows, slice(start, stop), first - start, second - start, down[rows, None]))
    return bands


class Scratch(threading.local):
    """Memory that each thread keeps from one image to the next.

    To allocate it anew would take longer than the arithmetic.
    """

    lines: np.ndarray = np.empty((0, 0), np.float32)

    def take(self, lines: int, values: int) -> np.ndarray:
        """Returns a float32 array [lines, values] of arbitrary content; the thread's next call may return it again."""
        if self.lines.shape != (lines, values):
            self.lines = np.empty((lines, values), np.float32)
        return self.lines


scratch = Scratch()


def take_columns(columns: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    """Writes the RGB values of some columns of an image to `out`.

    Args:
        columns: the transposed image, int32 [width, height]. One number holds the four bytes of an RGBA pixel, so that
            a column is contiguous.
        index: the columns to take.
        out: float32 [height, 3 * number of columns taken]; overwritten.
    """
    taken = cv2.transpose(columns.take(index, axis=0, mode="clip"))
    pixels = cv2.cvtColor(taken.view(np.uint8).reshape(*taken.shape, 4), cv2.COLOR_RGBA2RGB)
    np.copyto(out, pixels.reshape(out.shape))


def interpolate(first: np.ndarray, second: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns `first + (second - first) * weight`, each operation rounded to float32; overwrites `second` with it."""
    second -= first
    second *= weight
    second += first
    return second


def bilinear(
    image: UInt8[np.ndarray, "height width 3"], height: int, width: int, dtype: npt.DTypeLike = np.uint8
) -> Shaped[np.ndarray, "rows columns 3"]:
    """Interpolates with half-pixel centres, bit for bit as `tf.image.resize` does without antialias.

    Args:
        image: the pixels.
        height: the height of the result.
        width: the width of the result.
        dtype: the type of the result; with uint8 the values are truncated.
    """
    left, right, across = neighbours(image.shape[1], width, 3)
    result = np.empty((height, 3 * width), dtype)
    memory = scratch.take(5 * BAND, 3 * width)
    for rows, lines, above, below, down in row_bands(image.shape[0], height):
        pixels = cv2.cvtColor(image[lines], cv2.COLOR_RGB2RGBA)
        columns = cv2.transpose(pixels.view(np.int32)[..., 0])
        first, second = memory[: len(pixels)], memory[2 * BAND :][: len(pixels)]
        take_columns(columns, left, first)
        take_columns(columns, right, second)
        mixed = interpolate(first, second, across)
        upper, lower = memory[: len(above)], memory[4 * BAND :][: len(above)]  # `first` is not needed any more
        mixed.take(above, axis=0, out=upper, mode="clip")
        mixed.take(below, axis=0, out=lower, mode="clip")
        result[rows] = interpolate(upper, lower, down)
    return result.reshape(height, width, 3)


def resize_pixels(
    image: UInt8[np.ndarray, "height width 3"], height: int, width: int, method: str, antialias: bool
) -> UInt8[np.ndarray, "rows columns 3"]:
    """Resizes as `tf.image.resize` does, then truncates to uint8 as big_vision does.

    The method `bilinear` is exact without antialias. With antialias it is Pillow's, on one float32 channel at a time,
    and differs by at most 1 of 255. The methods `fast` (bilinear, in OpenCV's integer arithmetic) and `area` differ by
    at most 1 of 255. The method `bicubic` is Pillow's, with which PyTorch's models were measured; it always smooths
    before it shrinks. `antialias` has no effect on `fast`, `area` and `bicubic`.
    """
    if method == "fast":
        return cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    if method == "bicubic":
        return pillow_resize(image, height, width, method)
    if method == "area":
        resized = cv2.resize(image.astype(np.float32), (width, height), interpolation=cv2.INTER_AREA)
    elif antialias:
        channels = [Image.fromarray(image[..., c].astype(np.float32)) for c in range(3)]
        resized = np.stack([np.asarray(c.resize((width, height), Image.Resampling.BILINEAR)) for c in channels], -1)
    else:
        return bilinear(image, height, width)
    return resized.astype(np.uint8)


def pillow_resize(
    image: UInt8[np.ndarray, "height width 3"], height: int, width: int, method: str
) -> UInt8[np.ndarray, "rows columns 3"]:
    """Resizes by one of `FILTERS`; the result is rounded."""
    return np.asarray(Image.fromarray(image).resize((width, height), FILTERS[method]))


def shrunk_size(height: int, width: int, size: int) -> tuple[int, int]:
    """Returns the (height, width) of an image whose shorter side `resize_small` has made `size` pixels.

    The numbers are rounded in float32 as in the authors' code.

    Raises:
        TooNarrow: the image would have too many pixels.
    """
    ratio = np.float32(size) / np.float32(min(height, width))
    rows, columns = int(np.rint(np.float32(height) * ratio)), int(np.rint(np.float32(width) * ratio))
    check_resized(height, width, rows, columns)
    return rows, columns


def torch_size(height: int, width: int, size: int) -> tuple[int, int]:
    """Returns the (height, width) of an image whose shorter side becomes `size`; the longer one is rounded down.

    Raises:
        TooNarrow: the image would have too many pixels.
    """
    longer = int(size * max(height, width) / min(height, width))
    rows, columns = (size, longer) if height <= width else (longer, size)
    check_resized(height, width, rows, columns)
    return rows, columns


def check_resized(height: int, width: int, rows: int, columns: int) -> None:
    """Raises TooNarrow if an image that keeps its aspect ratio would have more than `MAX_PIXELS` pixels."""
    if rows * columns > MAX_PIXELS:
        resized = f"its {height} x {width} pixels would be resized to {rows} x {columns}"
        raise TooNarrow(f"{resized}, more than the limit of {MAX_PIXELS:,}")
