"""The names of fields: dotted names, names in earlier versions, and what follows from a name."""

import re
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config.fields import FIELDS, RENAMED, Affects, OnResume, Place, rule_of


def flatten_config(config: ConfigDict) -> dict[str, Any]:
    """Returns dotted name -> value of the fields, without those that are names of earlier versions."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= {f"{key}.{inner}": leaf for inner, leaf in flatten_config(value).items()}
        else:
            flat[key] = value
    return {name: value for name, value in flat.items() if name not in RENAMED}


def current_name(field: str) -> str:
    """Returns the present name of a field, whose name may be that of an earlier version."""
    return RENAMED.get(field, field)


def rename_fields(fields: Any) -> None:
    """Replaces names of earlier versions by the present ones, in place.

    If a field has both names, the value under the present name is kept.

    Args:
        fields: nested dicts, or an unlocked configuration.
    """
    for old, new in RENAMED.items():
        *groups, name = old.split(".")
        inner = fields
        for group in groups:
            inner = inner.get(group, {})
        if name in inner:
            value = inner[name]
            del inner[name]
            name = new.rpartition(".")[2]
            inner[name] = inner.get(name, value)


def declared_name(name: str) -> str:
    """Returns the name under which a field is declared in `FIELDS`: `evals.test.split` -> `evals.*.split`."""
    return re.sub(r"^evals\.[^.]+\.", "evals.*.", name)


def list_places(config: ConfigDict) -> Iterator[tuple[str, str, Place]]:
    """Yields dotted name, value and kind of place of each set field that names data, weights, a folder or a file."""
    for name, value in flatten_config(config).items():
        if value and (place := place_of(name)):
            yield name, value, place


def place_of(name: str) -> Place | None:
    """Returns what a field names in files; None: nothing, or there is no such field."""
    field = FIELDS.get(declared_name(name))
    return field.place if field else None


def resume_rule(name: str) -> OnResume:
    """Returns what happens when a run is resumed with another value of a field.

    The field may be one that this version does not have.
    """
    field = FIELDS.get(declared_name(name))
    return field.rule if field else rule_of(name)


def model_fields(*affects: Affects) -> list[str]:
    """Returns the names, without `model.`, of the model's fields that affect one of these; never `name`."""
    rows = {name.removeprefix("model."): row for name, row in FIELDS.items() if name.startswith("model.")}
    return [name for name, row in rows.items() if row.affects in affects and name != "name"]


# Fields of a model that depend on the machine or on the training, not on the weights.
EXECUTION = ("grad_dtype", *model_fields(Affects.EXECUTION))
