"""Durations: given in steps or in epochs, resolved to steps."""

from ml_collections import ConfigDict

from vit_jax import UserError
from vit_jax.config.names import rename_fields
from vit_jax.config.optimizers import set_optimizer_fields

DURATIONS = ("total_steps", "warmup_steps", "eval_every")  # in steps; `epochs_field` names the same field in epochs


def unset_other_durations(config: ConfigDict, given: set[str]) -> None:
    """Unsets the field in epochs of each duration that the command line gives in steps, and vice versa.

    Args:
        config: the configuration, which is changed in place.
        given: the names of the fields that the command line sets. A duration given in both units is left alone.
    """
    for name in DURATIONS:
        for one, other in ((name, epochs_field(name)), (epochs_field(name), name)):
            if one in given and other not in given:
                config[other] = None


def count_steps(config: ConfigDict, name: str) -> int | None:
    """Returns a duration in steps, or None if it is set neither in steps nor in epochs.

    An epoch is `data.num_examples / batch` steps. The number of steps is rounded down, but a positive duration has at
    least one step.

    Args:
        config: the configuration; `data.num_examples` is needed if the duration is in epochs.
        name: the name of the duration in `DURATIONS`.
    """
    epochs = config[epochs_field(name)]
    if epochs is None:
        return config[name]
    steps = int(epochs * config.data.num_examples / config.batch)
    return max(steps, 1) if epochs > 0 else 0


def resolve_config(config: ConfigDict) -> ConfigDict:
    """Returns a locked copy with all durations in steps and all fields of the optimizer set.

    The fields of durations in epochs are unset. `config.data.num_examples` must be set if a duration is in epochs.

    Raises:
        UserError: the warm-up is longer than the run.
    """
    config = config.copy_and_resolve_references()
    with config.unlocked():
        rename_fields(config)
        set_optimizer_fields(config.optim)
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
    return config.lock()


def epochs_field(name: str) -> str:
    """Returns the name of the field that gives a duration in epochs instead of steps."""
    return f"{name.removesuffix('_steps')}_epochs"
