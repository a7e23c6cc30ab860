"""Preprocessing: a pipe of named ops, in big_vision's notation, from an image to the array that a model reads.

`inception_crop({resolution})|flip_lr|value_range(-1,1)` is parsed strictly when the config is read. Its text is stored
with every exported model, with numbers for `{resolution}` and `{resolution*256/224}`. The pixels are those of the
authors' TensorFlow ops; the ops named `torch_` are those of torchvision and Pillow. An op takes the image (uint8), a
random generator, which only the random ops use, and the arguments that the pipe states. A crop that is the first op
takes an encoded image, and decodes no more than it needs. The ops that change colours are in `augment`. An op is a row
of `OPS`.
"""

import ast
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import cv2
import numpy as np
from jaxtyping import Float32

from vit_jax import UserError, WrongText, choose
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

SideOrSize: TypeAlias = int | tuple[int, int]  # a square's side, or (height, width)
KnownSize: TypeAlias = int | tuple[int, int] | None  # the shorter side; (height, width); or nothing is known
Generator: TypeAlias = np.random.Generator
MAX_SIDE = 10_000  # pixels
MAX_NUMBER = 1_000_000  # of any other argument, so that float32 holds what is computed from it


def height_and_width(size: SideOrSize) -> tuple[int, int]:
    """Returns (height, width)."""
    return size if isinstance(size, tuple) else (size, size)


def resize(image: RGB, rng: Generator, size: SideOrSize, method: str = "bilinear", antialias: bool = False) -> Crop:
    """Resizes to `size`, whatever the aspect ratio."""
    return resize_pixels(image, *height_and_width(size), method, antialias)


def resize_small(image: RGB, rng: Generator, size: int, method: str = "area", antialias: bool = False) -> Crop:
    """Resizes so that the smaller side has `size` pixels, keeping the aspect ratio."""
    return resize_pixels(image, *shrunk_size(image.shape[0], image.shape[1], size), method, antialias)


def torch_resize(image: RGB, rng: Generator, size: SideOrSize, method: str = "bicubic") -> Crop:
    """Resizes as torchvision does with Pillow; one number is the shorter side, and the longer one is rounded down."""
    rows, columns = size if isinstance(size, tuple) else torch_size(image.shape[0], image.shape[1], size)
    return pillow_resize(image, rows, columns, method)


