"""Products, sums and norms whose gradients are written out, in the dtype and in the form that suit the devices.

A kernel is here the matrix of a dense layer, not a program for a chip.

Only reverse-mode differentiation works through them.
"""

import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax import models
from vit_jax.models import NORMS, Channels, NormParameters, Rows

Wide: TypeAlias = Float[Array, "*rows wide"]
Narrow: TypeAlias = Float[Array, "*rows narrow"]
Kernel: TypeAlias = Float[Array, "wide narrow"]
Statistic: TypeAlias = Float[Array, "*rows 1"]
Residuals: TypeAlias = tuple[Rows, Statistic, Statistic, Channels]


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


@jax.custom_vjp
def product(x: Float[Array, "*rows inputs"], kernel: Float[Array, "inputs ..."]) -> Float[Array, "..."]:
    """Returns the product of `x` and `kernel`, summed over the inputs: [*rows, *outputs] in the dtype of `x`.

    The gradient of the kernel is computed, and then exchanged between devices, in the kernel's own dtype. So the
    gradient of a float32 kernel is never rounded to bfloat16. Only reverse-mode differentiation works.
    """
    return _product_forward(x, kernel)[0]


def _product_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return jnp.tensordot(x, kernel.astype(x.dtype), 1), (x, kernel)


def _product_backward(residuals: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    axes = tuple(range(grad.ndim))
    rows, outputs = axes[: x.ndim - 1], axes[x.ndim - 1 :]
    grad_x = jnp.tensordot(grad, kernel.astype(x.dtype), (outputs, tuple(range(1, kernel.ndim))))
    # The casts become part of the matmul on TPUs; CPUs lack large products of bfloat16 with results in float32.
    grad_kernel = jnp.tensordot(grad.astype(kernel.dtype), x.astype(kernel.dtype), (rows, rows))
    return grad_x, jnp.moveaxis(grad_kernel, -1, 0)


product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def as_matrix(kernel: Float[Array, "..."], outputs: int) -> Float[Array, "inputs outputs"]:
    """Returns a kernel reshaped to a matrix with `outputs` columns.

    The gradient is computed as a matrix of this shape too. Otherwise the TPUs' compiler computes the gradient in the
    kernel's own layout in memory, for which it first transposes an activation.
    """
    return kernel.reshape(-1, outputs)


def _as_matrix_forward(kernel: Array, outputs: int) -> tuple[Array, Array]:
    return kernel.reshape(-1, outputs), kernel


def _as_matrix_backward(outputs: int, kernel: Array, grad: Array) -> tuple[Array]:
    return (jax.lax.optimization_barrier(grad).reshape(kernel.shape),)


as_matrix.defvjp(_as_matrix_forward, _as_matrix_backward)


@jax.custom_vjp
def narrowing_product(x: Wide, kernel: Kernel) -> Narrow:
    """Returns `product(x, kernel)`, but on CPUs XLA computes the gradient of the kernel in two thirds of the time."""
    return _product_forward(x, kernel)[0]


def _narrowing_backward(residuals: tuple[Wide, Kernel], grad: Narrow) -> tuple[Wide, Kernel]:
    x, kernel = residuals
    factors = x.astype(kernel.dtype), grad.astype(kernel.dtype)
    grad_kernel = jax.lax.platform_dependent(*factors, cpu=_transposed_gradient, default=_kernel_gradient)
    return grad @ kernel.astype(x.dtype).T, grad_kernel


def _kernel_gradient(x: Wide, grad: Narrow) -> Kernel:
    return _flat(x).T @ _flat(grad)


def _transposed_gradient(x: Wide, grad: Narrow) -> Kernel:
    # The barrier keeps the compiler from undoing the transposition.
    return jax.lax.optimization_barrier(_flat(grad).T @ _flat(x)).T


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


narrowing_product.defvjp(_product_forward, _narrowing_backward)


def normalise(x: Rows, norm: NormParameters) -> Rows:
    """Returns the normalised rows, see `models.PlainOps.norm`; LayerNorm by `layer_norm`."""
    if norm.kind == "layer":
        return layer_norm(x, norm.scale, norm.bias, norm.epsilon)
    return NORMS[norm.kind].normalise(x, norm)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: Rows, scale: Channels, bias: Channels, epsilon: float) -> Rows:
    """Returns LayerNorm of each row, see `models.layer_norm`. Only reverse-mode differentiation works.

    The backward pass is written out and reads each activation once, which is faster on CPUs and, by the compiler's
    estimate, on TPUs.
    """
    return _norm_forward(x, scale, bias, epsilon)[0]


def _norm_forward(x: Rows, scale: Channels, bias: Channels, epsilon: float) -> tuple[Rows, Residuals]:
    y, mean, inverse = models.layer_norm(x, scale, bias, epsilon)
    return y, (x, mean, inverse, scale)


def _norm_backward(epsilon: float, residuals: Residuals, grad: Rows) -> tuple[Rows, Channels, Channels]:
    x, mean, inverse, scale = residuals
    grad = grad.astype(jnp.float32)
    normal = (x.astype(jnp.float32) - mean) * inverse
    inner = grad * scale
    across = inner.mean(-1, keepdims=True) + normal * (inner * normal).mean(-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    return (inverse * (inner - across)).astype(x.dtype), (grad * normal).sum(rows), grad.sum(rows)


layer_norm.defvjp(_norm_forward, _norm_backward)
