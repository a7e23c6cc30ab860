"""LayerNorm with its own backward pass, which reads each activation once: faster on CPUs, and on TPUs as compiled."""

from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EPSILON = 1e-6

Activation: TypeAlias = Float[Array, "*rows width"]
Channels: TypeAlias = Float[Array, " width"]
Statistic: TypeAlias = Float[Array, "*rows 1"]
Residuals: TypeAlias = tuple[Activation, Statistic, Statistic, Channels]


class Norm(nn.Module):
    """LayerNorm over the width as published: epsilon 1e-6, variance as E[x²] - E[x]², statistics in float32."""

    @nn.compact
    def __call__(self, x: Activation) -> Activation:
        """Returns the normalised, scaled and shifted rows in the dtype of `x`."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return normalise(x, scale, bias)


@jax.custom_vjp
def normalise(x: Activation, scale: Channels, bias: Channels) -> Activation:
    """Returns (x - mean) / sqrt(variance + epsilon) * scale + bias. Differentiable in reverse only."""
    return _forward(x, scale, bias)[0]


def _forward(x: Activation, scale: Channels, bias: Channels) -> tuple[Activation, Residuals]:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum((wide * wide).mean(-1, keepdims=True) - mean * mean, 0)
    inverse = jax.lax.rsqrt(variance + EPSILON)
    return ((wide - mean) * inverse * scale + bias).astype(x.dtype), (x, mean, inverse, scale)


def _backward(residuals: Residuals, grad: Activation) -> tuple[Activation, Channels, Channels]:
    x, mean, inverse, scale = residuals
    grad = grad.astype(jnp.float32)
    normal = (x.astype(jnp.float32) - mean) * inverse
    inner = grad * scale
    across = inner.mean(-1, keepdims=True) + normal * (inner * normal).mean(-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    return (inverse * (inner - across)).astype(x.dtype), (grad * normal).sum(rows), grad.sum(rows)


normalise.defvjp(_forward, _backward)
