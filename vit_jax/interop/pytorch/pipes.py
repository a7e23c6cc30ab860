"""Converts preprocessing between our pipes of operations and the sizes that PyTorch's libraries state."""

import ast
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_jax import UserError
from vit_jax.model import Model

# Our operation -> the filter with which it resizes if it states none.
RESIZES = {"torch_resize": "bicubic", "resize_small": "bilinear", "resize": "bilinear"}
CROPS = ("torch_center_crop", "central_crop")
# Operation that other libraries have too -> the names of its arguments, in order.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(RESIZES, ("size", "method", "antialias")),
    **dict.fromkeys(CROPS, ("size",)),
    "value_range": ("low", "high"),
}
FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # in the order of Pillow's numbers


class Preparation(NamedTuple):
    """The preparation of images: they are resized, then cropped, then mapped to a range."""

    resize: int | tuple[int, int] | None  # the shorter side, or (height, width); None: not resized
    crop: tuple[int, int] | None
    method: str  # one of FILTERS
    values: tuple[float, float] = (-1.0, 1.0)  # what 0 and 255 become


def write_pipe(prepared: Preparation) -> str:
    """Returns the pipe of operations for a preparation. It gives the same pixels as torchvision with Pillow."""
    parts = []
    if prepared.resize is not None:
        size = str(prepared.resize).replace(" ", "")
        parts.append(f"torch_resize({size},{prepared.method!r})")
    if prepared.crop is not None and prepared.crop != prepared.resize:
        height, width = prepared.crop
        parts.append(f"torch_center_crop({height if height == width else f'({height},{width})'})")
    low, high = prepared.values
    return "|".join([*parts, f"value_range({low:g},{high:g})"])


def read_pipe(pipe: str) -> Preparation:
    """Returns how a pipe prepares images. TensorFlow's filter is replaced by Pillow's filter of the same name.

    TensorFlow's filters `area` and `fast` become bilinear.

    Raises:
        UserError: the pipe does something that a `Preparation` cannot state.
    """
    parts = [part.strip() for part in pipe.split("|")]
    calls = [_parse_call(part, pipe) for part in (parts[1:] if parts[0] == "decode" else parts)]
    prepared = Preparation(None, None, "bicubic")
    for name, arguments in calls:
        if name in RESIZES and prepared.resize is prepared.crop is None:
            size, method = arguments["size"], arguments.get("method", RESIZES[name])
            if name == "resize" and isinstance(size, int):
                size = (size, size)
            prepared = prepared._replace(resize=size, method="bilinear" if method in ("area", "fast") else method)
        elif name in CROPS and prepared.crop is None:
            size = arguments["size"]
            prepared = prepared._replace(crop=size if isinstance(size, tuple) else (size, size))
        elif name == "value_range" and (name, arguments) == calls[-1]:
            prepared = prepared._replace(values=(float(arguments["low"]), float(arguments["high"])))
        else:
            raise _unsupported(pipe)
    return prepared


def output_size(pipe: str) -> tuple[int, int] | None:
    """Returns (height, width) of the images that a pipe gives; None if `read_pipe` cannot tell."""
    try:
        prepared = read_pipe(pipe)
    except UserError:
        return None
    size = prepared.crop or prepared.resize
    return size if isinstance(size, tuple) else None


def scale_pipe(pipe: str, before: tuple[int, int], size: tuple[int, int]) -> str:
    """Returns a pipe that gives images of another size and ends with the same operation as the given pipe.

    A pipe that gives this size already is returned as it is. Otherwise all sizes in the pipe are scaled in proportion,
    with halves rounded up. If the pipe's sizes cannot be read or the aspect ratio changes, the new pipe resizes the
    whole image.

    Args:
        pipe: the given pipe of operations.
        before: the size (height, width) of the images that `pipe` gives, for a pipe whose sizes cannot be read.
        size: the size (height, width) of the images that the new pipe gives.
    """
    own = output_size(pipe)
    if (own or before) == size:
        return pipe
    *parts, last = pipe.split("|")
    if own is None or own[0] * size[1] != own[1] * size[0]:
        return f"resize(({size[0]},{size[1]}))|{last}"
    # In these operations nothing but sizes is a number.
    scaled = [
        re.sub(r"\d+", lambda match: str((2 * int(match[0]) * size[0] + own[0]) // (2 * own[0])), "|".join(parts))
    ]
    return "|".join([*scaled, last])


def _parse_call(part: str, pipe: str) -> tuple[str, dict[str, Any]]:
    """Returns the operation in a part of a pipe, and name -> value of its arguments."""
    try:
        call: Any = ast.parse(part, mode="eval").body
        name = call.func.id
        given = {str(keyword.arg): keyword.value for keyword in call.keywords}
        given |= dict(zip(ARGUMENTS[name], call.args, strict=False))
        return name, {argument: ast.literal_eval(value) for argument, value in given.items()}
    except (SyntaxError, ValueError, AttributeError, KeyError):
        raise _unsupported(pipe) from None


def _unsupported(pipe: str) -> UserError:
    return UserError(f"the layouts timm and huggingface cannot store the preprocessing {pipe!r}; use --layout=ours")


def preparation_of(model: Model) -> tuple[Preparation, list[float], list[float]]:
    """Returns how a model's images are prepared, and the mean and standard deviation of their values in [0, 1].

    The model itself normalises the values v that its pipe gives: ((v + 1) / 2 - mean) / std. The returned mean and
    standard deviation combine this with the range of the pipe. If the model has no pipe, images are taken to be resized
    to its resolution.

    Raises:
        UserError: the pipe does something that a `Preparation` cannot state.
    """
    prepared = Preparation(model.image_size, None, "bicubic")
    if model.preprocess is not None:
        prepared = read_pipe(model.preprocess)
    low, high = prepared.values
    scale = (high - low) / 2
    mean, std = (model.field(name) or (0.5, 0.5, 0.5) for name in ("image_mean", "image_std"))  # a BiT has no fields
    return prepared, [(m - (low + 1) / 2) / scale for m in mean], [s / scale for s in std]
