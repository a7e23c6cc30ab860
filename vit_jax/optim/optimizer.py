"""The optimizer: a chain of optax's transformations."""

import math
from collections.abc import Callable, Mapping

import jax
import optax
from ml_collections import ConfigDict

from vit_jax import tree
from vit_jax.models import is_factor
from vit_jax.optim.lr_multipliers import LrMultipliers
from vit_jax.optim.preconditioners import PRECONDITIONERS, adapt_to_norms
from vit_jax.optim.schedule import LearningRate


def make_optimizer(config: ConfigDict, rate: LearningRate, multipliers: LrMultipliers) -> optax.GradientTransformation:
    """Returns the chain: clip -> precondition -> weight decay -> learning-rate multipliers -> learning rate.

    Weight decay is decoupled. With `decay_factor="rate"` it is multiplied by the learning rate, p <- p - rate (u +
    decay p), as in the Adam that the paper used. With `decay_factor="schedule"` it is multiplied by rate / base_lr,
    p <- p - rate u - rate / base_lr decay p, as in big_vision, even if `base_lr` is 0. The structure of the state is
    the same with both. After weight decay, LAMB scales the updates of those arrays that decay to the norms of the
    arrays. For schedule-free AdamW, the whole chain is wrapped in `optax.contrib.schedule_free`.
    """
    decayed = DECAYED[config.optim.decays]
    base, schedule = (1.0, rate) if config.optim.decay_factor == "rate" else (rate.base, rate.relative)
    decay = optax.add_decayed_weights(config.optim.weight_decay, mask=decayed)
    chain = optax.chain(
        optax.clip_by_global_norm(config.grad_norm_clip or math.inf),
        PRECONDITIONERS[config.optim.name](config),
        optax.scale(base),
        optax.chain(decay, adapt_to_norms(decayed)) if config.optim.name == "lamb" else decay,
        optax.stateless(lambda updates, _: multipliers.scale(updates)),
        optax.scale_by_schedule(lambda step: -schedule(step)),
    )
    if config.optim.name != "schedule_free_adamw":
        return chain
    averaged = optax.contrib.schedule_free(chain, rate, config.optim.beta1)

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = averaged.update(grads, state, params)
        return multipliers.keep_frozen(updates), state  # rounding does not move frozen parameters

    return optax.GradientTransformation(averaged.init, update)


def _kernels(params: optax.Params) -> optax.Params:
    return tree.map_named(lambda name, _: name.endswith("kernel") or is_factor(name), params)


def _all(params: optax.Params) -> optax.Params:
    return jax.tree.map(lambda _: True, params)


# `optim.decays` -> a function: parameters -> a tree of bools, whether each decays.
DECAYED: Mapping[str, Callable[[optax.Params], optax.Params]] = {"kernels": _kernels, "all": _all}
