"""Self-attention over queries, keys and values in one array: implementations with one signature (equations 6 and 7)."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.spec import AttentionKind

QKV: TypeAlias = Float[Array, "batch tokens 3 heads head_dim"]
Attended: TypeAlias = Float[Array, "batch tokens width"]
PerHead: TypeAlias = Float[Array, "batch heads tokens head_dim"]
AttentionWeights: TypeAlias = Float[Array, "batch heads queries keys"]


def heads_first(qkv: QKV) -> tuple[Attended, AttentionWeights]:
    """Returns the sum of the values weighted by softmax(q kᵀ / √head_dim), and these weights in float32.

    One transposition puts heads before tokens, so that every product is a batch of plain matrix products, and the
    backward pass is written out. This is the fastest form on CPUs. Only reverse-mode differentiation works.
    """
    batch, tokens, _, heads, head_dim = qkv.shape
    query, key, value = qkv.transpose(2, 0, 3, 1, 4)
    attended, weights = _attend(query, key, value)
    return attended.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * head_dim), weights


@jax.custom_vjp
def _attend(query: PerHead, key: PerHead, value: PerHead) -> tuple[PerHead, AttentionWeights]:
    return _forward(query, key, value)[0]


def _forward(query: PerHead, key: PerHead, value: PerHead) -> tuple[tuple[PerHead, AttentionWeights], tuple]:
    weights = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", _scaled(query), key, preferred_element_type=jnp.float32))
    attended = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(value.dtype), value)
    return (attended, weights), (query, key, value, weights)


def _backward(residuals: tuple, grads: tuple[PerHead, AttentionWeights]) -> tuple[PerHead, PerHead, PerHead]:
    query, key, value, weights = residuals
    grad, grad_weights = grads  # the second is zero, and compiled away, unless the loss depends on the weights
    grad_value = jnp.einsum("bhqk,bhqd->bhkd", weights.astype(grad.dtype), grad)
    grad_weights += jnp.einsum("bhqd,bhkd->bhqk", grad, value, preferred_element_type=jnp.float32)
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdims=True))
    grad_scores = grad_scores.astype(query.dtype)
    grad_query = jnp.einsum("bhqk,bhkd->bhqd", grad_scores, _scaled(key))
    grad_key = jnp.einsum("bhqk,bhqd->bhkd", grad_scores, _scaled(query))
    return grad_query, grad_key, grad_value


_attend.defvjp(_forward, _backward)


def tokens_first(qkv: QKV) -> tuple[Attended, AttentionWeights]:
    """Returns the same as `heads_first`, without a transposition: accelerators choose the layout of each product."""
    batch, tokens, _, heads, head_dim = qkv.shape
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", _scaled(query), key, preferred_element_type=jnp.float32))
    attended = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(qkv.dtype), value)
    return attended.reshape(batch, tokens, heads * head_dim), weights


def auto(qkv: QKV) -> tuple[Attended, AttentionWeights]:
    """Returns the same as `heads_first`, computed by the fastest form for the platform that the program is lowered for.

    The compiled program does not contain the other form. Only reverse-mode differentiation works.
    """
    return jax.lax.platform_dependent(qkv, cpu=heads_first, default=tokens_first)


ATTENTIONS: dict[AttentionKind, Callable[[QKV], tuple[Attended, AttentionWeights]]] = {
    "auto": auto,
    "heads_first": heads_first,
    "tokens_first": tokens_first,
}


def _scaled(x: Array) -> Array:
    return x * x.shape[-1] ** -0.5
