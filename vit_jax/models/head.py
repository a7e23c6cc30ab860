"""From tokens to logits: pooling, the optional tanh layer and the linear classifier."""

from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.block import Out
from vit_jax.models.mlp import MLPS, Tokens, kernel_init
from vit_jax.models.norm import Norm
from vit_jax.models.spec import ModelSpec
from vit_jax.sharding import constrain, gather

Pooled: TypeAlias = Float[Array, "batch width"]


class Projection(nn.Module):
    """A linear map from the width to heads."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows heads head_dim"]:
        """Returns the projection of every row."""
        spec = self.spec
        shape = (spec.attention.num_heads, spec.head_dim)
        kernel = self.param("kernel", kernel_init(in_axis=0, out_axis=(1, 2)), (spec.width, *shape)).astype(spec.dtype)
        kernel = gather(kernel, ("width", "heads", "head_dim"))
        return jnp.tensordot(x, kernel, 1) + self.param("bias", nn.initializers.zeros, shape).astype(spec.dtype)


class ProbeAttention(nn.Module):
    """Attention of one learned query, the same for every image, over the tokens."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, probe: Float[Array, " width"], x: Tokens) -> Float[Array, "batch 1 width"]:
        """Returns [batch, 1, width]."""
        query = Projection(self.spec, name="query")(probe) * self.spec.head_dim**-0.5
        names = ("batch", "tokens", "heads", "head_dim")
        key = constrain(Projection(self.spec, name="key")(x), names)
        value = constrain(Projection(self.spec, name="value")(x), names)
        scores = jnp.einsum("hd,bthd->bht", query, key, preferred_element_type=jnp.float32)
        mixed = jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores).astype(x.dtype), value)
        return Out(self.spec, name="out")(mixed.reshape(len(x), 1, self.spec.width))


class MapHead(nn.Module):
    """Multi-head attention pooling, big_vision's (not in the paper): a probe attends, then x + mlp(norm(x))."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Tokens) -> Pooled:
        """Returns one vector per image."""
        spec = self.spec
        probe = self.param("probe", lambda key: kernel_init()(key, (1, spec.width))[0]).astype(spec.dtype)
        x = ProbeAttention(spec, name="attention")(probe, x)
        return (x + MLPS[spec.mlp](spec, name="mlp")(Norm(name="norm")(x)))[:, 0]


class Token(nn.Module):
    """The class token's row (equation 4)."""

    spec: ModelSpec

    def __call__(self, x: Tokens) -> Pooled:
        """Returns the first token."""
        return x[:, 0]


class Gap(nn.Module):
    """Global average pooling (appendix D.3)."""

    spec: ModelSpec

    def __call__(self, x: Tokens) -> Pooled:
        """Returns the mean of the tokens."""
        return x.mean(axis=1, dtype=jnp.float32)


POOLINGS: dict[str, type[nn.Module]] = {"token": Token, "gap": Gap, "map": MapHead}
