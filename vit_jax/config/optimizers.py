"""The optimizers: the fields that each one has, and their values if a configuration leaves them unset."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, refuse

# `optim.name` -> {field of the group `optim` that this optimizer uses: value of its authors} (docs/optimizers.md).
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "moment_dtype": "float32"},
    "sgd": {"momentum": 0.9, "moment_dtype": "float32"},
    "lion": {"beta1": 0.9, "beta2": 0.99, "moment_dtype": "float32"},
    "lamb": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "moment_dtype": "float32"},
    "adafactor": {"beta2": 0.999, "momentum": 0.9, "moment_dtype": "bfloat16"},
    "muon": {"momentum": 0.95, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "moment_dtype": "float32"},
    "schedule_free_adamw": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
}
# `optim.name` -> the fields whose values the state contains. The state goes on with them when a run is resumed.
STORED_FIELDS: Mapping[str, tuple[str, ...]] = {"schedule_free_adamw": ("beta1",)}
OWN_FIELDS = tuple(dict.fromkeys(field for fields in OPTIMIZERS.values() for field in fields))


def set_optimizer_fields(optim: ConfigDict) -> None:
    """Sets the unset fields of the chosen optimizer to the values in `OPTIMIZERS`, in place."""
    for field, value in OPTIMIZERS[optim.name].items():
        if optim[field] is None:
            optim[field] = value


def unset_other_fields(optim: dict[str, Any]) -> None:
    """Unsets the fields that the chosen optimizer does not use, in place. Earlier versions stored them too."""
    for field in OWN_FIELDS:
        if field in optim and field not in OPTIMIZERS.get(optim.get("name", ""), OWN_FIELDS):
            optim[field] = None


def check_optimizer(optim: ConfigDict) -> None:
    """Checks that the fields fit the chosen optimizer and each other.

    Raises:
        UserError: a field belongs to another optimizer, or two fields contradict each other.
    """
    for field in OWN_FIELDS:
        if optim[field] is not None and field not in OPTIMIZERS[optim.name]:
            owners = ", ".join(name for name, fields in OPTIMIZERS.items() if field in fields)
            raise UserError(
                f"optim.{field}={optim[field]} is not used by optim.name={optim.name}, only by {owners}; leave it out "
                f"or, if the recipe sets it, add --config.optim.{field}=None."
            )
    refuse(
        (
            optim.name == "lamb" and optim.decay_factor != "rate",
            "lamb scales the weight decay together with the update; set --config.optim.decay_factor=rate, and divide "
            "optim.weight_decay by base_lr to keep the strength of the decay.",
        ),
        (
            optim.name == "schedule_free_adamw" and optim.ema_decay,
            "schedule_free_adamw already averages the parameters that are evaluated; set --config.optim.ema_decay=0.",
        ),
        (
            optim.name == "schedule_free_adamw" and optim.beta1 == 0,
            "schedule_free_adamw divides by optim.beta1, which must be above 0; set --config.optim.beta1=0.9.",
        ),
        (
            not optim.sam_rho and (optim.sam_alpha or optim.sam_rho_min is not None),
            "optim.sam_alpha and optim.sam_rho_min need optim.sam_rho above 0; set optim.sam_rho, or leave both out.",
        ),
        (
            (optim.sam_rho_min or 0) > optim.sam_rho,
            f"optim.sam_rho_min={optim.sam_rho_min} must be at most optim.sam_rho={optim.sam_rho}.",
        ),
    )
