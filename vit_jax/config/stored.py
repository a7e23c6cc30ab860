"""Stores a configuration as a JSON file, which later versions of the package can read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, without_queries
from vit_jax.config.fields import FIELDS, OF_OPTIMIZERS, OPTIMIZERS, REMOVED, Field
from vit_jax.config.make_config import rename_fields
from vit_jax.storage import atomic_write

# The version in config.json. It rises when a name or the meaning of a field changes. The first files have none.
CONFIG_VERSION = 2


def save_config(config: ConfigDict, path: Path) -> None:
    """Writes the configuration as JSON, `without_queries` of addresses, atomically."""
    text = json.dumps({"version": CONFIG_VERSION, **hide_queries(config.to_dict())}, indent=2) + "\n"
    with atomic_write(path) as temporary:
        temporary.write_text(text)


def hide_queries(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns nested fields in which each text is `without_queries`."""
    texts = {name: without_queries(value) for name, value in fields.items() if isinstance(value, str)}
    groups = {name: hide_queries(value) for name, value in fields.items() if isinstance(value, dict)}
    return fields | texts | groups


def load_config(path: Path) -> ConfigDict:
    """Reads a configuration that this or an earlier version of the package wrote by `save_config`.

    Raises:
        UserError: the file cannot be read, is damaged, or was written by a later version.
    """
    try:
        return parse_config(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from error


def parse_config(text: bytes, path: str, known: Mapping[str, Field] = FIELDS) -> ConfigDict:
    """Returns the configuration in the text of a `config.json`, locked, with the names and fields of this version.

    Args:
        text: the content of the file.
        path: the path of the file, for messages.
        known: name -> declaration of the fields of this version.

    Raises:
        UserError: the text is damaged, was written by a later version, or has a value of a removed field that this
            version cannot continue.
    """
    try:
        fields = json.loads(text)
        if fields.pop("version", 0) > CONFIG_VERSION:
            advice = "install that version to continue the run."
            raise UserError(f"{path} was written by a later version of vit_jax; {advice}")
        rename_fields(fields)
        _remove_fields(fields, path)
        _unset_other_fields(fields.get("optim", {}))
        for name, field in known.items():
            if field.later:
                _set_missing(fields, name.split("."), field.default if field.before is None else field.before)
        evaluations = fields["evals"].values() if "evals" in fields else ()
        for group in (fields, fields["model"], fields.get("task", {}), *evaluations):
            group |= {name: tuple(value) for name, value in group.items() if isinstance(value, list)}
        return ConfigDict(fields).lock()
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{path} is damaged: it is not a configuration. Replace it with an intact copy.") from error


def _set_missing(fields: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets a field in nested dicts if it is absent, in place.

    Args:
        fields: the nested dicts.
        path: the parts of the field's dotted name. `*` stands for every dict at that place.
        value: the value to set.
    """
    first, *rest = path
    if not rest:
        fields.setdefault(first, value)
    elif first == "*":
        for inner in fields.values():
            _set_missing(inner, rest, value)
    else:
        _set_missing(fields.setdefault(first, {}), rest, value)


def _remove_fields(fields: dict[str, Any], path: str) -> None:
    """Deletes the fields that this version no longer has, in place.

    Raises:
        UserError: one of them has another value than the one that this version behaves like.
    """
    for name, (accepted, since) in REMOVED.items():
        *groups, key = name.split(".")
        inner = fields
        for group in groups:
            inner = inner.get(group, {})
        value = inner.pop(key, accepted)
        if value != accepted:
            raise UserError(
                f"{path} has {name}={value}, but version {since} removed this field and behaves like {accepted}; use "
                "the version that wrote the file."
            )


def _unset_other_fields(optim: dict[str, Any]) -> None:
    """Unsets the fields that the chosen optimizer does not use, in place. Earlier versions stored them too."""
    if kind := OPTIMIZERS.get(optim.get("name", "")):
        optim.update(dict.fromkeys(field for field in OF_OPTIMIZERS if field in optim and field not in kind.defaults))
