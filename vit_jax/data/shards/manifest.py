"""What an `info.json` must hold, whoever wrote it; `records` says what it means."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from vit_jax import UserError

Fields = dict[str, tuple[str, Callable[[Any], bool]]]  # field -> what it must be, whether a value is


def is_whole(value: Any) -> bool:
    """Returns whether a value is 0, 1, 2, ... (`true` and 10.0 are not)."""
    return type(value) is int and value >= 0


def is_positive(value: Any) -> bool:
    """Returns whether a value is 1, 2, ..."""
    return is_whole(value) and value > 0


def is_text(value: Any) -> bool:
    """Returns whether a value is a string."""
    return isinstance(value, str)


def is_object(value: Any) -> bool:
    """Returns whether a value is a JSON object."""
    return isinstance(value, dict)


def is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    """Returns whether a value is a list of such elements."""
    return isinstance(value, list) and all(map(of, value))


SET: Fields = {
    "name": ("a string", is_text),
    "num_classes": ("a whole number above 0", is_positive),
    "class_names": ("null or a list of strings", lambda value: value is None or is_list(value, is_text)),
    "max_labels": ("null or a whole number above 0", lambda value: value is None or is_positive(value)),
    "made_from": ("an object", is_object),
    "splits": (
        "an object of lists of shards",
        lambda value: is_object(value) and all(is_list(listed, is_object) for listed in value.values()),
    ),
}
SHARD: Fields = {
    "name": ("a string", is_text),
    "records": ("a whole number", is_whole),
    "bytes": ("a whole number", is_whole),
    "files": ("a string", is_text),
    "left_out": ("a list of objects", lambda value: is_list(value, is_object)),
}
LEFT_OUT: Fields = {"index": ("a whole number", is_whole), "error": ("a string", is_text)}
SET_DEFAULTS: dict[str, Any] = {"class_names": None, "max_labels": None, "made_from": {}}
SHARD_DEFAULTS: dict[str, Any] = {"files": "", "left_out": []}


def check_info(info: Mapping[str, Any], path: str) -> None:
    """Raises UserError that names the first field of an `info.json` that is missing, or not as it must be."""
    require(SET, {**SET_DEFAULTS, **info}, path)
    names, num_classes = info.get("class_names"), info["num_classes"]
    if names is not None and len(names) != num_classes:
        raise UserError(f"cannot read {path}: class_names has {len(names)} names, but num_classes is {num_classes}")
    for split, listed in info["splits"].items():
        for number, shard in enumerate(listed):
            where = f"splits.{split}[{number}]."
            require(SHARD, {**SHARD_DEFAULTS, **shard}, path, where)
            for image, left_out in enumerate(shard.get("left_out", [])):
                require(LEFT_OUT, left_out, path, f"{where}left_out[{image}].")


def require(fields: Fields, values: Mapping[str, Any], path: str, where: str = "") -> None:
    """Raises UserError as `check` does; `where` stands before the field."""
    for field, (what, is_right) in fields.items():
        if field not in values:
            raise UserError(f"cannot read {path}: {where}{field} is missing; it must be {what}")
        if not is_right(values[field]):
            raise UserError(f"cannot read {path}: {where}{field} must be {what}, not {json.dumps(values[field]):.60}")
