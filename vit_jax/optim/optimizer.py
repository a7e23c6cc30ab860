"""The optimizers: a chain of optax's transformations, with one row of `UPDATE_RULES` for each optimizer.

The arrays of encoder blocks have a leading axis of layers. Where an optimizer computes something over a whole array,
such as its norm, it computes that for each layer by itself.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from vit_jax import tree
from vit_jax.models import is_factor, is_stacked
from vit_jax.optim.lr_multipliers import LrMultipliers
from vit_jax.optim.schedule import LearningRate
from vit_jax.tree import ArrayTree

Mask: TypeAlias = Callable[[optax.Params], optax.Params]  # parameters -> a tree of bools
Wrapper: TypeAlias = Callable[
    [optax.GradientTransformation, LearningRate, ConfigDict, LrMultipliers], optax.GradientTransformation
]

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


def _schedule_free(config: ConfigDict) -> optax.GradientTransformation:
    return optax.scale_by_rms(config.optim.beta2, config.optim.eps, eps_in_sqrt=False, bias_correction=True)


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


def _adapt_to_norms(adapted: Mask) -> optax.GradientTransformation:
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


def _average(
    chain: optax.GradientTransformation, rate: LearningRate, config: ConfigDict, multipliers: LrMultipliers
) -> optax.GradientTransformation:
    """Returns schedule-free AdamW: the chain moves z, and the gradient is that at a mean of z and its average."""
    averaged = optax.contrib.schedule_free(chain, rate, config.optim.beta1)

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = averaged.update(grads, state, params)
        return multipliers.keep_frozen(updates), state  # rounding does not move frozen parameters

    return optax.GradientTransformation(averaged.init, update)


def has_average(state_names: Collection[str]) -> bool:
    """Returns whether an optimizer's state, by the names of its arrays, is that of `optax.contrib.schedule_free`."""
    return "weight_sum" in state_names


def averaged_params(params: ArrayTree, z: ArrayTree, beta1: jax.typing.ArrayLike) -> ArrayTree:
    """Returns the average x that schedule-free AdamW evaluates, where `params` is beta1 x + (1 - beta1) z.

    `z` and `beta1` are `z` and `b1` of its state. NumPy arrays stay NumPy arrays.
    """
    return jax.tree.map(lambda param, fast: (param - (1.0 - beta1) * fast) / beta1, params, z)


@dataclasses.dataclass(frozen=True)
class UpdateRule:
    """What an optimizer is. `config.OPTIMIZERS` has its fields.

    Attributes:
        precondition: configuration -> the transformation of gradients into updates, before weight decay and rate.
        after_decay: mask of what decays -> what is done to the updates once the weight decay was added; None: nothing.
        wrap: (chain, learning rate, configuration, multipliers) -> the transformation with all that is around the
            chain; None: there is nothing.
    """

    precondition: Callable[[ConfigDict], optax.GradientTransformation]
    after_decay: Callable[[Mask], optax.GradientTransformation] | None = None
    wrap: Wrapper | None = None


UPDATE_RULES: Mapping[str, UpdateRule] = {  # by `optim.name`
    "adamw": UpdateRule(_adamw),
    "sgd": UpdateRule(_sgd),
    "lion": UpdateRule(_lion),
    "lamb": UpdateRule(_adamw, after_decay=_adapt_to_norms),
    "adafactor": UpdateRule(_adafactor),
    "muon": UpdateRule(_muon),
    "schedule_free_adamw": UpdateRule(_schedule_free, wrap=_average),
}


def _kernels(params: optax.Params) -> optax.Params:
    return tree.map_named(lambda name, _: name.endswith("kernel") or is_factor(name), params)


def _all(params: optax.Params) -> optax.Params:
    return jax.tree.map(lambda _: True, params)


DECAYED: Mapping[str, Mask] = {"kernels": _kernels, "all": _all}  # by `optim.decays`


def make_optimizer(config: ConfigDict, rate: LearningRate, multipliers: LrMultipliers) -> optax.GradientTransformation:
    """Returns the chain: clip -> precondition -> weight decay -> learning-rate multipliers -> learning rate.

    Weight decay is decoupled. With `decay_factor="rate"` it is multiplied by the learning rate, p <- p - rate (u +
    decay p), as in the Adam that the paper used. With `decay_factor="schedule"` it is multiplied by rate / base_lr,
    p <- p - rate u - rate / base_lr decay p, as in big_vision, even if `base_lr` is 0. The structure of the state is
    the same with both. After weight decay, LAMB scales the updates of those arrays that decay to the norms of the
    arrays. For schedule-free AdamW, the whole chain is wrapped in `optax.contrib.schedule_free`.
    """
    rule = UPDATE_RULES[config.optim.name]
    decayed = DECAYED[config.optim.decays]
    base, schedule = (1.0, rate) if config.optim.decay_factor == "rate" else (rate.base, rate.relative)
    decay = optax.add_decayed_weights(config.optim.weight_decay, mask=decayed)
    chain = optax.chain(
        optax.clip_by_global_norm(config.grad_norm_clip or math.inf),
        rule.precondition(config),
        optax.scale(base),
        optax.chain(decay, rule.after_decay(decayed)) if rule.after_decay else decay,
        optax.stateless(lambda updates, _: multipliers.scale(updates)),
        optax.scale_by_schedule(lambda step: -schedule(step)),
    )
    return rule.wrap(chain, rate, config, multipliers) if rule.wrap else chain
