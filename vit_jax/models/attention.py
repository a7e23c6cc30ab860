"""Self-attention over fused queries, keys and values: implementations with one signature (equations 6 and 7)."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Fused: TypeAlias = Float[Array, "batch tokens 3 heads head_dim"]
Mixed: TypeAlias = Float[Array, "batch tokens width"]
Heads: TypeAlias = Float[Array, "batch heads tokens head_dim"]
Weights: TypeAlias = Float[Array, "batch heads queries keys"]


def heads_first(qkv: Fused) -> tuple[Mixed, Weights]:
    """Returns the values mixed by softmax(q kᵀ / √head_dim), and those weights (float32).

    One transposition puts heads before tokens, so that every product is a batch of plain matrices, and the backward
    pass is written out: the fastest form on CPUs. Differentiable in reverse only.
    """
    batch, tokens, _, heads, head_dim = qkv.shape
    query, key, value = qkv.transpose(2, 0, 3, 1, 4)
    mixed, weights = _attend(query, key, value)
    return mixed.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * head_dim), weights


@jax.custom_vjp
def _attend(query: Heads, key: Heads, value: Heads) -> tuple[Heads, Weights]:
    return _forward(query, key, value)[0]


def _forward(query: Heads, key: Heads, value: Heads) -> tuple[tuple[Heads, Weights], tuple]:
    weights = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", _scaled(query), key, preferred_element_type=jnp.float32))
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(value.dtype), value)
    return (mixed, weights), (query, key, value, weights)


def _backward(residuals: tuple, grads: tuple[Heads, Weights]) -> tuple[Heads, Heads, Heads]:
    query, key, value, weights = residuals
    grad, grad_weights = grads  # the second is zero, and compiled away, unless someone trains on the weights
    grad_value = jnp.einsum("bhqk,bhqd->bhkd", weights.astype(grad.dtype), grad)
    grad_weights += jnp.einsum("bhqd,bhkd->bhqk", grad, value, preferred_element_type=jnp.float32)
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdims=True))
    grad_scores = grad_scores.astype(query.dtype)
    grad_query = jnp.einsum("bhqk,bhkd->bhqd", grad_scores, _scaled(key))
    grad_key = jnp.einsum("bhqk,bhqd->bhkd", grad_scores, _scaled(query))
    return grad_query, grad_key, grad_value


_attend.defvjp(_forward, _backward)


def tokens_first(qkv: Fused) -> tuple[Mixed, Weights]:
    """Returns the same as `heads_first` without transposing: accelerators choose the layout of each product."""
    batch, tokens, _, heads, head_dim = qkv.shape
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", _scaled(query), key, preferred_element_type=jnp.float32))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(qkv.dtype), value)
    return mixed.reshape(batch, tokens, heads * head_dim), weights


def auto(qkv: Fused) -> tuple[Mixed, Weights]:
    """Returns the same by the fastest form for the platform that it is lowered for, here or elsewhere; the others leave
    nothing behind. Differentiable in reverse only.
    """
    return jax.lax.platform_dependent(qkv, cpu=heads_first, default=tokens_first)


ATTENTIONS = {"auto": auto, "heads_first": heads_first, "tokens_first": tokens_first}


def _scaled(x: Array) -> Array:
    return x * x.shape[-1] ** -0.5
