"""GELU by its approximation with tanh (arXiv 1606.08415, section 2), for the MLP's kernels and for their plain form."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

CUBIC, SLOPE = 0.044715, math.sqrt(2 / math.pi)


@jax.custom_vjp
def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2 in the dtype of `x`.

    The gradient is computed in float32, with fewer operations than the derived one has: the vector units of v4 and v6e
    take longer for these than the matrix units for the product whose result they multiply. From 1.8e13 on it is not a
    number, as x³ overflows. Only reverse-mode differentiation works.
    """
    return gelu_and_share(x)[0]


def _forward(x: Array) -> tuple[Array, Array]:
    return gelu_tanh(x), x


def _backward(x: Array, grad: Array) -> tuple[Array]:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = wide * wide
    tanh = jnp.tanh(wide * (SLOPE + SLOPE * CUBIC * square))
    slope = (1 + tanh) * (0.5 + (1 - tanh) * (wide * (SLOPE / 2 + 1.5 * SLOPE * CUBIC * square)))
    return (grad * slope.astype(x.dtype),)


gelu_tanh.defvjp(_forward, _backward)


def gelu_and_share(x: Array) -> tuple[Array, Array]:
    """Returns the GELU and the share of `x` that it is, in the dtype of `x`."""
    half = x.dtype.type(0.5)
    share = half + half * jnp.tanh(x * (x.dtype.type(SLOPE) + x.dtype.type(SLOPE * CUBIC) * (x * x)))
    return x * share, share


def gelu_and_slope(x: Array) -> tuple[Array, Array]:
    """Returns the GELU and its derivative, in the dtype of `x`: the fewest operations where both are needed."""
    active, share = gelu_and_share(x)
    inner = x.dtype.type(2 * SLOPE) + x.dtype.type(6 * SLOPE * CUBIC) * (x * x)
    return active, share + (active - active * share) * inner
