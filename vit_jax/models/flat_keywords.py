"""The fields of a nested model spec by flat keyword: how they are declared, listed, and replaced by a user's values."""

import dataclasses
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin

from vit_jax import UserError, choose
from vit_jax.config import FIELDS, Field, check_value

MAX_INTEGER = 2**40


def row(name: str, default: Any = None) -> Any:
    """Returns the declaration of a field of a spec that a row of `FIELDS` declares: default, meaning and synonyms.

    Args:
        name: the name of the row, whose last part is the flat keyword of the field.
        default: what the field is if the row's default, unset or auto, leaves it to the model; None: the row's default.
    """
    default = FIELDS[name].default if default is None else default
    return dataclasses.field(default=default, metadata={"keyword": name.rpartition(".")[2], "row": name})


def field_rows(spec: Any) -> dict[str, Field]:
    """Returns flat keyword -> row, for every field that a configuration has."""
    return {_keyword(one): FIELDS[one.metadata["row"]] for _, one in _declarations(spec) if "row" in one.metadata}


def flatten_spec(spec: Any) -> dict[str, Any]:
    """Returns every field of a spec and of its parts by its flat keyword, which is unique over all parts."""
    return {_keyword(declared): getattr(part, declared.name) for part, declared in _declarations(spec)}


def field_words(spec: Any) -> dict[str, tuple[str, ...]]:
    """Returns flat keyword -> accepted words, for every field that accepts only certain words."""
    return {_keyword(one): get_args(one.type) for _, one in _declarations(spec) if get_origin(one.type) is Literal}


def replace_fields(spec: Any, **flat: Any) -> Any:
    """Returns the canonical form of a spec with some fields replaced, in whichever part they are.

    Args:
        spec: the spec to start from.
        **flat: values by flat keyword; None leaves the field unchanged.

    Raises:
        UserError: a field or a word is unknown, a value has another type or is out of its range, or values contradict
            each other.
    """
    known, words, rows = flatten_spec(spec), field_words(spec), field_rows(spec)
    given = {}
    for name, value in flat.items():
        choose("model field", name, known)
        if value is not None:
            given[name] = _converted(name, value, known[name])
            if name in words:
                choose(name, given[name], words[name])
            elif name in rows and name != "resolution":  # of which `image_size` knows more
                check_value(name, given[name], rows[name])
    return _replaced(spec, given).canonical


def image_size(resolution: Any) -> tuple[int, int]:
    """Returns (height, width) in pixels of a resolution as a user gives it.

    Raises:
        UserError: it is not one or two sizes, or one is below 1 pixel.
    """
    size = _converted("resolution", resolution, 0)
    height, width = size if isinstance(size, tuple) else (size, size)
    if min(height, width) < 1:
        raise UserError(f"resolution must be at least 1 pixel, not {size}.")
    return height, width


def _replaced(part: Any, given: dict[str, Any]) -> Any:
    changes: dict[str, Any] = {}
    for declared in fields(part):
        value = getattr(part, declared.name)
        if is_dataclass(value):
            changes[declared.name] = _replaced(value, given)
        elif _keyword(declared) in given:
            changes[declared.name] = given[_keyword(declared)]
    return replace(part, **changes)


def _declarations(part: Any) -> Iterator[tuple[Any, dataclasses.Field]]:
    """Yields every field of a spec and of its parts, each with the part it belongs to."""
    for declared in fields(part):
        value = getattr(part, declared.name)
        yield from _declarations(value) if is_dataclass(value) else [(part, declared)]


def _keyword(declared: dataclasses.Field) -> str:
    return declared.metadata.get("keyword", declared.name)


def _converted(name: str, value: Any, example: Any) -> Any:
    """Returns the value of a field, from JSON, NumPy or a configuration, in the type of `example`.

    Args:
        name: the flat keyword of the field.
        value: the user's value.
        example: any valid value of the field.

    Raises:
        UserError: the value has another type, or an integer is too large.
    """
    if hasattr(value, "tolist"):  # NumPy's
        value = value.tolist()
    if name == "resolution" and isinstance(value, tuple | list):
        if len(value) != 2:
            raise UserError(f"resolution must be one size or (height, width), not {value!r}.")
        height, width = (_converted(name, side, 0) for side in value)
        return height if height == width else (height, width)
    if isinstance(example, tuple):
        if not isinstance(value, tuple | list):
            kind = "numbers" if example and isinstance(example[0], float) else "whole numbers"
            raise UserError(f"{name} must be a list of {kind}, not {value!r}.")
        return tuple(_converted(name, item, example[0] if example else 0) for item in value)
    wanted = int if name == "resolution" else type(example)
    accepted = {int: int, float: int | float, str: str, bool: bool}[wanted]
    whole = wanted is int and isinstance(value, float) and value.is_integer()
    if (not isinstance(value, accepted) and not whole) or (isinstance(value, bool) and wanted is not bool):
        words = {int: "a whole number", float: "a number", str: "a string", bool: "True or False"}
        raise UserError(f"{name} must be {words[wanted]}, not {value!r}.")
    if wanted is int and abs(value) > MAX_INTEGER:
        raise UserError(f"{name} must be at most {MAX_INTEGER:,}.")
    return wanted(value)
