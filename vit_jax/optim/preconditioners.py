"""The optimizers: what makes an update of a gradient, before weight decay and the learning rate, from optax.

The arrays of encoder blocks have a leading axis of layers. What an optimizer computes of a whole array, it computes of
each layer by itself.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from vit_jax import tree
from vit_jax.models import is_stacked

# Last part of the name of a matrix -> its axes of inputs and of outputs, from the last; other axes number matrices.
MATRICES = {
    "qkv/kernel": ((-4,), (-2, -1)),
    "(query|key|value)/kernel": ((-3,), (-2, -1)),
    "out/kernel": ((-3, -2), (-1,)),
    "dense1_gated/kernel": ((-3,), (-1,)),
    "(dense[12]|pre_logits)/kernel": ((-2,), (-1,)),
}


def _adamw(config: ConfigDict) -> optax.GradientTransformation:
    moment_dtype = jnp.dtype(config.optim.moment_dtype)
    return optax.scale_by_adam(config.optim.beta1, config.optim.beta2, config.optim.eps, mu_dtype=moment_dtype)


def _sgd(config: ConfigDict) -> optax.GradientTransformation:
    return optax.trace(config.optim.momentum, accumulator_dtype=jnp.dtype(config.optim.moment_dtype))


def _lion(config: ConfigDict) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.optim.beta1, config.optim.beta2, jnp.dtype(config.optim.moment_dtype))


def _adafactor(config: ConfigDict) -> optax.GradientTransformation:
    """The variant of Zhai et al., section 3.4, with the settings of big_vision's code."""

    def decay(step: jax.Array, exponent: float) -> jax.Array:
        return jnp.minimum(config.optim.beta2, 1 - (step.astype(jnp.float32) + 1) ** -exponent)

    second = optax.scale_by_factored_rms(min_dim_size_to_factor=32, decay_rate_fn=decay)
    by_layer = optax.FactoredState(count=None, v_row=0, v_col=0, v=0)
    moment_dtype = jnp.dtype(config.optim.moment_dtype)
    return optax.chain(
        _each_layer(second, by_layer), optax.ema(config.optim.momentum, debias=False, accumulator_dtype=moment_dtype)
    )


def _muon(config: ConfigDict) -> optax.GradientTransformation:
    """Muon for matrices, Adam with Nesterov's momentum for the rest, with updates of the same size (Liu et al.)."""
    return optax.chain(
        optax.contrib.muon(
            -1.0,
            beta=config.optim.momentum,
            eps=config.optim.eps,
            mu_dtype=jnp.dtype(config.optim.moment_dtype),
            adam_b1=config.optim.beta1,
            adam_b2=config.optim.beta2,
            muon_weight_dimension_numbers=functools.partial(tree.map_named, _matrix_axes),
        ),
        optax.stateless(lambda updates, _: tree.map_named(_match_adam, updates)),
    )


def _matrix_axes(name: str, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
    axes = next((axes for pattern, axes in MATRICES.items() if re.search(f"(^|/){pattern}$", name)), None)
    return axes and optax.contrib.MuonDimensionNumbers(*axes)


def _match_adam(name: str, update: jax.Array) -> jax.Array:
    """Scales the update of a matrix from the size that optax gives it to 0.2 sqrt(max(inputs, outputs)).

    Optax's is sqrt(max(1, outputs / inputs)).
    """
    axes = _matrix_axes(name, update)
    return 0.2 * math.sqrt(math.prod(update.shape[axis] for axis in axes.reduction_axis)) * update if axes else update


def adapt_to_norms(adapted: Callable[[optax.Params], optax.Params]) -> optax.GradientTransformation:
    """Returns LAMB's last step: an update is multiplied by the norm of its array over its own norm, 1 if either is 0.

    Args:
        adapted: from the parameters to which of them it is done for.
    """
    return optax.masked(_each_layer(optax.scale_by_trust_ratio(), None), adapted)


def _each_layer(transformation: optax.GradientTransformation, state_axes: Any) -> optax.GradientTransformation:
    """Returns the transformation of each array, for stacked ones of each layer by itself.

    Args:
        transformation: of arrays.
        state_axes: the axes of layers in its state: a prefix of it.
    """

    def mapped(function: Callable, axes: tuple, out_axes: Any) -> Callable:
        def call(*trees: Any) -> Any:
            some = jax.tree.leaves(trees[0])  # a model may have no blocks
            return jax.vmap(function, axes, out_axes)(*trees) if some else function(*trees)

        return call

    layers = optax.GradientTransformation(
        mapped(transformation.init, (0,), state_axes),
        mapped(transformation.update, (0, state_axes, 0), (0, state_axes)),
    )
    return optax.partition({"layers": layers, "arrays": transformation}, _label)


def _label(params: optax.Params) -> optax.Params:
    return tree.map_named(lambda name, _: "layers" if is_stacked(name) else "arrays", params)


# `optim.name` -> from the configuration to what makes updates of gradients.
PRECONDITIONERS: Mapping[str, Callable[[ConfigDict], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "lion": _lion,
    "lamb": _adamw,
    "adafactor": _adafactor,
    "muon": _muon,
    "schedule_free_adamw": lambda config: optax.scale_by_rms(
        config.optim.beta2, config.optim.eps, eps_in_sqrt=False, bias_correction=True
    ),
}
