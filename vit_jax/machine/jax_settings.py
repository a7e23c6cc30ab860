"""The settings of jax that change which numbers are computed, and that a machine may set for other programs."""

import os

import jax

from vit_jax import UserError, tell

# Name of a setting -> the value with which vit_jax computes. Other values make float64 parameters, draw other random
# numbers on another number of devices, or refuse what NumPy does.
SETTINGS = {
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_threefry_partitionable": True,
    "jax_transfer_guard": "allow",
}


def reset_settings() -> None:
    """Gives the settings their values, in this process and in those that it starts, and tells which were others."""
    for name, value in SETTINGS.items():
        if _differs(name):
            tell(f"vit_jax: {name.upper()}={os.environ.get(name.upper())} is ignored; it is {value} here.")
            jax.config.update(name, value)
            os.environ.pop(name.upper(), None)


def check_settings() -> None:
    """Checks the settings, for programs that use the package as a library.

    Raises:
        UserError: a setting has another value.
    """
    for name in filter(_differs, SETTINGS):
        raise UserError(f"vit_jax does not train with {name}; set jax.config.update({name!r}, {SETTINGS[name]!r}).")


def _differs(name: str) -> bool:
    now = getattr(jax.config, name, None)  # None: this version of jax has no such setting
    return now is not None and str(getattr(now, "value", now)) != str(SETTINGS[name])
