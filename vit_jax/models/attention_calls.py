"""An implementation of attention as calls on random numbers, to be timed."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.models.attention import ATTENTIONS, QKVBias, QKVKernel, choose_packing
from vit_jax.models.attention_check import draw_operands
from vit_jax.models.attention_choice import AttentionSizes
from vit_jax.models.layers import Rows
from vit_jax.models.part_specs import AttentionKind


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
