"""The optimizers: which fields each has, and what they are where a configuration leaves them unset."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError

# `optim.name` -> its fields in the group `optim`, with its authors' values (docs/optimizers.md).
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "moment_dtype": "float32"},
    "sgd": {"momentum": 0.9, "moment_dtype": "float32"},
    "lion": {"beta1": 0.9, "beta2": 0.99, "moment_dtype": "float32"},
}
OWN_FIELDS = tuple(dict.fromkeys(field for fields in OPTIMIZERS.values() for field in fields))


def set_optimizer_fields(optim: ConfigDict) -> None:
    """Sets the unset fields of the chosen optimizer."""
    for field, value in OPTIMIZERS[optim.name].items():
        if optim[field] is None:
            optim[field] = value


def unset_other_fields(optim: dict[str, Any]) -> None:
    """Unsets the fields of other optimizers, which earlier versions stored too."""
    for field in OWN_FIELDS:
        if field in optim and field not in OPTIMIZERS.get(optim.get("name", ""), OWN_FIELDS):
            optim[field] = None


def check_optimizer(optim: ConfigDict) -> None:
    """Checks that no field of another optimizer is set.

    Raises:
        UserError: one is.
    """
    for field in OWN_FIELDS:
        if optim[field] is not None and field not in OPTIMIZERS[optim.name]:
            owners = ", ".join(name for name, fields in OPTIMIZERS.items() if field in fields)
            raise UserError(
                f"optim.{field}={optim[field]} is a field of {owners}, and {optim.name} has none; leave it out, or "
                f"unset it with --config.optim.{field}=None."
            )
