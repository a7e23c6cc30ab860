"""The optimizers, from optax: each turns a gradient into an update, before weight decay and the learning rate.

The arrays of encoder blocks have a leading axis of layers. Where an optimizer computes something over a whole array,
such as its norm, it computes that for each layer by itself.
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

# Last part of the name of a matrix -> (its axes of inputs, its axes of outputs), counted from the last axis. The other
# axes number matrices.
MATRICES = {
    "qkv/kernel": ((-4,), (-2, -1)),
    "(query|key|value)/kernel": ((-3,), (-2, -1)),
    "out/kernel": ((-3, -2), (-1,)),
    "dense1_gated/kernel": ((-3,), (-1,)),
    "(dense[12]|pre_logits|projection)/kernel": ((-2,), (-1,)),
}


def _adamw(config: ConfigDict) -> optax.GradientTransformation:
    moment_dtype = jnp.dtype(config.optim.moment_dtype)
    return optax.scale_by_adam(config.optim.beta1, config.optim.beta2, config.optim.eps, mu_dtype=moment_dtype)


def _sgd(config: ConfigDict) -> optax.GradientTransformation:
    return optax.trace(config.optim.momentum, accumulator_dtype=jnp.dtype(config.optim.moment_dtype))


def _lion(config: ConfigDict) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.optim.beta1, config.optim.beta2, jnp.dtype(config.optim.moment_dtype))


def _adafactor(config: ConfigDict) -> optax.GradientTransformation:
    """Adafactor in the variant of Zhai et al. (2106.04560), section 3.4, with the settings of big_vision's code."""

    def decay(step: jax.Array, exponent: float) -> jax.Array:
        return jnp.minimum(config.optim.beta2, 1 - (step.astype(jnp.float32) + 1) ** -exponent)

    second = optax.scale_by_factored_rms(min_dim_size_to_factor=32, decay_rate_fn=decay)
    by_layer = optax.FactoredState(count=None, v_row=0, v_col=0, v=0)
    moment_dtype = jnp.dtype(config.optim.moment_dtype)
    return optax.chain(
        _each_layer(second, by_layer), optax.ema(config.optim.momentum, debias=False, accumulator_dtype=moment_dtype)
    )


def _muon(config: ConfigDict) -> optax.GradientTransformation:
    """Muon for matrices, and Adam with Nesterov's momentum for all other arrays.

    The updates of matrices are scaled to the size of Adam's (Liu et al., 2502.16982).
    """
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
    """Returns the update of a matrix scaled by 0.2 sqrt(max(inputs, outputs)), and that of another array as it is.

    Optax has already scaled the update of a matrix by sqrt(max(1, outputs / inputs)), which this replaces.
    """
    axes = _matrix_axes(name, update)
    return 0.2 * math.sqrt(math.prod(update.shape[axis] for axis in axes.reduction_axis)) * update if axes else update


def adapt_to_norms(adapted: Callable[[optax.Params], optax.Params]) -> optax.GradientTransformation:
    """Returns LAMB's last step: an update is multiplied by (norm of its array) / (norm of the update).

    The factor is 1 if either norm is 0.

    Args:
        adapted: parameters -> a tree of bools, whether the updates of each are multiplied.
    """
    return optax.masked(_each_layer(optax.scale_by_trust_ratio(), None), adapted)


def _each_layer(transformation: optax.GradientTransformation, state_axes: Any) -> optax.GradientTransformation:
    """Returns a transformation that treats each layer of a stacked array as an array of its own.

    Args:
        transformation: what is done to each array.
        state_axes: the axes of layers in the state of `transformation`, as a tree that is a prefix of the state.
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


# `optim.name` -> a function: configuration -> the transformation of gradients into updates.
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