def central_crop(image: RGB | EncodedImage, rng: Generator, size: SideOrSize) -> Crop:
    """Crops the centre; if an odd number of pixels is lost, the bottom or the right loses one more."""
    rows, columns = height_and_width(size)
    check_crop_fits(rows, columns, image.shape[0], image.shape[1])
    return crop_box(image, (image.shape[0] - rows) // 2, (image.shape[1] - columns) // 2, rows, columns)


def torch_center_crop(image: RGB | EncodedImage, rng: Generator, size: SideOrSize) -> Crop:
    """Crops the centre as torchvision does: half an odd number of pixels is rounded to an even number."""
    rows, columns = height_and_width(size)
    check_crop_fits(rows, columns, image.shape[0], image.shape[1])
    top, left = round((image.shape[0] - rows) / 2), round((image.shape[1] - columns) / 2)
    return crop_box(image, top, left, rows, columns)


def random_crop(image: RGB | EncodedImage, rng: Generator, size: SideOrSize) -> Crop:
    """Crops a box of `size` at a uniformly random position."""
    rows, columns = height_and_width(size)
    check_crop_fits(rows, columns, image.shape[0], image.shape[1])
    top = int(rng.integers(image.shape[0] - rows + 1))
    return crop_box(image, top, int(rng.integers(image.shape[1] - columns + 1)), rows, columns)


def inception_crop(
    image: RGB | EncodedImage,
    rng: Generator,
    size: SideOrSize,
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
    size: SideOrSize,
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
    """Maps 0 to `low` and 255 to `high`, linearly, as float32; it divides by 255 first, as big_vision does.

    This is for single images. Batches are mapped on the devices by `loader.scale_levels`, which rounds otherwise.
    """
    levels = np.arange(256, dtype=np.float32) / np.float32(255)
    return cv2.LUT(image, levels * np.float32(high - low) + np.float32(low))


def wrong_side(value: Any) -> str | None:
    """Returns what is wrong with a number of pixels that an image has on a side, as the functions below do."""
    right = type(value) is int and 0 < value <= MAX_SIDE
    return None if right else f"must be a whole number from 1 to {MAX_SIDE:,}, not {value!r}"


def wrong_size(value: Any) -> str | None:
    """Returns what is wrong with a `SideOrSize`."""
    sides = value if isinstance(value, tuple) and len(value) == 2 else (value,)
    if not any(map(wrong_side, sides)):
        return None
    return f"must be a whole number from 1 to {MAX_SIDE:,} or (height, width), not {value!r}"


def wrong_word(value: Any, words: tuple[str, ...]) -> str | None:
    """Returns what is wrong with a value that must be one of `words`."""
    return None if value in words else f"must be {' or '.join(map(repr, words))}, not {value!r}"


def wrong_flag(value: Any) -> str | None:
    """Returns what is wrong with a value that must be a truth value."""
    return None if type(value) is bool else f"must be True or False, not {value!r}"


def wrong_number(value: Any, most: float | None = None, whole: bool = False) -> str | None:
    """Returns what is wrong with a number that must be from 0 to `most`; None: it may be negative, too."""
    if type(value) not in ((int,) if whole else (int, float)):
        return f"must be a {'whole ' if whole else ''}number, not {value!r}"
    if not abs(value) <= MAX_NUMBER:
        return f"must be from {-MAX_NUMBER:,} to {MAX_NUMBER:,}, not {value!r:.20}"
    if most is not None and not 0 <= value <= most:
        return "must be at least 0" + (f" and at most {most}" if most < math.inf else "")
    return None


def wrong_together(arguments: dict[str, Any]) -> str | None:
    """Returns which arguments of an op contradict each other; arguments of these names mean the same in every op."""
    if "area_min" in arguments and not 0 < arguments["area_min"] <= arguments["area_max"]:
        return "0 < area_min <= area_max <= 100 must hold"
    if arguments.get("method") == "bicubic" and arguments.get("antialias") is False:
        return "the method 'bicubic' needs antialias=True"
    return "low must be less than high" if "low" in arguments and not arguments["low"] < arguments["high"] else None


def same_size(size: KnownSize, arguments: dict[str, Any]) -> KnownSize:
    """Returns what is known of the size of an op's result, as the functions below do: it is the size that comes in.

    Args:
        size: what is known of the size of the image that the op gets.
        arguments: the op's arguments by name, defaults included.
    """
    return size


def stated_size(size: KnownSize, arguments: dict[str, Any]) -> KnownSize:
    """Returns the argument `size`."""
    return height_and_width(arguments["size"])


def cropped_size(size: KnownSize, arguments: dict[str, Any]) -> KnownSize:
    """Returns the argument `size`; raises UserError if a crop of this size does not fit into any such image."""
    rows, columns = height_and_width(arguments["size"])
    if isinstance(size, tuple):
        check_crop_fits(rows, columns, *size)
    elif size and min(rows, columns) > size:
        raise UserError(
            f"a crop of {rows} x {columns} pixels does not fit into an image whose shorter side is {size} pixels; "
            "put a larger resize or resize_small before it, such as resize_small({resolution*256/224})"
        )
    return rows, columns


def shorter_side_size(size: KnownSize, arguments: dict[str, Any]) -> KnownSize:
    """Returns the size of an image whose shorter side becomes `size`, as TensorFlow rounds."""
    return shrunk_size(*size, arguments["size"]) if isinstance(size, tuple) else arguments["size"]


def torch_resized_size(size: KnownSize, arguments: dict[str, Any]) -> KnownSize:
    """Returns the argument `size`; or, if that is a number, the size of an image whose shorter side becomes it."""
    wanted = arguments["size"]
    return torch_size(*size, wanted) if isinstance(size, tuple) and isinstance(wanted, int) else wanted


def padded_size(size: KnownSize, arguments: dict[str, Any]) -> KnownSize:
    """Returns the size with `pixels` more on each side; raises UserError if the image has no more than `pixels`."""
    pixels = arguments["pixels"]
    if size is None:
        return None
    if min(size if isinstance(size, tuple) else (size,)) <= pixels:
        few = f"reflect_pad({pixels}) needs images of more than {pixels} pixels on each side, not {size}"
        raise UserError(f"{few}; pad by fewer pixels.")
    return (size[0] + 2 * pixels, size[1] + 2 * pixels) if isinstance(size, tuple) else size + 2 * pixels


Check: TypeAlias = Callable[[Any], str | None]


class Op(NamedTuple):
    """What a pipe can do with an image.

    Attributes:
        function: takes the image, a random generator and the arguments, and returns the new image.
        arguments: name of an argument -> returns what is wrong with its value, as a phrase after the name, or None.
        output_size: (what is known of the image's size, arguments) -> what is known of the size of the result.
        takes_encoded: whether the function also takes an encoded image, of which it decodes no more than it needs.
    """

    function: Callable
    arguments: Mapping[str, Check] = MappingProxyType({})
    output_size: Callable[[KnownSize, dict[str, Any]], KnownSize] = same_size
    takes_encoded: bool = False


def at_most(most: float, whole: bool = False) -> Check:
    """Returns the check of a number from 0 to `most`."""
    return functools.partial(wrong_number, most=most, whole=whole)


METHOD = functools.partial(wrong_word, words=RESIZE_METHODS)
TORCH_METHOD = functools.partial(wrong_word, words=tuple(FILTERS))
NOT_NEGATIVE = at_most(math.inf)
AREAS = {"area_min": at_most(100), "area_max": at_most(100)}
JITTER = {"brightness": NOT_NEGATIVE, "contrast": NOT_NEGATIVE, "saturation": NOT_NEGATIVE, "hue": at_most(0.5)}

OPS: dict[str, Op] = {
    "autoaugment": Op(augment.autoaugment),
    "central_crop": Op(central_crop, {"size": wrong_size}, cropped_size, takes_encoded=True),
    "color_jitter": Op(augment.color_jitter, JITTER),
    "flip_lr": Op(flip_lr),
    "inception_crop": Op(
        inception_crop,
        {"size": wrong_size, **AREAS, "method": METHOD, "antialias": wrong_flag},
        stated_size,
        takes_encoded=True,
    ),
    "randaug": Op(augment.randaug, {"num_layers": at_most(math.inf, whole=True), "magnitude": NOT_NEGATIVE}),
    "random_crop": Op(random_crop, {"size": wrong_size}, cropped_size, takes_encoded=True),
    "random_erasing": Op(augment.random_erasing, {"probability": at_most(1), **AREAS}),
    "reflect_pad": Op(reflect_pad, {"pixels": at_most(MAX_SIDE, whole=True)}, padded_size),
    "resize": Op(resize, {"size": wrong_size, "method": METHOD, "antialias": wrong_flag}, stated_size),
    "resize_small": Op(
        resize_small, {"size": wrong_side, "method": METHOD, "antialias": wrong_flag}, shorter_side_size
    ),
    "three_augment": Op(augment.three_augment),
    "torch_center_crop": Op(torch_center_crop, {"size": wrong_size}, cropped_size, takes_encoded=True),
    "torch_random_resized_crop": Op(
        torch_random_resized_crop,
        {"size": wrong_size, **AREAS, "method": TORCH_METHOD},
        stated_size,
        takes_encoded=True,
    ),
    "torch_resize": Op(torch_resize, {"size": wrong_size, "method": TORCH_METHOD}, torch_resized_size),
    "value_range": Op(value_range, {"low": wrong_number, "high": wrong_number}),
}


class Call(NamedTuple):
    """A part of a pipe: the name of an op, and its checked arguments by name, defaults included."""

    op: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Preprocessor:
    """A parsed pipe: maps an image and a random generator to what the model reads. It can be pickled.

    Attributes:
        text: the pipe as stored with a model, with numbers for `{resolution}`.
        shape: (height, width, 3) of the result, for any image.
        calls: the ops before `value_range`, in order, with their arguments.
        value_range: the values that 0 and 255 become at the end.
    """

    text: str
    shape: tuple[int, int, int]
    calls: tuple[Call, ...]
    value_range: tuple[float, float]

    def apply_ops(self, image: RGB | EncodedImage, rng: Generator) -> Crop:
        """Runs the ops before `value_range`.

        Raises:
            UserError: the image is smaller than a crop.
            DecodeError: the image is unreadable, or would be resized to too many pixels.
        """
        name = image.name if isinstance(image, EncodedImage) else "of an array"
        if isinstance(image, EncodedImage) and not (self.calls and OPS[self.calls[0].op].takes_encoded):
            image = image.decode()
        try:
            for op, arguments in self.calls:
                image = OPS[op].function(image, rng, **arguments)
        except TooNarrow as error:
            raise DecodeError(f"cannot preprocess the image {name}: {error}") from error
        return image

    def why_too_small(self, height: int, width: int) -> str | None:
        """Returns why an image of this size is too small for the ops, or None if it is not."""
        size: KnownSize = (height, width)
        try:
            for op, arguments in self.calls:
                size = OPS[op].output_size(size, arguments)
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
        WrongText: an op or an argument is unknown or wrong.
        UserError: the size of the result is not fixed, a crop is larger than any image that reaches it, or the last op
            is not value_range.
    """
    text = fill_resolution(pipe, resolution)
    try:
        calls = parse_calls(text)
    except WrongText as error:
        raise WrongText(str(error), pipe, *error.texts) from None
    names = [name for name, _ in calls]
    if names[-1:] != ["value_range"] or names.count("value_range") != 1:
        raise UserError(
            f"the preprocessing {text!r} must contain value_range exactly once, as the last op, such as "
            "value_range(-1,1)"
        )
    size: KnownSize = None
    for name, arguments in calls:
        size = OPS[name].output_size(size, arguments)
    if not isinstance(size, tuple):
        raise UserError(
            f"the preprocessing {text!r} gives images of different sizes; "
            f"add resize({resolution}) or a crop, such as resize_small({resolution})|central_crop({resolution})"
        )
    if fast:
        calls = [Call(name, with_fast_resize(arguments)) for name, arguments in calls]
    low, high = calls[-1].arguments.values()
    return Preprocessor(text, (*size, 3), tuple(calls[:-1]), (float(low), float(high)))


def parse_calls(pipe: str) -> list[Call]:
    """Returns the calls of ops in a pipe with numbers for `{resolution}`; raises WrongText if one cannot be read."""
    parts = [part.strip() for part in pipe.split("|")]
    calls = []
    for part in parts[1:] if parts[0] == "decode" else parts:
        try:
            calls.append(parse_op(part, pipe))
        except UserError as error:
            raise WrongText(str(error), part.partition("(")[0]) from None
    return calls


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


def parse_op(part: str, pipe: str) -> Call:
    """Parses one `op(arguments)` of a pipe; raises UserError as `parse_pipe`, with the whole pipe in the message."""
    try:
        call = ast.parse(part, mode="eval").body
        name, args, keywords = (call.func, call.args, call.keywords) if isinstance(call, ast.Call) else (call, [], [])
        if not isinstance(name, ast.Name):
            raise SyntaxError
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested thousands of times
        raise UserError(f"cannot read {part!r} in the preprocessing {pipe!r}; write op(arguments)|op|...") from None
    op = OPS[choose("preprocessing op", name.id, OPS)]
    signature = inspect.Signature(list(inspect.signature(op.function).parameters.values())[2:])
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
    wrong = [f"{key} {fault}" for key, value in bound.arguments.items() if (fault := op.arguments[key](value))]
    if fault := wrong[0] if wrong else wrong_together(bound.arguments):
        raise UserError(f"wrong arguments in {part!r}: {fault}; the op is {name.id}{signature}")
    return Call(name.id, bound.arguments)
