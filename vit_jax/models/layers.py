"""The layers that the modules share: dense layer, LayerNorm and dropout, with gradients that suit the platform."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.sharding import gather

EPSILON = 1e-6  # of LayerNorm, as published

Tokens: TypeAlias = Float[Array, "batch tokens width"]
Wide: TypeAlias = Float[Array, "*rows wide"]
Narrow: TypeAlias = Float[Array, "*rows narrow"]
Kernel: TypeAlias = Float[Array, "wide narrow"]
Rows: TypeAlias = Float[Array, "*rows width"]
Channels: TypeAlias = Float[Array, " width"]
Statistic: TypeAlias = Float[Array, "*rows 1"]
Residuals: TypeAlias = tuple[Rows, Statistic, Statistic, Channels]


class Dense(nn.Module):
    """A dense layer whose kernel has named dimensions."""

    features: int
    dimensions: tuple[str, str]  # of the kernel
    dtype: str = "float32"  # of the computation
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros
    matmul: Callable[[Array, Array], Array] = jnp.matmul

    @nn.compact
    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows features"]:
        """Returns `x @ kernel + bias`."""
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape).astype(self.dtype)
        bias = self.param("bias", self.bias_init, shape[1:])
        return add_bias(self.matmul(x, gather(kernel, self.dimensions)), bias)


@jax.custom_vjp
def add_bias(x: Float[Array, "..."], bias: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns `x + bias` in the dtype of `x`; the gradient of `bias` is summed over the other axes in float32.

    Args:
        x: any shape.
        bias: the shape of the last axes of `x`, in float32.
    """
    return x + bias.astype(x.dtype)


def _add_bias_forward(x: Array, bias: Array) -> tuple[Array, Array]:
    return add_bias(x, bias), bias


def _add_bias_backward(bias: Array, grad: Array) -> tuple[Array, Array]:
    return grad, grad.sum(range(grad.ndim - bias.ndim), dtype=jnp.float32).astype(bias.dtype)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def as_matrix(kernel: Float[Array, "..."], outputs: int) -> Float[Array, "inputs outputs"]:
    """Returns a kernel as a matrix with that many columns.

    Its gradient is computed as that matrix: otherwise the TPUs' compiler computes it in the kernel's own layout in
    memory, for which it first transposes an activation.
    """
    return kernel.reshape(-1, outputs)


def _as_matrix_forward(kernel: Array, outputs: int) -> tuple[Array, Array]:
    return kernel.reshape(-1, outputs), kernel


def _as_matrix_backward(outputs: int, kernel: Array, grad: Array) -> tuple[Array]:
    del outputs
    return (jax.lax.optimization_barrier(grad).reshape(kernel.shape),)


as_matrix.defvjp(_as_matrix_forward, _as_matrix_backward)


@jax.custom_vjp
def narrowing_matmul(x: Wide, kernel: Kernel) -> Narrow:
    """Returns `x @ kernel`; the gradient of the kernel suits the platform. Only reverse-mode differentiation works."""
    return x @ kernel


def _matmul_forward(x: Wide, kernel: Kernel) -> tuple[Narrow, tuple[Wide, Kernel]]:
    return x @ kernel, (x, kernel)


def _matmul_backward(residuals: tuple[Wide, Kernel], grad: Narrow) -> tuple[Wide, Kernel]:
    x, kernel = residuals
    return grad @ kernel.T, jax.lax.platform_dependent(x, grad, cpu=_transposed_gradient, default=_kernel_gradient)


def _kernel_gradient(x: Wide, grad: Narrow) -> Kernel:
    return _flat(x).T @ _flat(grad)


def _transposed_gradient(x: Wide, grad: Narrow) -> Kernel:
    # XLA's CPU matmul computes the transposed gradient in two thirds of the time; the barrier keeps the compiler from
    # undoing the transposition.
    return jax.lax.optimization_barrier(_flat(grad).T @ _flat(x)).T


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


narrowing_matmul.defvjp(_matmul_forward, _matmul_backward)


class LayerNorm(nn.Module):
    """LayerNorm over the width as published: epsilon 1e-6, variance as E[x²] - E[x]², statistics in float32."""

    @nn.compact
    def __call__(self, x: Rows) -> Rows:
        """Returns the normalised, scaled and shifted rows in the dtype of `x`."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return layer_norm(x, scale, bias)


@jax.custom_vjp
def layer_norm(x: Rows, scale: Channels, bias: Channels) -> Rows:
    """Returns (x - mean) / sqrt(variance + epsilon) * scale + bias. Only reverse-mode differentiation works.

    The backward pass is written out and reads each activation once, which is faster on CPUs and, by the compiler's
    estimate, on TPUs.
    """
    return _norm_forward(x, scale, bias)[0]


def _norm_forward(x: Rows, scale: Channels, bias: Channels) -> tuple[Rows, Residuals]:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum((wide * wide).mean(-1, keepdims=True) - mean * mean, 0)
    inverse = jax.lax.rsqrt(variance + EPSILON)
    return ((wide - mean) * inverse * scale + bias).astype(x.dtype), (x, mean, inverse, scale)


def _norm_backward(residuals: Residuals, grad: Rows) -> tuple[Rows, Channels, Channels]:
    x, mean, inverse, scale = residuals
    grad = grad.astype(jnp.float32)
    normal = (x.astype(jnp.float32) - mean) * inverse
    inner = grad * scale
    across = inner.mean(-1, keepdims=True) + normal * (inner * normal).mean(-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    return (inverse * (inner - across)).astype(x.dtype), (grad * normal).sum(rows), grad.sum(rows)


layer_norm.defvjp(_norm_forward, _norm_backward)


def dropout(module: nn.Module, x: Rows) -> Rows:
    """Returns `x` after dropout at the rate of the module's spec, if the module has a `dropout` random stream."""
    return nn.Dropout(module.spec.dropout_rate, deterministic=not module.has_rng("dropout"))(x)
