"""Resizing that gives the pixels of `tf.image.resize`, which the published results used."""

import functools

import cv2
import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

RESIZE_METHODS = ("bilinear", "bicubic", "fast", "area")


@functools.lru_cache(1024)
def neighbours(old: int, new: int, channels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns, for each of `new` samples of a line of `old`, both neighbours and the weight of the second.

    The arithmetic is TensorFlow's, in float32: the double precision of OpenCV moves a sample by up to 3e-5 pixels, and
    one value in a thousand to the other side of a whole number. With `channels`, positions count values of a row.
    """
    position = (np.arange(new, dtype=np.float32) + np.float32(0.5)) * (np.float32(old) / np.float32(new))
    position -= np.float32(0.5)
    floor = np.floor(position)
    first, second = np.maximum(floor, 0).astype(np.intp), np.minimum(floor + 1, old - 1).astype(np.intp)
    channel = np.arange(channels)
    values = [(line[:, None] * channels + channel).ravel() for line in (first, second)]
    return values[0], values[1], np.repeat(position - floor, channels)


def bilinear(
    image: UInt8[np.ndarray, "height width 3"], height: int, width: int
) -> Float32[np.ndarray, "rows columns 3"]:
    """Interpolates with half-pixel centres, bit for bit as `tf.image.resize` does without antialias."""
    above, below, down = neighbours(image.shape[0], height, 1)
    left, right, across = neighbours(image.shape[1], width, 3)
    lines = image.reshape(image.shape[0], -1)
    shrinks = image.shape[0] > 2 * height
    if shrinks:  # most lines are not needed
        lines = lines[np.concatenate([above, below])]
    first, mixed = (
        lines.take(left, axis=1, mode="clip").astype(np.float32),
        lines.take(right, axis=1, mode="clip").astype(np.float32),
    )
    mixed -= first
    mixed *= across
    mixed += first
    first, mixed = (mixed[:height], mixed[height:]) if shrinks else (mixed[above], mixed[below])
    mixed -= first
    mixed *= down[:, None]
    mixed += first
    return mixed.reshape(height, width, 3)


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
        resized = bilinear(image, height, width)
    return resized.astype(np.uint8)


def shrunk_size(height: int, width: int, size: int) -> tuple[int, int]:
    """Returns the (height, width) after `resize_small`, rounded in float32 as in the authors' code."""
    ratio = np.float32(size) / np.float32(min(height, width))
    return int(np.rint(np.float32(height) * ratio)), int(np.rint(np.float32(width) * ratio))
