"""The default configuration, from which recipes start."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from vit_jax.config.fields import FIELDS, Field


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
    defaults = {name: default_of(field, kind) for name, field in eval_rows(kind).items()}
    made = ConfigDict(defaults | {"kind": kind})
    made.update(fields)
    return made


def eval_rows(kind: str) -> Mapping[str, Field]:
    """Returns name -> declaration of the fields of a kind of evaluation, with names without `evals.*.`."""
    rows = {name.removeprefix("evals.*."): row for name, row in FIELDS.items() if name.startswith("evals.*.")}
    return {name: row for name, row in rows.items() if not row.kinds or kind in row.kinds}


def default_of(field: Field, kind: str = "") -> Any:
    """Returns the default of a field. An unset field is a typed placeholder.

    Args:
        field: the declaration of the field.
        kind: the kind of evaluation that the field belongs to; empty: no field of an evaluation.
    """
    value = field.defaults.get(kind, field.default)
    if field.auto:
        return FieldReference(value, field_type=object)  # a number or a word
    return placeholder(field.optional) if field.optional else value
