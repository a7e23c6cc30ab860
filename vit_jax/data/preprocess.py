"""Preprocessing: a pipe of named ops, in big_vision's notation, from an image to the array that a model reads.

`inception_crop({resolution})|flip_lr|value_range(-1,1)` is parsed strictly when the config is read. Its text is stored
with every exported model, with numbers for `{resolution}` and `{resolution*256/224}`. The pixels are those of the
authors' TensorFlow ops; the ops named `torch_` are those of torchvision and Pillow. An op takes the image (uint8), a
random generator, which only the random ops use, and the arguments that the pipe states. A crop that is the first op
takes an encoded image, and decodes no more than it needs. The ops that change colours are in `augment`.
"""

import ast
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import cv2
import numpy as np
from jaxtyping import Float32

from vit_jax import UserError, choose
from vit_jax.data import augment
from vit_jax.data.images import (
    FILTERS,
    RESIZE_METHODS,
    RGB,
    Crop,
    DecodeError,
    EncodedImage,
    TooNarrow,
    pillow_resize,
    resize_pixels,
    shrunk_size,
    torch_size,
)

Size: TypeAlias = int | tuple[int, int]  # a square's side, or (height, width)
KnownSize: TypeAlias = int | tuple[int, int] | None  # the shorter side; (height, width); or nothing is known
Generator: TypeAlias = np.random.Generator


def height_and_width(size: Size) -> tuple[int, int]:
    """Returns (height, width)."""
    return size if isinstance(size, tuple) else (size, size)


def resize(image: RGB, rng: Generator, size: Size, method: str = "bilinear", antialias: bool = False) -> Crop:
    """Resizes to `size`, whatever the aspect ratio."""
    return resize_pixels(image, *height_and_width(size), method, antialias)


def resize_small(image: RGB, rng: Generator, size: int, method: str = "area", antialias: bool = False) -> Crop:
    """Resizes so that the smaller side has `size` pixels, keeping the aspect ratio."""
    return resize_pixels(image, *shrunk_size(image.shape[0], image.shape[1], size), method, antialias)


def torch_resize(image: RGB, rng: Generator, size: Size, method: str = "bicubic") -> Crop:
    """Resizes as torchvision does with Pillow; one number is the shorter side, and the longer one is rounded down."""
    rows, columns = size if isinstance(size, tuple) else torch_size(image.shape[0], image.shape[1], size)
    return pillow_resize(image, rows, columns, method)


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


def check_crop_fits(rows: int, columns: int, height: int, width: int) -> None:
    """Raises UserError unless a box of `rows` x `columns` fits into an image of `height` x `width`."""
    if rows > height or columns > width:
        raise UserError(
            f"a crop of {rows} x {columns} pixels does not fit into an image of {height} x {width}; "
            "put a larger resize or resize_small before it"
        )


def reflect_pad(image: RGB, rng: Generator, pixels: int) -> Crop:
    """Adds `pixels` rows or columns on each side, mirrored at the edge; the edge itself is not repeated."""
    return cv2.copyMakeBorder(image, pixels, pixels, pixels, pixels, cv2.BORDER_REFLECT_101)


def flip_lr(image: RGB, rng: Generator) -> RGB:
    """Mirrors the image with probability 0.5."""
    return cv2.flip(image, 1) if rng.random() < 0.5 else image


def value_range(
    image: RGB, rng: Generator, low: int | float, high: int | float
) -> Float32[np.ndarray, "height width 3"]:
    """Maps 0 to `low` and 255 to `high`, linearly, as float32."""
    levels = np.arange(256, dtype=np.float32) / np.float32(255)
    return cv2.LUT(image, levels * np.float32(high - low) + np.float32(low))


OPS: dict[str, Callable] = {
    "autoaugment": augment.autoaugment,
    "central_crop": central_crop,
    "color_jitter": augment.color_jitter,
    "flip_lr": flip_lr,
    "inception_crop": inception_crop,
    "randaug": augment.randaug,
    "random_crop": random_crop,
    "random_erasing": augment.random_erasing,
    "reflect_pad": reflect_pad,
    "resize": resize,
    "resize_small": resize_small,
    "three_augment": augment.three_augment,
    "torch_center_crop": torch_center_crop,
    "torch_random_resized_crop": torch_random_resized_crop,
    "torch_resize": torch_resize,
    "value_range": value_range,
}
CROPS = (central_crop, inception_crop, random_crop, torch_center_crop, torch_random_resized_crop)


