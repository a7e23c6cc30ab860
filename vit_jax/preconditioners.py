"""The optimizers: what makes an update of a gradient, before weight decay and the learning rate, from optax."""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
import optax
from ml_collections import ConfigDict


def _adamw(config: ConfigDict) -> optax.GradientTransformation:
    return optax.scale_by_adam(
        config.optim.beta1, config.optim.beta2, config.optim.eps, mu_dtype=jnp.dtype(config.optim.moment_dtype)
    )


def _sgd(config: ConfigDict) -> optax.GradientTransformation:
    return optax.trace(config.optim.momentum, accumulator_dtype=jnp.dtype(config.optim.moment_dtype))


def _lion(config: ConfigDict) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.optim.beta1, config.optim.beta2, jnp.dtype(config.optim.moment_dtype))


# `optim.name` -> from the configuration to what makes updates of gradients.
PRECONDITIONERS: Mapping[str, Callable[[ConfigDict], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "lion": _lion,
}
