"""The learning rate as a function of the step."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """The learning rate as a function of the step.

    Attributes:
        base: the rate after the warm-up.
        relative: step -> the rate divided by `base`, which may be 0.
    """

    base: jax.typing.ArrayLike
    relative: optax.Schedule

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        """Returns the learning rate of a step."""
        return self.base * self.relative(step)


def _linear_end(config: ConfigDict) -> float:
    return config.linear_end / config.base_lr if config.base_lr else 0.0


def _rsqrt(config: ConfigDict, step: jax.Array, p: jax.Array) -> jax.Array:
    timescale = config.rsqrt_timescale
    return 1 / jnp.sqrt(jnp.maximum(step + timescale - config.warmup_steps, timescale) / timescale)


# `decay_type` -> a function: (configuration, step, progress p) -> rate / `base_lr`, without warm-up and cooldown.
DECAYS: Mapping[str, Callable[[ConfigDict, jax.Array, jax.Array], jax.typing.ArrayLike]] = {
    "cosine": lambda config, step, p: 0.5 * (1 + jnp.cos(jnp.pi * p)),
    "linear": lambda config, step, p: _linear_end(config) + (1 - _linear_end(config)) * (1 - p),
    "step": lambda config, step, p: (
        jnp.float32(0.1) ** sum(step > round(fraction * config.total_steps) for fraction in config.decay_at)
    ),
    "rsqrt": _rsqrt,
    "constant": lambda config, step, p: jnp.ones((), jnp.float32),
}


def make_schedule(config: ConfigDict, final_steps: tuple[int, int] | None = None) -> LearningRate:
    """Returns the learning rate of a config whose durations are in steps.

    Args:
        config: the config.
        final_steps: steps (b, e) between which a run that ends early cools down: the rate is also multiplied by
            clip((e - step) / (e - b), 0, 1). None: there is no such cooldown.

    With progress p = clip((step - warmup) / (total - warmup), 0, 1), cosine is base (1 + cos(pi p)) / 2, linear is
    end + (base - end)(1 - p), rsqrt is base / sqrt((step + timescale - warmup) / timescale), and step is base divided
    by 10 for each fraction f of `decay_at` with step > f total. Each is multiplied by min(1, step / warmup); rsqrt and
    constant also by min(1, (total - step) / cooldown). With base 0 the rate is 0.
    Source: the release's schedules (cosine, linear), big_vision's (rsqrt with cooldown) and BiT's (step; big_transfer,
    bit_hyperrule.py).
    """
    total, warmup, cooldown = config.total_steps, config.warmup_steps, config.cooldown_steps
    decay = DECAYS[config.decay_type]

    def relative(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        multiple = jnp.asarray(decay(config, step, jnp.clip((step - warmup) / max(total - warmup, 1), 0.0, 1.0)))
        if warmup:
            multiple *= jnp.minimum(1.0, step / warmup)
        if cooldown:
            multiple *= jnp.clip((total - step) / cooldown, 0.0, 1.0)
        if final_steps:
            begin, end = final_steps
            multiple *= jnp.clip((end - step) / (end - begin), 0.0, 1.0)
        return multiple

    return LearningRate(config.base_lr, relative)