@dataclasses.dataclass(frozen=True)
class Preprocessor:
    """A parsed pipe: maps an image and a random generator to what the model reads. It can be pickled.

    Attributes:
        text: the pipe as stored with a model, with numbers for `{resolution}`.
        shape: (height, width, 3) of the result, for any image.
        ops: the ops before `value_range`, in order.
        value_range: the values that 0 and 255 become at the end.
    """

    text: str
    shape: tuple[int, int, int]
    ops: tuple[functools.partial, ...]
    value_range: tuple[float, float]

    def apply_ops(self, image: RGB | EncodedImage, rng: Generator) -> Crop:
        """Runs the ops before `value_range`.

        Raises:
            UserError: the image is smaller than a crop.
            DecodeError: the image is unreadable, or would be resized to too many pixels.
        """
        name = image.name if isinstance(image, EncodedImage) else "of an array"
        if isinstance(image, EncodedImage) and not (self.ops and self.ops[0].func in CROPS):
            image = image.decode()
        try:
            for op in self.ops:
                image = op(image, rng)
        except TooNarrow as error:
            raise DecodeError(f"cannot preprocess the image {name}: {error}") from error
        return image

    def why_too_small(self, height: int, width: int) -> str | None:
        """Returns why an image of this size is too small for the ops, or None if it is not."""
        size: KnownSize = (height, width)
        try:
            for op in self.ops:
                size = output_size(size, op.func.__name__, op.keywords)
        except UserError as error:
            return str(error)
        return None

    def __call__(self, image: RGB | EncodedImage, rng: Generator) -> Float32[np.ndarray, "rows columns 3"]:
        """Runs all ops; raises as `apply_ops`."""
        return value_range(self.apply_ops(image, rng), rng, *self.value_range)


def parse_pipe(pipe: str, resolution: int, fast: bool = False) -> Preprocessor:
    """Parses `op(arguments)|op|...`; arguments are Python literals.

    Args:
        pipe: the text; a leading `decode` is accepted and does nothing.
        resolution: the value of `{resolution}`, in pixels; see `fill_resolution`.
        fast: whether bilinear resizing may be off by one grey level, to take less time.

    Raises:
        UserError: an op or an argument is unknown or wrong, the size of the result is not fixed, a crop is larger than
            any image that reaches it, or the last op is not value_range.
    """
    text = fill_resolution(pipe, resolution)
    parts = [part.strip() for part in text.split("|")]
    calls = [parse_op(part, text) for part in (parts[1:] if parts[0] == "decode" else parts)]
    names = [name for name, _ in calls]
    if names[-1:] != ["value_range"] or names.count("value_range") != 1:
        raise UserError(
            f"the preprocessing {text!r} must contain value_range exactly once, as the last op, such as "
            "value_range(-1,1)"
        )
    size: KnownSize = None
    for name, arguments in calls:
        size = output_size(size, name, arguments)
    if not isinstance(size, tuple):
        raise UserError(
            f"the preprocessing {text!r} gives images of different sizes; "
            f"add resize({resolution}) or a crop, such as resize_small({resolution})|central_crop({resolution})"
        )
    if fast:
        calls = [(name, with_fast_resize(arguments)) for name, arguments in calls]
    ops = [functools.partial(OPS[name], **arguments) for name, arguments in calls[:-1]]
    low, high = calls[-1][1].values()
    return Preprocessor(text, (*size, 3), tuple(ops), (float(low), float(high)))


def value_range_of(pipe: str) -> tuple[float, float]:
    """Returns the values that 0 and 255 become at the end of a pipe.

    Raises:
        UserError: the pipe does not end with value_range, or that op cannot be read.
    """
    name, arguments = parse_op(pipe.rpartition("|")[2].strip(), pipe)
    if name != "value_range":
        raise UserError(f"the preprocessing {pipe!r} must end with value_range, such as value_range(-1,1)")
    return float(arguments["low"]), float(arguments["high"])


