"""Compares the forms of attention and MLP with the plain form on random numbers: results and all gradients.

It also makes calls that can be timed.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.execution.attention_kinds import ATTENTIONS, Attention
from vit_jax.execution.dense_layers import narrow, widen
from vit_jax.execution.forms_by_chip import AttentionSizes, attention_sizes, choose_packing, choose_shape
from vit_jax.execution.norms_and_products import layer_norm
from vit_jax.kernels import Packing, choose_division, fused_mlp, gelu_tanh
from vit_jax.models import (
    NO_EXTRAS,
    NORMS,
    RELATIVES,
    ROTARIES,
    AttentionExtras,
    AttentionKind,
    ModelSpec,
    NormParameters,
    QKVBias,
    QKVKernel,
    Rows,
    Tokens,
    relative_table,
    replace_fields,
)
from vit_jax.tree import ArrayTree

IMAGES, MANY_IMAGES = 8, 1024
PARAMETERS = "input", "kernel", "bias", "norms", "relative positions"
EMPTY = 3.0  # the value in empty rows, which must not be attended to
COMPARED_ROWS = 1224  # two steps of the TPU kernel's grid, and some rows of a third
MLP_NAMES = (
    "the result of the MLP",
    "the gradient of the MLP's input",
    "the gradient of the norm",
    *(f"the gradient of dense{layer}'s {name}" for layer in (1, 2) for name in ("kernel", "bias")),
)


def measure_differences(spec: Any, device: jax.Device, tensor: int = 1) -> dict[str, float]:
    """Compares a model's attention with the plain form on a device, and returns the differences; see `compare`.

    The TPU kernel computes one step of its grid, with as many images as a step has at most.

    Args:
        spec: the `ModelSpec` of the model.
        device: the device that executes both forms.
        tensor: the number of devices over which the heads are split. The heads of one device are compared.
    """
    kind, sizes = spec.attention.kind, attention_sizes(spec, IMAGES, tensor)
    if kind == "fused" and (shape := choose_shape(sizes._replace(images=MANY_IMAGES), device.device_kind)):
        sizes = sizes._replace(images=shape.packs * shape.packing.images)
    packing = choose_packing(kind, sizes, device.device_kind)
    jitted = jax.jit(functools.partial(compare, ATTENTIONS[kind], packing, extras=draw_extras(spec, sizes.heads)))
    differences = jitted(*jax.device_put(draw_operands(sizes), device))
    return {name: float(value) for name, value in differences.items()}


def draw_operands(sizes: AttentionSizes) -> tuple[np.ndarray, ...]:
    """Returns random tokens, kernel and bias of the projection, and gradient of the result, from a fixed seed."""
    images, tokens, heads, head_dim, dtype = sizes[:5]
    width, random = heads * head_dim, np.random.default_rng(0)
    x, grad = random.standard_normal((2, images, tokens, width), np.float32).astype(jnp.dtype(dtype))
    kernel = random.standard_normal((width, 3, heads, head_dim), np.float32) * np.float32(width**-0.5)
    return x, kernel.astype(x.dtype), random.standard_normal((3, heads, head_dim), np.float32), grad


def draw_extras(spec: ModelSpec, heads: int) -> AttentionExtras:
    """Returns what a model does besides equations 5 to 7, with random norms and relative positions of `heads` heads.

    All offsets have rows of their own, since the TPU kernel does not depend on `relative_clip`. The gradients of a
    clipped table's first and last row are sums of most pairs, in which roundings to bfloat16 outweigh what is left.
    """
    drawn = 0.1 * np.random.default_rng(1).standard_normal((2, 2, spec.head_dim), np.float32)
    kind, epsilon = spec.block.norm, spec.block.norm_epsilon
    norms = [
        NormParameters(kind, jnp.asarray(1 + scale), jnp.asarray(bias) if NORMS[kind].has_bias else None, epsilon)
        for scale, bias in drawn
    ]
    extras = AttentionExtras(tuple(norms) if spec.attention.qk_norm else (), ROTARIES[spec.position.rotary](spec))
    if not spec.position.is_relative:
        return extras

    def draw(name: str, init: Any, shape: tuple[int, ...], dtype: Any) -> Array:
        shape = {"relative_heads": (heads, *shape[1:]), "relative_bias": (shape[0], heads)}.get(name, shape)
        return jax.random.normal(jax.random.key(0), shape, dtype)

    spec = replace_fields(spec, relative_clip=0)
    return extras._replace(relative=RELATIVES[spec.position.kind](spec, relative_table(draw, spec)))


def compare(
    attention: Attention,
    packing: Packing,
    x: Tokens,
    kernel: QKVKernel,
    bias: QKVBias,
    grad: Tokens,
    extras: AttentionExtras = NO_EXTRAS,
) -> dict[str, Float[Array, ""]]:
    """Returns name -> relative difference between `attention` and the plain form in float32.

    The names are those of the result, and of the gradient of the input and of each parameter. A relative difference is
    the Euclidean norm of the difference, divided by the norm of the plain form's array.

    Args:
        attention: the form to compare.
        packing: the packing of the rows that `attention` gets.
        x: the tokens.
        kernel: the kernel of the projection.
        bias: the bias of the projection.
        grad: the gradient of the result.
        extras: what is done besides.
    """
    trained = extras.norms, extras.relative and extras.relative.table

    def run(
        attention: Attention, packing: Packing, x: Array, kernel: QKVKernel, bias: QKVBias, trained: tuple[Any, Any]
    ) -> Array:
        norms, table = trained
        relative = extras.relative and extras.relative._replace(table=table)
        own = extras._replace(norms=norms, relative=relative)
        return packing.unpack(attention(packing.pack(x, EMPTY), kernel, bias, packing, own)[0])

    def differentiate(attention: Attention, packing: Packing, dtype: Any) -> list[ArrayTree]:
        arguments = x.astype(dtype), kernel.astype(dtype), bias, trained
        result, transpose = jax.vjp(functools.partial(run, attention, packing), *arguments)
        *grads, (norms, table) = transpose(grad.astype(dtype))
        return [result, *grads, norms, table]

    actual = differentiate(attention, packing, x.dtype)
    with jax.default_matmul_precision("highest"):
        plain = Packing(packing.tokens, 1, packing.tokens)
        expected = differentiate(ATTENTIONS["tokens_first"], plain, jnp.float32)
    names = "the result", *(f"the gradient of the {name}" for name in PARAMETERS)
    pairs = zip(names, actual, expected, strict=True)
    return {name: _difference(*each) for name, *each in pairs if jax.tree.leaves(each)}


def _difference(actual: ArrayTree, expected: ArrayTree) -> Float[Array, ""]:
    actual, expected = (
        jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(each)]) for each in (actual, expected)
    )
    return jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected)


def make_attention_calls(
    kind: AttentionKind, sizes: AttentionSizes, device: jax.Device
) -> dict[str, Callable[[], jax.Array]]:
    """Returns two calls without arguments, `forward` and `forward and backward`.

    They compute the projection and the attention of one layer on random numbers.

    Args:
        kind: the form of attention.
        sizes: the sizes of the images and of the attention on the device.
        device: the device that executes the calls.
    """
    packing = choose_packing(kind, sizes, device.device_kind)
    x, kernel, bias, grad = jax.device_put(draw_operands(sizes), device)
    rows, grad_rows = jax.jit(packing.pack)(x), jax.jit(packing.pack)(grad)

    def attend(rows: Rows, kernel: QKVKernel, bias: QKVBias) -> Rows:
        return ATTENTIONS[kind](rows, kernel, bias, packing, NO_EXTRAS)[0]

    def differentiate(rows: Rows, kernel: QKVKernel, bias: QKVBias, grad: Rows) -> tuple[Rows, tuple]:
        attended, transpose = jax.vjp(attend, rows, kernel, bias)
        return attended, transpose(grad.astype(jnp.result_type(attended)))

    return {
        "forward": functools.partial(jax.jit(attend), rows, kernel, bias),
        "forward and backward": functools.partial(jax.jit(differentiate), rows, kernel, bias, grad_rows),
    }


def measure_mlp_differences(spec: ModelSpec, device: jax.Device) -> dict[str, float]:
    """Compares a model's TPU kernel for the MLP with the plain layers in float32 on a device.

    Returns:
        Name -> relative difference: the Euclidean norm of the difference, divided by the norm of the plain array.
    """
    memory = choose_division(device.device_kind).memory
    differences = jax.jit(functools.partial(_compare_mlp, spec.block.norm_epsilon, memory))(*_draw_mlp(spec, device))
    return {name: float(value) for name, value in zip(MLP_NAMES, differences, strict=True)}


def mlp_sizes(spec: ModelSpec) -> tuple[Any, ...]:
    """Returns what the MLP's TPU kernel depends on: width, hidden channels, dtypes of activations and gradients."""
    return spec.width, spec.mlp_dim, spec.dtype, spec.kernel_dtype, spec.block.norm_epsilon


