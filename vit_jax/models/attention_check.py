"""Runs an implementation of attention on random numbers: compares its result and all gradients with those of the plain
form, and makes calls that can be timed.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.kernels import Packing
from vit_jax.models.attention import (
    ATTENTIONS,
    UNCHANGED,
    Attention,
    AttentionChange,
    QKVBias,
    QKVKernel,
    choose_packing,
)
from vit_jax.models.attention_choice import AttentionSizes, attention_sizes, choose_shape
from vit_jax.models.head_change import HeadChange
from vit_jax.models.layers import Rows, Tokens
from vit_jax.models.part_specs import AttentionKind
from vit_jax.models.position import RelativePositions, relative_table
from vit_jax.models.rotary import ROTARIES
from vit_jax.models.spec import ModelSpec
from vit_jax.models.spec_fields import replace_fields
from vit_jax.tree import ArrayTree

IMAGES, MANY_IMAGES = 8, 1024
PARAMETERS = "input", "kernel", "bias", "norms", "relative positions"
EMPTY = 3.0  # the value in empty rows, which must not be attended to


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
    jitted = jax.jit(functools.partial(compare, ATTENTIONS[kind], packing, change=draw_change(spec, sizes.heads)))
    differences = jitted(*jax.device_put(draw_operands(sizes), device))
    return {name: float(value) for name, value in differences.items()}


def draw_operands(sizes: AttentionSizes) -> tuple[np.ndarray, ...]:
    """Returns random tokens, kernel and bias of the projection, and gradient of the result, from a fixed seed."""
    images, tokens, heads, head_dim, dtype = sizes[:5]
    width, random = heads * head_dim, np.random.default_rng(0)
    x, grad = random.standard_normal((2, images, tokens, width), np.float32).astype(jnp.dtype(dtype))
    kernel = random.standard_normal((width, 3, heads, head_dim), np.float32) * np.float32(width**-0.5)
    return x, kernel.astype(x.dtype), random.standard_normal((3, heads, head_dim), np.float32), grad


def draw_change(spec: ModelSpec, heads: int) -> AttentionChange:
    """Returns what a model does besides equations 5 to 7, with random norms and relative positions of `heads` heads.

    All offsets have rows of their own, since the kernel does not depend on `relative_clip`. The gradients of a clipped
    table's first and last row are sums of most pairs, in which roundings to bfloat16 outweigh what is left.
    """
    drawn = 0.1 * np.random.default_rng(1).standard_normal((2, 2, spec.head_dim), np.float32)
    norms = [(jnp.asarray(1 + scale), jnp.asarray(bias)) for scale, bias in drawn] if spec.attention.qk_norm else []
    change = HeadChange(tuple(norms), spec.block.norm_epsilon, ROTARIES[spec.position.rotary](spec))
    if not spec.position.is_relative:
        return AttentionChange(change)

    def draw(name: str, init: Any, shape: tuple[int, ...], dtype: Any) -> Array:
        shape = (heads, *shape[1:]) if name == "relative_heads" else shape
        return jax.random.normal(jax.random.key(0), shape, dtype)

    spec = replace_fields(spec, relative_clip=0)
    return AttentionChange(change, RelativePositions(spec, relative_table(draw, spec)))


def compare(
    attention: Attention,
    packing: Packing,
    x: Tokens,
    kernel: QKVKernel,
    bias: QKVBias,
    grad: Tokens,
    change: AttentionChange = UNCHANGED,
) -> dict[str, Float[Array, ""]]:
    """Returns name -> relative difference between `attention` and the plain form in float32.

    The names are those of the result, and of the gradient of the input and of each parameter. A relative difference is
    the Euclidean norm of the difference, divided by the norm of the plain form's array.

    Args:
        attention: the implementation to compare.
        packing: the packing of the rows that `attention` gets.
        x: the tokens.
        kernel: the kernel of the projection.
        bias: the bias of the projection.
        grad: the gradient of the result.
        change: what is done besides.
    """
    trained = change.qkv.norms, change.relative and change.relative.table

    def run(
        attention: Attention, packing: Packing, x: Array, kernel: QKVKernel, bias: QKVBias, trained: tuple[Any, Any]
    ) -> Array:
        norms, table = trained
        relative = change.relative and change.relative._replace(table=table)
        own = AttentionChange(change.qkv._replace(norms=norms), relative)
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
        kind: the implementation of attention.
        sizes: the sizes of the images and of the attention on the device.
        device: the device that executes the calls.
    """
    packing = choose_packing(kind, sizes, device.device_kind)
    x, kernel, bias, grad = jax.device_put(draw_operands(sizes), device)
    rows, grad_rows = jax.jit(packing.pack)(x), jax.jit(packing.pack)(grad)

    def attend(rows: Rows, kernel: QKVKernel, bias: QKVBias) -> Rows:
        return ATTENTIONS[kind](rows, kernel, bias, packing, UNCHANGED)[0]

    def differentiate(rows: Rows, kernel: QKVKernel, bias: QKVBias, grad: Rows) -> tuple[Rows, tuple]:
        attended, transpose = jax.vjp(attend, rows, kernel, bias)
        return attended, transpose(grad.astype(jnp.result_type(attended)))

    return {
        "forward": functools.partial(jax.jit(attend), rows, kernel, bias),
        "forward and backward": functools.partial(jax.jit(differentiate), rows, kernel, bias, grad_rows),
    }
