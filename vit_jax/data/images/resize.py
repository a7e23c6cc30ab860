"""Resizing that gives the pixels of `tf.image.resize`, which the published results used."""

import functools
import threading
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
from jaxtyping import Shaped, UInt8
from PIL import Image

RESIZE_METHODS = ("bilinear", "bicubic", "fast", "area")
BAND = 75  # rows of a result computed together, so that a core's cache holds them


@functools.lru_cache(1024)
def neighbours(old: int, new: int, channels: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns, for each of `new` samples of a line of `old`, both neighbours and the weight of the second.

    The arithmetic is TensorFlow's, in float32: the double precision of OpenCV moves a sample by up to 3e-5 pixels, and
    one value in a thousand to the other side of a whole number. Weights are repeated for each of `channels`.
    """
    position = (np.arange(new, dtype=np.float32) + np.float32(0.5)) * (np.float32(old) / np.float32(new))
    position -= np.float32(0.5)
    floor = np.floor(position)
    first, second = np.maximum(floor, 0).astype(np.intp), np.minimum(floor + 1, old - 1).astype(np.intp)
    return first, second, np.repeat(position - floor, channels)


class Band(NamedTuple):
    """Rows of the result that are computed together.

    Attributes:
        rows: the rows of the result.
        lines: of the image that these rows need.
        above: the upper neighbour of each row, counted among these lines.
        below: the lower neighbour of each row, counted among these lines.
        down: float32 [rows, 1], the weight of the lower neighbour.
    """

    rows: slice
    lines: slice | np.ndarray
    above: np.ndarray
    below: np.ndarray
    down: np.ndarray


@functools.lru_cache(1024)
def row_bands(old: int, new: int) -> list[Band]:
    """Returns the bands of a result of `new` rows; each needs at most `2 * BAND` of the image's `old` lines."""
    above, below, down = neighbours(old, new)
    bands = []
    for top in range(0, new, BAND):
        rows = slice(top, min(top + BAND, new))
        first, second = above[rows], below[rows]
        count, start, stop = len(first), int(first[0]), int(second[-1]) + 1
        if stop - start > 2 * count:  # most lines are not needed
            lines, order = np.concatenate([first, second]), np.arange(2 * count)
            bands.append(Band(rows, lines, order[:count], order[count:], down[rows, None]))
        else:
            bands.append(Band(rows, slice(start, stop), first - start, second - start, down[rows, None]))
    return bands


class Scratch(threading.local):
    """Memory that each thread keeps from one image to the next: mapping it anew takes longer than the arithmetic."""

    lines: np.ndarray = np.empty((0, 0), np.float32)

    def take(self, lines: int, values: int) -> np.ndarray:
        """Returns that many lines of values, with any content."""
        if self.lines.shape != (lines, values):
            self.lines = np.empty((lines, values), np.float32)
        return self.lines


scratch = Scratch()


def take_columns(columns: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    """Writes the RGB values of some columns of an image to the lines of `out`.

    Args:
        columns: int32 [width, height], the four bytes of a pixel in one number: whole lines are copied.
        index: which columns to take.
        out: float32 [height, 3 * columns taken].
    """
    taken = cv2.transpose(columns.take(index, axis=0, mode="clip"))
    pixels = cv2.cvtColor(taken.view(np.uint8).reshape(*taken.shape, 4), cv2.COLOR_RGBA2RGB)
    np.copyto(out, pixels.reshape(out.shape))


def interpolate(first: np.ndarray, second: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns `first + (second - first) * weight`, each operation rounded to float32, in the memory of `second`."""
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
        height: of the result.
        width: of the result.
        dtype: of the result; uint8 truncates.
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

    `bilinear` is exact. `fast` is bilinear in OpenCV's integer arithmetic, within 1 of 255. `area` is within 1 of 255,
    as is `bilinear` with antialias (Pillow's, one float32 channel at a time). `bicubic` is Pillow's, with which
    PyTorch's models were measured; it always smooths before it shrinks. Antialias has no effect on `fast` and `area`.
    """
    if method == "fast":
        return cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    if method == "bicubic":
        return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
    if method == "area":
        resized = cv2.resize(image.astype(np.float32), (width, height), interpolation=cv2.INTER_AREA)
    elif antialias:
        channels = [Image.fromarray(image[..., c].astype(np.float32)) for c in range(3)]
        resized = np.stack([np.asarray(c.resize((width, height), Image.Resampling.BILINEAR)) for c in channels], -1)
    else:
        return bilinear(image, height, width)
    return resized.astype(np.uint8)


def shrunk_size(height: int, width: int, size: int) -> tuple[int, int]:
    """Returns the (height, width) after `resize_small`, rounded in float32 as in the authors' code."""
    ratio = np.float32(size) / np.float32(min(height, width))
    return int(np.rint(np.float32(height) * ratio)), int(np.rint(np.float32(width) * ratio))
