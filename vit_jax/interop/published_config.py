"""The JSON files beside the weights of timm and transformers: their keys, their values, and their preprocessing.

The files may come from a stranger: their size is bounded, and each value is checked by whoever uses it. Preprocessing
is a pipe of operations here, and sizes there.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vit_jax import UserError, data, printable, user_errors
from vit_jax.json_text import to_json
from vit_jax.model import LOSSES, Model

CONFIG_FILE = "config.json"
MAX_BYTES = 2**24
LOSS_KEY = "vit_jax_loss"
PILLOW_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # in the order of Pillow's numbers


class PublishedConfig(NamedTuple):
    """The statements of a published configuration about its model.

    Attributes:
        fields: flat keyword of `vit_jax.create` -> value, for fields that cannot be inferred from the arrays.
        resolution: (height, width) of the model's images, or None.
        preprocess: the pipe of operations that prepares the images, or None.
        class_names: the names of the classes in the order of the logits, or None.
        loss: the loss that the model was trained with, softmax or sigmoid; empty: not stated.
        sizes: flat keyword -> (key in the configuration, value), for fields that can also be inferred from the arrays.
        licence: the licence of the weights, as the Hugging Face hub names it; empty: not stated.
    """

    fields: dict[str, Any]
    resolution: tuple[int, int] | None = None
    preprocess: str | None = None
    class_names: list[str] | None = None
    loss: str = ""
    sizes: Mapping[str, tuple[str, Any]] = MappingProxyType({})
    licence: str = ""

    def check_sizes(self, fields: Mapping[str, Any]) -> None:
        """Compares `sizes` with the fields that follow from the arrays.

        Raises:
            UserError: some values differ. The message names every key.
        """
        differ = [
            f"{key} is {value!r}, not {fields[name]!r}"
            for name, (key, value) in self.sizes.items()
            if name in fields and value != fields[name]
        ]
        if differ:
            raise UserError(f"{CONFIG_FILE} contradicts the arrays of the file: {', '.join(differ)}")


class Keys(NamedTuple):
    """The keys of a configuration.

    Attributes:
        file: the name of the configuration in messages.
        read: the keys whose values are read.
        without_effect: the keys that change nothing of what a trained model computes: those of training, of downloads
            and of outputs, and those of sizes that arrays tell.
        supported: key -> the values with which the model is one of ours. None always stands for the default.
    """

    file: str
    read: frozenset[str]
    without_effect: frozenset[str]
    supported: Mapping[str, tuple[Any, ...]]

    def check(self, content: Mapping[str, Any], more: frozenset[str] = frozenset()) -> None:
        """Checks that nothing in a configuration is passed over.

        Args:
            content: the configuration.
            more: further keys that are known, with any value.

        Raises:
            UserError: a key is unknown, or has a value that is not supported.
        """
        for key, value in content.items():
            if key in self.supported.keys() - more and value is not None and value not in self.supported[key]:
                raise UserError(
                    f"{self.file} states {key} {printable(repr(value), 60)}, which vit_jax does not compute, but only "
                    f"{' or '.join(map(repr, self.supported[key])) or 'the default'}"
                )
            if key not in self.read | self.without_effect | more | self.supported.keys() and not key.startswith("_"):
                raise UserError(
                    f"{self.file} states {printable(key, 60)}, which vit_jax does not know; if it does not change what "
                    "the model computes, remove it from there"
                )


def split_keys(text: str) -> frozenset[str]:
    """Returns the set of the keys that a text lists."""
    return frozenset(text.split())


def read_loss(content: Mapping[str, Any]) -> str:
    """Returns the loss that a configuration states under our own key `LOSS_KEY`; empty: it states no known loss."""
    stated = content.get(LOSS_KEY)
    return stated if stated in LOSSES else ""


def loss_key(model: Model) -> dict[str, str]:
    """Returns what to add to a configuration that we write: `LOSS_KEY` -> the loss of the model's head.

    The result is empty if the model has no head. The libraries that read these configurations ignore the key.
    """
    return {LOSS_KEY: model.loss} if model.field("num_classes") else {}


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; an empty dict if there is no file.

    Raises:
        UserError: the file is too large or contains something else.
    """
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{path.name} is too large to describe a model")
    with user_errors(f"{path.name} is not JSON", ValueError, RecursionError):
        content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise UserError(f"{path.name} does not describe a model")
    return content


def stated_kind(folder: Path) -> str | None:
    """Returns a phrase such as "a vit of transformers" for the model that a folder's configuration states, or None.

    Raises:
        UserError: as `read_json_object`.
    """
    content = read_json_object(folder / CONFIG_FILE)
    if isinstance(content.get("model_type"), str):
        return f"a {printable(content['model_type'], 60)} of transformers"
    return f"timm's {printable(content['architecture'], 60)}" if isinstance(content.get("architecture"), str) else None


def json_text(content: Mapping[str, Any]) -> str:
    """Returns the text of a JSON file."""
    return to_json(content, indent=2) + "\n"


def read_int(value: Any, name: str) -> int:
    """Returns a value that must be a whole number of at least 1.

    Raises:
        UserError: the value is something else. `name` is its key, for the message.
    """
    if type(value) is not int or not 0 < value < 2**31:
        raise UserError(f"{name} in its configuration must be a whole number above 0, not {value!r}")
    return value


def read_float(value: Any, name: str) -> float:
    """Returns a value that must be a number; raises as `read_int`."""
    if type(value) not in (int, float) or not abs(value) < 1e6:
        raise UserError(f"{name} in its configuration must be a number, not {value!r}")
    return float(value)


def read_choice(value: Any, options: Iterable[str], name: str) -> str:
    """Returns a value that must be one of `options`; raises as `read_int`."""
    known = list(options)
    if value not in known:
        raise UserError(f"{name} in its configuration must be one of {', '.join(known)}, not {value!r}")
    return value


def colours(value: Any, name: str) -> tuple[float, ...]:
    """Returns a value that must be three numbers, for red, green and blue; raises as `read_int`."""
    if not isinstance(value, Sequence) or len(value) != 3:
        raise UserError(f"{name} in its configuration must be three numbers, not {value!r}")
    return tuple(read_float(one, name) for one in value)


def name_list(names: Any, count: int) -> list[str] | None:
    """Returns the names of `count` classes from a list, or from a mapping whose keys are the indices of the classes.

    Returns None if the names do not fit, or if they only number the classes, as `LABEL_0` does.
    """
    if isinstance(names, Mapping):
        names = [names.get(str(index)) for index in range(count)] if len(names) == count else None
    if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str) for name in names):
        return None
    return None if count and names == [f"LABEL_{index}" for index in range(count)] else names


class Preparation(NamedTuple):
    """The preparation of images: they are resized, then cropped, then mapped to a range."""

    resize: int | tuple[int, int] | None  # the shorter side, or (height, width); None: not resized
    crop: tuple[int, int] | None
    method: str  # one of PILLOW_FILTERS
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
    try:
        calls = data.parse_calls(pipe)
    except UserError:
        raise _unsupported(pipe) from None
    prepared = Preparation(None, None, "bicubic")
    for name, arguments in calls:
        if name in ("torch_resize", "resize_small", "resize") and prepared.resize is prepared.crop is None:
            size, method = arguments["size"], arguments["method"]
            if name == "resize" and isinstance(size, int):
                size = (size, size)
            prepared = prepared._replace(resize=size, method="bilinear" if method in ("area", "fast") else method)
        elif name in ("torch_center_crop", "central_crop") and prepared.crop is None:
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
