"""What a configuration leaves open: durations in epochs become steps, unset fields of the optimizer its values."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, refuse
from vit_jax.config.fields import OPTIMIZERS
from vit_jax.config.make_config import rename_fields

MOST_STEPS = 2**31 - 1  # the state counts them in an int32
DURATIONS = ("total_steps", "warmup_steps", "eval_every")  # in steps; `epochs_field` names the same field in epochs


def unset_other_durations(config: ConfigDict, given: Mapping[str, Any]) -> None:
    """Unsets the field in epochs of each duration that the command line gives in steps, and vice versa.

    Args:
        config: the configuration, which is changed in place.
        given: name -> value of the fields that the command line sets. A duration given in both units is left alone, and
            so is the other unit of one that is unset.
    """
    for name in DURATIONS:
        for one, other in ((name, epochs_field(name)), (epochs_field(name), name)):
            if given.get(one) is not None and other not in given:
                config[other] = None


def count_steps(config: ConfigDict, name: str) -> int | None:
    """Returns a duration in steps, or None if it is set neither in steps nor in epochs.

    An epoch is `data.num_examples / batch` steps. The number of steps is rounded down, but a positive duration has at
    least one step.

    Args:
        config: the configuration; `data.num_examples` is needed if the duration is in epochs.
        name: the name of the duration in `DURATIONS`.

    Raises:
        UserError: there are more steps than a run can count.
    """
    epochs = config[epochs_field(name)]
    steps = config[name] if epochs is None else epochs * config.data.num_examples / config.batch
    if steps is None:
        return None
    if steps > MOST_STEPS:
        given = f"{name}={steps}" if epochs is None else f"{epochs_field(name)}={epochs:g}"
        raise UserError(f"{given} is more than the {MOST_STEPS:,} steps that a run can count; choose fewer.")
    return max(int(steps), 1) if steps > 0 else 0


def resolve_config(config: ConfigDict) -> ConfigDict:
    """Returns a locked copy with all durations in steps and all fields of the optimizer set, as of a run alone.

    The fields of durations in epochs are unset. `config.data.num_examples` must be set if a duration is in epochs.

    Raises:
        UserError: the warm-up, or what is left between it and the cooldown, does not fit into the run; or a duration
            has more steps than a run can count.
    """
    config = config.copy_and_resolve_references()
    with config.unlocked():
        rename_fields(config)
        set_optimizer_fields(config.optim)
        if config.step_numbers == "auto":
            config.step_numbers = "constants"
        epochs = config.eval_every_epochs
        steps = {name: count_steps(config, name) for name in DURATIONS}
        for name, value in steps.items():
            config[name], config[epochs_field(name)] = value, None
        config.warmup_steps = config.warmup_steps or 0
        config.eval_every = config.eval_every or max(config.total_steps, 1)
        if epochs:  # an epoch of few images would fill disk and log
            config.eval_every = max(config.eval_every, config.log_every)
    if config.warmup_steps > config.total_steps > 0:
        excess = f"the warm-up has {config.warmup_steps} steps, more than the {config.total_steps} of the run"
        raise UserError(f"{excess}; lower --config.warmup_steps or --config.warmup_epochs.")
    refuse(
        (
            config.total_steps == config.warmup_steps == 1,
            "the learning rate of the only step would be 0, as the warm-up starts at 0; set --config.warmup_steps=0.",
        ),
        (
            config.warmup_steps + config.cooldown_steps > config.total_steps > 0,
            f"the learning rate would not reach base_lr: the warm-up of {config.warmup_steps} and the cooldown of "
            f"{config.cooldown_steps} steps are longer than the {config.total_steps} steps of the run; lower "
            "--config.cooldown_steps or --config.warmup_steps.",
        ),
    )
    return config.lock()


def set_optimizer_fields(optim: ConfigDict) -> None:
    """Sets the unset fields of the chosen optimizer to the values in `OPTIMIZERS`, in place."""
    for field, value in OPTIMIZERS[optim.name].defaults.items():
        if optim[field] is None:
            optim[field] = value


def epochs_field(name: str) -> str:
    """Returns the name of the field that gives a duration in epochs instead of steps."""
    return f"{name.removesuffix('_steps')}_epochs"
