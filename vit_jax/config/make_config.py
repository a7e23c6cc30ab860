"""Makes configurations from the rows of `fields.py`, where the defaults stand, and tells what a configuration holds."""

from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from vit_jax.config.fields import EVAL_KINDS, FIELDS, RENAMED, Field, Place, eval_rows, place_of


def get_config() -> ConfigDict:
    """Returns all fields with their defaults. The configuration is locked: setting an unknown field is an error."""
    config = ConfigDict()
    for name, field in FIELDS.items():
        *groups, key = name.split(".")
        if groups == ["evals", "*"]:
            if "evals" not in config:
                config.evals = {"test": evaluation("classify")}
            continue
        inner = config
        for group in groups:
            if group not in inner:
                inner[group] = ConfigDict()
            inner = inner[group]
        inner[key] = default_of(field)
        if field.renamed_from:
            inner[field.renamed_from.rpartition(".")[2]] = inner.get_ref(key)
    return config.lock()


def evaluation(kind: str, **fields: object) -> ConfigDict:
    """Returns the configuration of an evaluation, with defaults for the fields that are not given.

    A recipe adds an evaluation with two lines: `with config.unlocked():` and
    `config.evals.NAME = base.evaluation("fewshot")`, or `base.evaluation(**config.evals.test)` for a copy. A
    `ConfigDict(config.evals.test)` is none: both would share the fields that are unset.

    Args:
        kind: the kind of evaluation, a key of `EVAL_KINDS`.
        **fields: values of its fields.
    """
    defaults = {name: default_of(field) for name, field in eval_rows(kind).items()} | {"kind": kind}
    made = ConfigDict(defaults | (dict(EVAL_KINDS[kind].defaults) if kind in EVAL_KINDS else {}))
    made.update(fields)
    return made


def default_of(field: Field) -> Any:
    """Returns the default of a field. An unset field is a typed placeholder."""
    if field.auto:
        return FieldReference(field.default, field_type=object)  # a number or a word
    return placeholder(field.optional) if field.optional else field.default


def flatten_config(config: ConfigDict) -> dict[str, Any]:
    """Returns dotted name -> value of the fields, without those that are names of earlier versions."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= {f"{key}.{inner}": leaf for inner, leaf in flatten_config(value).items()}
        else:
            flat[key] = value
    return {name: value for name, value in flat.items() if name not in RENAMED}


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


def list_places(config: ConfigDict) -> Iterator[tuple[str, str, Place]]:
    """Yields dotted name, value and kind of place of each set field that names data, weights, a folder or a file."""
    for name, value in flatten_config(config).items():
        if value and (place := place_of(name)):
            yield name, value, place
