"""Pooling: one vector per image from its tokens; implementations with one signature."""

from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import xavier_uniform
from jaxtyping import Array, Float

from vit_jax.kernels import Packing
from vit_jax.models.block import OutProjection
from vit_jax.models.layers import LayerNorm, Tokens, add_bias, product
from vit_jax.models.mlp import MLPS
from vit_jax.models.part_specs import Pooling
from vit_jax.models.spec import ModelSpec
from vit_jax.sharding import constrain, gather

Pooled: TypeAlias = Float[Array, "batch width"]


class HeadsProjection(nn.Module):
    """A linear map from the width to heads: a query, key or value alone."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows heads head_dim"]:
        """Returns the projection of every row."""
        spec = self.spec
        shape = (spec.attention.num_heads, spec.head_dim)
        kernel = self.param("kernel", xavier_uniform(in_axis=0, out_axis=(1, 2)), (spec.width, *shape))
        kernel = gather(kernel.astype(spec.kernel_dtype), ("width", "heads", "head_dim"), x.dtype)
        return add_bias(product(x, kernel), self.param("bias", nn.initializers.zeros, shape))


class ProbeAttention(nn.Module):
    """Attention of one learned query, the same for every image, over the tokens."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, probe: Float[Array, " width"], x: Tokens) -> Pooled:
        """Returns what the probe attends to in each image."""
        query = HeadsProjection(self.spec, name="query")(probe) * self.spec.head_dim**-0.5
        names = ("batch", "tokens", "heads", "head_dim")
        key = constrain(HeadsProjection(self.spec, name="key")(x), names)
        value = constrain(HeadsProjection(self.spec, name="value")(x), names)
        scores = jnp.einsum("hd,bthd->bht", query, key, preferred_element_type=jnp.float32)
        attended = jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores).astype(x.dtype), value)
        return OutProjection(self.spec, name="out")(attended.reshape(len(x), self.spec.width))


class AttentionPooling(nn.Module):
    """Multi-head attention pooling of big_vision (not in the paper): a probe attends to the patches, then
    x + mlp(norm(x)).
    """

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Tokens) -> Pooled:
        """Returns one vector per image."""
        spec, x = self.spec, x[:, self.spec.prefix_rows :]
        probe = self.param("probe", lambda key: xavier_uniform()(key, (1, spec.width))[0]).astype(spec.dtype)
        x = ProbeAttention(spec, name="attention")(probe, x)
        return x + MLPS[spec.block.mlp](spec, Packing(1, 1, 1), name="mlp")(
            LayerNorm(spec.block.norm_epsilon, name="norm")(x)
        )


class TokenPooling(nn.Module):
    """The class token (equation 4)."""

    spec: ModelSpec

    def __call__(self, x: Tokens) -> Pooled:
        """Returns the first token."""
        return x[:, 0]


class MeanPooling(nn.Module):
    """Global average pooling (appendix D.3)."""

    spec: ModelSpec

    def __call__(self, x: Tokens) -> Pooled:
        """Returns the mean of the patches' tokens."""
        return x[:, self.spec.prefix_rows :].mean(axis=1, dtype=jnp.float32)


class TokenAndMeanPooling(nn.Module):
    """The class token, then the mean of the patches' tokens: twice the width (DINOv2's linear classifier)."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Tokens) -> Float[Array, "batch twice_width"]:
        """Returns both, concatenated."""
        return jnp.concatenate([TokenPooling(self.spec)(x), MeanPooling(self.spec)(x)], axis=1)


POOLINGS: dict[Pooling, type[nn.Module]] = {
    "token": TokenPooling,
    "gap": MeanPooling,
    "map": AttentionPooling,
    "token_gap": TokenAndMeanPooling,
}
