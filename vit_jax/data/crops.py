"""Crops of an image at fixed or random places. They accept an encoded image too, and decode no more than they need."""

import math
from typing import TypeAlias

import numpy as np

from vit_jax import UserError
from vit_jax.data.images import RGB, Crop, EncodedImage, pillow_resize, resize_pixels

Size: TypeAlias = int | tuple[int, int]  # a square's side, or (height, width)
Generator: TypeAlias = np.random.Generator


def height_and_width(size: Size) -> tuple[int, int]:
    """Returns (height, width)."""
    return size if isinstance(size, tuple) else (size, size)


def central_crop(image: RGB | EncodedImage, rng: Generator, size: Size) -> Crop:
    """Crops the centre; if an odd number of pixels is lost, the bottom or the right loses one more."""
    rows, columns = height_and_width(size)
    check_crop_fits(rows, columns, image.shape[0], image.shape[1])
    return crop_box(image, (image.shape[0] - rows) // 2, (image.shape[1] - columns) // 2, rows, columns)


def torch_center_crop(image: RGB | EncodedImage, rng: Generator, size: Size) -> Crop:
    """Crops the centre as torchvision does: half an odd number of pixels is rounded to an even number."""
    rows, columns = height_and_width(size)
    check_crop_fits(rows, columns, image.shape[0], image.shape[1])
    top, left = round((image.shape[0] - rows) / 2), round((image.shape[1] - columns) / 2)
    return crop_box(image, top, left, rows, columns)


def random_crop(image: RGB | EncodedImage, rng: Generator, size: Size) -> Crop:
    """Crops a box of `size` at a uniformly random position."""
    rows, columns = height_and_width(size)
    check_crop_fits(rows, columns, image.shape[0], image.shape[1])
    top = int(rng.integers(image.shape[0] - rows + 1))
    return crop_box(image, top, int(rng.integers(image.shape[1] - columns + 1)), rows, columns)


def inception_crop(
    image: RGB | EncodedImage,
    rng: Generator,
    size: Size,
    area_min: int | float = 5,
    area_max: int | float = 100,
    method: str = "bilinear",
    antialias: bool = False,
) -> Crop:
    """Crops a random box, sampled by `inception_box`, and resizes it to `size`.

    Areas are percentages of the image's (Szegedy et al. 2015, https://arxiv.org/abs/1409.4842).
    """
    box = inception_box(image.shape[0], image.shape[1], area_min / 100, area_max / 100, rng)
    return resize_pixels(crop_box(image, *box), *height_and_width(size), method, antialias)


def crop_box(image: RGB | EncodedImage, top: int, left: int, rows: int, columns: int) -> Crop:
    """Returns the box of an image whose upper left corner is at (`top`, `left`); of an array, it is a view."""
    if isinstance(image, EncodedImage):
        return image.crop(top, left, rows, columns)
    return image[top : top + rows, left : left + columns]


def inception_box(
    height: int, width: int, area_min: float, area_max: float, rng: Generator
) -> tuple[int, int, int, int]:
    """Samples (top, left, height, width) with the distribution of `tf.image.sample_distorted_bounding_box`.

    The aspect ratio (width to height) is uniform in [0.75, 1.33], TensorFlow's default. Given it, the box's *height*
    (not its area) is uniform among the whole numbers that keep the area within its bounds and the box within the
    image. The position is uniform, except that the last row and column of positions are never drawn. After 100 boxes
    that rounding pushes out of bounds, the whole image is returned.

    Args:
        height: the height of the image, in pixels.
        width: the width of the image, in pixels.
        area_min: smallest area of the box, as a fraction of the image's.
        area_max: largest area of the box, as a fraction of the image's.
        rng: the only source of randomness.
    """
    smallest, largest = area_min * height * width, area_max * height * width
    for _ in range(100):
        aspect = rng.uniform(0.75, 1.33)
        # Python rounds halves to even, as C's lrintf does.
        high = min(round((largest / aspect) ** 0.5), height)
        if round(high * aspect) > width:
            high = int((width + 0.5 - 1e-7) / aspect)
        low = min(round((smallest / aspect) ** 0.5), high)
        rows = low + int(rng.integers(high - low + 1))
        # A box that rounding made too small or too large gets a second chance with one row more or less.
        rows += round(rows * aspect) * rows < smallest
        rows -= round(rows * aspect) * rows > largest
        columns = round(rows * aspect)
        if 0 < rows <= height and 0 < columns <= width and smallest <= rows * columns <= largest:
            top = int(rng.integers(height - rows)) if rows < height else 0
            left = int(rng.integers(width - columns)) if columns < width else 0
            return top, left, rows, columns
    return 0, 0, height, width


def torch_random_resized_crop(
    image: RGB | EncodedImage,
    rng: Generator,
    size: Size,
    area_min: int | float = 8,
    area_max: int | float = 100,
    method: str = "bicubic",
) -> Crop:
    """Crops a random box, sampled by `torch_box`, and resizes it to `size` with Pillow, as torchvision and timm do.

    Areas are percentages of the image's.
    """
    box = torch_box(image.shape[0], image.shape[1], area_min / 100, area_max / 100, rng)
    return pillow_resize(np.asarray(crop_box(image, *box)), *height_and_width(size), method)


def torch_box(height: int, width: int, area_min: float, area_max: float, rng: Generator) -> tuple[int, int, int, int]:
    """Samples (top, left, height, width) with the distribution of torchvision's `RandomResizedCrop`.

    The area is uniform between `area_min` and `area_max`, which are fractions of the image's area. The logarithm of the
    aspect ratio (width to height) is uniform between log 3/4 and log 4/3. After ten boxes that do not fit into the
    image, the result is the largest central box whose aspect ratio is within these bounds.
    """
    for _ in range(10):
        area = rng.uniform(area_min, area_max) * height * width
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        rows, columns = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < rows <= height and 0 < columns <= width:
            return int(rng.integers(height - rows + 1)), int(rng.integers(width - columns + 1)), rows, columns
    rows, columns = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


CROPS = (central_crop, inception_crop, random_crop, torch_center_crop, torch_random_resized_crop)


def check_crop_fits(rows: int, columns: int, height: int, width: int) -> None:
    """Raises UserError unless a box of `rows` x `columns` fits into an image of `height` x `width`."""
    if rows > height or columns > width:
        raise UserError(
            f"a crop of {rows} x {columns} pixels does not fit into an image of {height} x {width}; "
            "put a larger resize or resize_small before it"
        )
