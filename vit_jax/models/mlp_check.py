"""Compares the result and all gradients of the MLP's kernel with those of the plain layers, on random numbers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.kernels import fused_mlp
from vit_jax.models.attention_choice import choose_division
from vit_jax.models.layers import Rows, layer_norm
from vit_jax.models.mlp import ACTIVATIONS, by_compiler
from vit_jax.models.spec import ModelSpec

ROWS = 1224  # two steps of the kernel's grid, and some rows of a third
NAMES = (
    "the result of the MLP",
    "the gradient of the MLP's input",
    "the gradient of the norm",
    *(f"the gradient of dense{layer}'s {name}" for layer in (1, 2) for name in ("kernel", "bias")),
)


def measure_mlp_differences(spec: ModelSpec, device: jax.Device) -> dict[str, float]:
    """Compares a model's kernel for the MLP with the plain layers in float32 on a device.

    Returns:
        Name -> relative difference: the Euclidean norm of the difference, divided by the norm of the plain array.
    """
    memory = choose_division(device.device_kind).memory
    differences = jax.jit(functools.partial(_compare, spec.block.norm_epsilon, memory))(*_draw(spec, device))
    return {name: float(value) for name, value in zip(NAMES, differences, strict=True)}


def mlp_sizes(spec: ModelSpec) -> tuple[Any, ...]:
    """Returns what the kernel depends on, of a model: width, hidden channels, dtypes of activations and gradients."""
    return spec.width, spec.mlp_dim, spec.dtype, spec.kernel_dtype, spec.block.norm_epsilon


def _draw(spec: ModelSpec, device: jax.Device) -> list[Array]:
    """Returns the gradient of the result, and the operands of `fused_mlp`, from a fixed seed."""
    random, width, hidden = np.random.default_rng(0), spec.width, spec.mlp_dim

    def draw(*shape: int, scale: float = 1.0, mean: float = 0.0, dtype: Any = np.float32) -> Array:
        values = mean + scale * random.standard_normal(shape, np.float32)
        return jax.device_put(values.astype(jnp.dtype(dtype)), device)

    rows = functools.partial(draw, ROWS, width, dtype=spec.dtype)
    norm = draw(2, width, scale=0.1) + jnp.array([[1.0], [0.0]])
    kernel = functools.partial(draw, dtype=spec.kernel_dtype)
    first = kernel(width, hidden, scale=width**-0.5), draw(hidden, scale=0.1)
    return [rows(), rows(), norm, *first, kernel(hidden, width, scale=hidden**-0.5), draw(width, scale=0.1)]


def _compare(epsilon: float, memory: int, grad: Rows, *operands: Array) -> list[Float[Array, ""]]:
    widen, narrow = by_compiler(ACTIVATIONS["gelu_tanh"])

    def plain(x: Rows, norm: Array, kernel1: Array, bias1: Array, kernel2: Array, bias2: Array) -> Rows:
        return x + narrow(widen(layer_norm(x, norm[0], norm[1], epsilon), kernel1, bias1), kernel2, bias2)

    def fused(*operands: Array) -> Rows:
        return fused_mlp(*operands, epsilon, memory)

    def differentiate(function: Any, dtype: Any, *operands: Array) -> list[Array]:
        result, transpose = jax.vjp(function, *operands)
        return [result, *transpose(grad.astype(dtype))]

    actual = differentiate(fused, grad.dtype, *operands)
    with jax.default_matmul_precision("highest"):
        expected = differentiate(plain, jnp.float32, *(each.astype(jnp.float32) for each in operands))
    return [
        jnp.linalg.norm((one - other).ravel()) / jnp.linalg.norm(other.ravel())
        for one, other in zip(actual, expected, strict=True)
    ]
