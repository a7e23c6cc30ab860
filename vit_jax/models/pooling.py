"""Pooling: one vector per image from its tokens; several forms with one signature."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import xavier_uniform
from jaxtyping import Array, Float

from vit_jax.models.attention import out_projection
from vit_jax.models.layers import Dense, norm_of
from vit_jax.models.mlp import Mlp
from vit_jax.models.operations import PlainOps, Tokens
from vit_jax.models.spec import ModelSpec, Pooling

Pooled: TypeAlias = Float[Array, "batch width"]


class ProbeAttention(nn.Module):
    """Attention of one learned query, the same for every image, over the tokens."""

    spec: ModelSpec
    ops: PlainOps

    @nn.compact
    def __call__(self, probe: Float[Array, " width"], x: Tokens) -> Pooled:
        """Returns what the probe attends to in each image."""
        spec, ops, names = self.spec, self.ops, ("batch", "tokens", "heads", "head_dim")
        heads, init = (spec.attention.num_heads, spec.head_dim), xavier_uniform(in_axis=0, out_axis=(1, 2))
        project = functools.partial(Dense, heads, ops, init)
        query = project(name="query")(probe) * spec.head_dim**-0.5
        key = ops.place(project(name="key")(x), *names)
        value = ops.place(project(name="value")(x), *names)
        scores = jnp.einsum("hd,bthd->bht", query, key, preferred_element_type=jnp.float32)
        attended = jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores).astype(x.dtype), value)
        return out_projection(spec, ops)(attended.reshape(x.shape[0], spec.width))


class AttentionPooling(nn.Module):
    """Multi-head attention pooling of big_vision (not in the paper): a probe attends to the patches, then
    x + mlp(norm(x)). With `map_prefix`, it attends to the tokens before the patches too.
    """

    spec: ModelSpec
    ops: PlainOps

    @nn.compact
    def __call__(self, x: Tokens) -> Pooled:
        """Returns one vector per image."""
        spec, ops = self.spec.map_spec, self.ops
        x = x if spec.head.map_prefix else x[:, spec.prefix_rows :]
        probe = self.param("probe", lambda key: xavier_uniform()(key, (1, spec.width))[0]).astype(spec.dtype)
        x = ProbeAttention(spec, ops, name="attention")(probe, x)
        y = norm_of(spec.block, ops, "norm")(x)
        return x + Mlp(spec, ops.for_pooled, name="mlp")(y)


def pool_by_attention(spec: ModelSpec, ops: PlainOps, x: Tokens) -> Pooled:
    """Returns the result of `AttentionPooling`, which becomes the submodule `map_head` of the calling module."""
    return AttentionPooling(spec, ops, name="map_head")(x)


def take_token(spec: ModelSpec, ops: PlainOps, x: Tokens) -> Pooled:
    """Returns the first token: the class token (equation 4)."""
    return x[:, 0]


def average_patches(spec: ModelSpec, ops: PlainOps, x: Tokens) -> Pooled:
    """Returns the mean of the patches' tokens: global average pooling (appendix D.3)."""
    return x[:, spec.prefix_rows :].mean(axis=1, dtype=jnp.float32)


def take_both(spec: ModelSpec, ops: PlainOps, x: Tokens) -> Float[Array, "batch twice_width"]:
    """Returns the class token, then the mean of the patches' tokens (DINOv2's linear classifier)."""
    return jnp.concatenate([take_token(spec, ops, x), average_patches(spec, ops, x)], axis=1)


POOLINGS: dict[Pooling, Callable[[ModelSpec, PlainOps, Tokens], Float[Array, "batch features"]]] = {
    "token": take_token,
    "gap": average_patches,
    "map": pool_by_attention,
    "token_gap": take_both,
}
