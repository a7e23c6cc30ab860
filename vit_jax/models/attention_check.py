"""An implementation of attention on random numbers: how far the result and all gradients are from those of the plain
form, and calls that can be timed.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.kernels import Packing
from vit_jax.models.attention import ATTENTIONS, Attention, AttentionChange, QKVBias, QKVKernel, choose_packing
from vit_jax.models.attention_choice import AttentionSizes, attention_sizes
from vit_jax.models.head_change import HeadChange
from vit_jax.models.layers import Rows
from vit_jax.models.part_specs import AttentionKind
from vit_jax.models.rotary import ROTARIES

IMAGES = 8
NAMES = "the result", *(f"the gradient of the {name}" for name in ("input", "kernel", "bias", "norms"))
Images: TypeAlias = Float[Array, "images tokens width"]
EMPTY = 3.0  # what stands in empty rows, and must not be attended to


def measure_differences(spec: Any, device: jax.Device, tensor: int = 1) -> dict[str, float]:
    """Returns, by name, how far a model's attention is from the plain form on a device; see `compare`.

    Args:
        spec: of the model, a `ModelSpec`.
        device: executes both.
        tensor: devices over which the heads are split.
    """
    kind, sizes = spec.attention.kind, attention_sizes(spec, IMAGES, tensor)
    packing = choose_packing(kind, sizes.tokens, sizes.heads, sizes.images)
    jitted = jax.jit(functools.partial(compare, ATTENTIONS[kind], packing, change=draw_change(spec)))
    differences = jitted(*jax.device_put(draw_operands(sizes), device))
    return {name: float(value) for name, value in differences.items()}


def draw_operands(sizes: AttentionSizes) -> tuple[np.ndarray, ...]:
    """Returns tokens, kernel and bias of the projection, and the gradient of the result; all are random."""
    images, tokens, heads, head_dim, dtype = sizes[:5]
    width, random = heads * head_dim, np.random.default_rng(0)
    x, grad = random.standard_normal((2, images, tokens, width), np.float32).astype(jnp.dtype(dtype))
    kernel = random.standard_normal((width, 3, heads, head_dim), np.float32) * np.float32(width**-0.5)
    return x, kernel.astype(x.dtype), random.standard_normal((3, heads, head_dim), np.float32), grad


def draw_change(spec: Any) -> AttentionChange | None:
    """Returns what the model does to queries and keys, with random norms; None: nothing."""
    if spec.qk_change is None:
        return None
    drawn = 0.1 * np.random.default_rng(1).standard_normal((2, 2, spec.head_dim), np.float32)
    norms = [(jnp.asarray(1 + scale), jnp.asarray(bias)) for scale, bias in drawn] if spec.attention.qk_norm else []
    return AttentionChange(HeadChange(tuple(norms), spec.block.norm_epsilon, ROTARIES[spec.position.rotary](spec)))


def compare(
    attention: Attention,
    packing: Packing,
    x: Images,
    kernel: QKVKernel,
    bias: QKVBias,
    grad: Images,
    change: AttentionChange | None = None,
) -> dict[str, Float[Array, ""]]:
    """Returns the relative difference, by Euclidean norms, of the result and of each gradient.

    Args:
        attention: compared with the plain form in float32.
        packing: of the rows that it gets.
        x: the tokens.
        kernel: of the projection.
        bias: of the projection.
        grad: the gradient of the result.
        change: of queries and keys.
    """

    norms = change.qkv.norms if change and change.qkv else ()

    def run(
        attention: Attention, packing: Packing, x: Array, kernel: QKVKernel, bias: QKVBias, norms: tuple[Any, ...]
    ) -> Array:
        own = AttentionChange(change.qkv._replace(norms=norms)) if change and change.qkv else change
        return packing.unpack(attention(packing.pack(x, EMPTY), kernel, bias, packing, own)[0])

    result, transpose = jax.vjp(functools.partial(run, attention, packing), x, kernel, bias, norms)
    actual = dict(zip(NAMES, (result, *transpose(grad)), strict=True))
    with jax.default_matmul_precision("highest"):
        plain = functools.partial(run, ATTENTIONS["tokens_first"], choose_packing("tokens_first", packing.tokens, 1, 1))
        result, transpose = jax.vjp(plain, *(array.astype("float32") for array in (x, kernel)), bias, norms)
        expected = dict(zip(NAMES, (result, *transpose(grad.astype("float32"))), strict=True))
    return {name: _difference(actual[name], expected[name]) for name in (NAMES if norms else NAMES[:-1])}


def _difference(actual: Any, expected: Any) -> Float[Array, ""]:
    actual, expected = (
        jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(each)]) for each in (actual, expected)
    )
    return jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected)


def make_attention_calls(
    kind: AttentionKind, sizes: AttentionSizes, device: jax.Device
) -> dict[str, Callable[[], jax.Array]]:
    """Returns, by name, the forward pass, and it with the backward pass, of one layer's projection and attention.

    Args:
        kind: of attention.
        sizes: of the images on the device.
        device: that executes them.
    """
    packing = choose_packing(kind, sizes.tokens, sizes.heads, sizes.images)
    x, kernel, bias, grad = jax.device_put(draw_operands(sizes), device)
    rows, grad_rows = jax.jit(packing.pack)(x), jax.jit(packing.pack)(grad)

    def attend(rows: Rows, kernel: QKVKernel, bias: QKVBias) -> Rows:
        return ATTENTIONS[kind](rows, kernel, bias, packing, None)[0]

    def differentiate(rows: Rows, kernel: QKVKernel, bias: QKVBias, grad: Rows) -> tuple[Rows, tuple]:
        attended, transpose = jax.vjp(attend, rows, kernel, bias)
        return attended, transpose(grad.astype(jnp.result_type(attended)))

    return {
        "forward": functools.partial(jax.jit(attend), rows, kernel, bias),
        "forward and backward": functools.partial(jax.jit(differentiate), rows, kernel, bias, grad_rows),
    }
