"""The norms of a model: what each computes, and its parameters."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.spec import NormKind

Channels: TypeAlias = Float[Array, " width"]
Rows: TypeAlias = Float[Array, "*rows width"]  # of the tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormParameters:
    """All that a norm is made of, for operations that compute it together with something else.

    Attributes:
        kind: which norm it is.
        scale: the factor of each channel.
        bias: what is then added to each channel; None: nothing, see `NormForm.has_bias`.
        epsilon: what is added to the variance, or to the mean of the squares.
    """

    kind: NormKind = dataclasses.field(metadata={"static": True})
    scale: Channels
    bias: Channels | None
    epsilon: float = dataclasses.field(metadata={"static": True})


class NormForm(NamedTuple):
    """What a kind of norm is.

    Attributes:
        normalise: returns the normalised rows in their dtype.
        has_bias: whether it has a bias beside the scale.
    """

    normalise: Callable[[Rows, NormParameters], Rows]
    has_bias: bool


def layer_norm(
    x: Rows, scale: Channels, bias: Channels, epsilon: float
) -> tuple[Rows, Float[Array, "*rows 1"], Float[Array, "*rows 1"]]:
    """Returns (x - mean) / sqrt(variance + epsilon) * scale + bias in the dtype of `x`, and the statistics of the rows.

    The variance is E[x²] - E[x]², as published. The statistics, mean and 1 / sqrt(variance + epsilon), are in float32.
    """
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum((wide * wide).mean(-1, keepdims=True) - mean * mean, 0)
    inverse = jax.lax.rsqrt(variance + epsilon)
    return ((wide - mean) * inverse * scale + bias).astype(x.dtype), mean, inverse


def rms_norm(x: Rows, norm: NormParameters) -> Rows:
    """Returns x / sqrt(mean(x²) + epsilon) * scale in the dtype of `x` (arXiv 1910.07467, equation 4)."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + norm.epsilon) * norm.scale).astype(x.dtype)


NORMS: dict[NormKind, NormForm] = {
    "layer": NormForm(lambda x, norm: layer_norm(x, norm.scale, norm.bias, norm.epsilon)[0], has_bias=True),
    "rms": NormForm(rms_norm, has_bias=False),
}
