"""The JSON files beside published weights, read alike whichever library wrote them.

The files may come from a stranger: their size is bounded, and each value is checked by whoever uses it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vit_jax import UserError, printable, user_errors
from vit_jax.json_text import to_json
from vit_jax.model import LOSSES, Model

CONFIG_FILE = "config.json"
MAX_BYTES = 2**24
LOSS_KEY = "vit_jax_loss"


class PublishedConfig(NamedTuple):
    """The statements of a published configuration about its model.

    Attributes:
        fields: flat keyword of `vit_jax.create` -> value, for fields that cannot be inferred from the arrays.
        resolution: (height, width) of the model's images, or None.
        preprocess: the pipe of operations that prepares the images, or None.
        class_names: the names of the classes in the order of the logits, or None.
        loss: the loss that the model was trained with, softmax or sigmoid; empty: not stated.
        sizes: flat keyword -> (key in the configuration, value), for fields that can also be inferred from the arrays.
    """

    fields: dict[str, Any]
    resolution: tuple[int, int] | None = None
    preprocess: str | None = None
    class_names: list[str] | None = None
    loss: str = ""
    sizes: Mapping[str, tuple[str, Any]] = MappingProxyType({})

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


def read_loss(content: Mapping[str, Any]) -> str:
    """Returns the loss that a configuration states under our own key `LOSS_KEY`; empty: it states no known loss."""
    stated = content.get(LOSS_KEY)
    return stated if stated in LOSSES else ""


def loss_key(model: Model) -> dict[str, str]:
    """Returns what to add to a configuration that we write: `LOSS_KEY` -> the loss of the model's head.

    The result is empty if the model has no head. The libraries that read these configurations ignore the key.
    """
    return {LOSS_KEY: model.loss} if model.field("num_classes") else {}


def read_json(path: Path) -> dict[str, Any]:
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
        UserError: as `read_json`.
    """
    content = read_json(folder / CONFIG_FILE)
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