def fill_resolution(pipe: str, resolution: int) -> str:
    """Returns the pipe with numbers in place of `{resolution}` and of multiples such as `{resolution*256/224}`.

    Multiples are rounded to the nearest pixel, halves up: this one is 256 at resolution 224, and 439 at 384.
    """

    def multiple(match: re.Match) -> str:
        numerator, denominator = int(match[1] or 1), int(match[2] or 1)
        return str((2 * resolution * numerator + denominator) // (2 * denominator))

    return re.sub(r"\{resolution(?:\*([1-9]\d*)/([1-9]\d*))?\}", multiple, pipe)


def with_fast_resize(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an op, with the method `fast` in place of `bilinear` without antialias."""
    plain = arguments.get("method") == "bilinear" and arguments.get("antialias") is False
    return arguments | {"method": "fast"} if plain else arguments


def parse_op(part: str, pipe: str) -> tuple[str, dict[str, Any]]:
    """Parses one `op(arguments)` of a pipe into the op's name and its checked arguments by name, defaults included."""
    try:
        call = ast.parse(part, mode="eval").body
        name, args, keywords = (call.func, call.args, call.keywords) if isinstance(call, ast.Call) else (call, [], [])
        if not isinstance(name, ast.Name):
            raise SyntaxError
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested thousands of times
        raise UserError(f"cannot read {part!r} in the preprocessing {pipe!r}; write op(arguments)|op|...") from None
    function = inspect.signature(OPS[choose("preprocessing op", name.id, OPS)])
    signature = inspect.Signature(list(function.parameters.values())[2:])
    names = [str(keyword.arg) for keyword in keywords]
    try:
        if repeated := [name for name in names if names.count(name) > 1]:
            raise TypeError(f"{repeated[0]} is given twice")
        bound = signature.bind(
            *[ast.literal_eval(arg) for arg in args],
            **{name: ast.literal_eval(keyword.value) for name, keyword in zip(names, keywords, strict=True)},
        )
    except (TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, TypeError) else "they must be numbers, tuples, strings or booleans"
        raise UserError(f"wrong arguments in {part!r}: {reason}; the op is {name.id}{signature}") from None
    bound.apply_defaults()
    if fault := invalid_argument(name.id, bound.arguments):
        raise UserError(f"wrong arguments in {part!r}: {fault}; the op is {name.id}{signature}")
    return name.id, bound.arguments


MAX_SIDE = 10_000  # pixels
MAX_NUMBER = 1_000_000  # of any other argument, so that float32 holds what is computed from it

WHOLE = ("num_layers", "pixels")  # arguments
# Largest values of arguments that must not be negative.
MAX_ARGUMENT_VALUES = {
    **dict.fromkeys(("num_layers", "magnitude", "brightness", "contrast", "saturation"), np.inf),
    "probability": 1,
    "hue": 0.5,
    "area_min": 100,
    "area_max": 100,
    "pixels": MAX_SIDE,
}


def invalid_argument(op: str, arguments: dict[str, Any]) -> str | None:
    """Returns what is wrong with the values of an op's arguments, or None."""
    for name, value in arguments.items():
        if name == "size":
            sides = value if isinstance(value, tuple) and len(value) == 2 and op != "resize_small" else (value,)
            if not all(type(side) is int and 0 < side <= MAX_SIDE for side in sides):
                allowed = f"a whole number from 1 to {MAX_SIDE:,}" + (
                    "" if op == "resize_small" else " or (height, width)"
                )
                return f"size must be {allowed}, not {value!r}"
        elif name == "method":
            methods = tuple(FILTERS) if op in ("torch_resize", "torch_random_resized_crop") else RESIZE_METHODS
            if value not in methods:
                return f"method must be {' or '.join(map(repr, methods))}, not {value!r}"
        elif name == "antialias":
            if type(value) is not bool:
                return f"antialias must be True or False, not {value!r}"
        elif type(value) not in ((int,) if name in WHOLE else (int, float)):
            return f"{name} must be a {'whole ' if name in WHOLE else ''}number, not {value!r}"
        elif not abs(value) <= MAX_NUMBER:
            return f"{name} must be from {-MAX_NUMBER:,} to {MAX_NUMBER:,}, not {value!r:.20}"
        elif name in MAX_ARGUMENT_VALUES and not 0 <= value <= MAX_ARGUMENT_VALUES[name]:
            return f"{name} must be at least 0" + (
                f" and at most {MAX_ARGUMENT_VALUES[name]}" if MAX_ARGUMENT_VALUES[name] < np.inf else ""
            )
    if "area_min" in arguments and not 0 < arguments["area_min"] <= arguments["area_max"]:
        return "0 < area_min <= area_max <= 100 must hold"
    if arguments.get("method") == "bicubic" and arguments.get("antialias") is False:
        return "the method 'bicubic' needs antialias=True"
    return None if op != "value_range" or arguments["low"] < arguments["high"] else "low must be less than high"


def output_size(size: KnownSize, name: str, arguments: dict[str, Any]) -> KnownSize:
    """Returns what is known of the size of an op's result.

    Args:
        size: what is known of the size of the image that the op gets.
        name: the name of the op.
        arguments: its arguments by name, defaults included.

    Raises:
        UserError: the op is a crop that is larger than any such image, or reflect_pad by more pixels than it has.
    """
    if name == "torch_resize" and isinstance(arguments["size"], int):
        return torch_size(*size, arguments["size"]) if isinstance(size, tuple) else arguments["size"]
    if name == "resize_small":
        return shrunk_size(*size, arguments["size"]) if isinstance(size, tuple) else arguments["size"]
    if name == "reflect_pad":
        return _padded(size, arguments["pixels"])
    if "size" not in arguments:
        return size
    result = height_and_width(arguments["size"])
    if name in ("central_crop", "random_crop", "torch_center_crop"):
        if isinstance(size, tuple):
            check_crop_fits(*result, *size)
        elif size and min(result) > size:
            raise UserError(
                f"a crop of {result[0]} x {result[1]} pixels does not fit into an image whose shorter side is {size} "
                "pixels; put a larger resize or resize_small before it, such as resize_small({resolution*256/224})"
            )
    return result


def _padded(size: KnownSize, pixels: int) -> KnownSize:
    if size is None:
        return None
    if min(size if isinstance(size, tuple) else (size,)) <= pixels:
        few = f"reflect_pad({pixels}) needs images of more than {pixels} pixels on each side, not {size}"
        raise UserError(f"{few}; pad by fewer pixels.")
    return (size[0] + 2 * pixels, size[1] + 2 * pixels) if isinstance(size, tuple) else size + 2 * pixels