def _draw_mlp(spec: ModelSpec, device: jax.Device) -> list[Array]:
    """Returns the gradient of the result, and the operands of `fused_mlp`, from a fixed seed."""
    random, width, hidden = np.random.default_rng(0), spec.width, spec.mlp_dim

    def draw(*shape: int, scale: float = 1.0, mean: float = 0.0, dtype: Any = np.float32) -> Array:
        values = mean + scale * random.standard_normal(shape, np.float32)
        return jax.device_put(values.astype(jnp.dtype(dtype)), device)

    rows = functools.partial(draw, COMPARED_ROWS, width, dtype=spec.dtype)
    norm = draw(2, width, scale=0.1) + jnp.array([[1.0], [0.0]])
    kernel = functools.partial(draw, dtype=spec.kernel_dtype)
    first = kernel(width, hidden, scale=width**-0.5), draw(hidden, scale=0.1)
    return [rows(), rows(), norm, *first, kernel(hidden, width, scale=hidden**-0.5), draw(width, scale=0.1)]


def _compare_mlp(epsilon: float, memory: int, grad: Rows, *operands: Array) -> list[Float[Array, ""]]:
    def plain(x: Rows, norm: Array, kernel1: Array, bias1: Array, kernel2: Array, bias2: Array) -> Rows:
        return x + narrow(
            widen(layer_norm(x, norm[0], norm[1], epsilon), kernel1, bias1, "dense1", gelu_tanh), kernel2, bias2
        )

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
