"""One encoder block: self-attention and MLP, each after a LayerNorm and inside a residual (equations 2 and 3)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import xavier_uniform
from jaxtyping import Array, Float

from vit_jax.models.attention import ATTENTIONS, QKV, AttentionWeights
from vit_jax.models.layers import LayerNorm, Tokens, dropout
from vit_jax.models.mlp import MLPS
from vit_jax.models.spec import ModelSpec
from vit_jax.sharding import constrain, gather


class QKVProjection(nn.Module):
    """Queries, keys and values by one matmul (equation 5); each is initialised with its own fans."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Tokens) -> QKV:
        """Returns the three projections of the tokens, side by side."""
        spec = self.spec
        shape = (3, spec.attention.num_heads, spec.head_dim)
        kernel_init = xavier_uniform(in_axis=0, out_axis=(2, 3), batch_axis=(1,))
        kernel = self.param("kernel", kernel_init, (spec.width, *shape)).astype(spec.dtype)
        bias = self.param("bias", nn.initializers.zeros, shape).astype(spec.dtype)
        kernel = gather(kernel, ("width", "qkv", "heads", "head_dim"))
        return jnp.einsum("btw,wshd->btshd", x, kernel) + bias


class OutProjection(nn.Module):
    """The output projection of the concatenated heads (equation 8)."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, attended: Tokens) -> Tokens:
        """Returns the projection of `attended`, the concatenated heads."""
        spec = self.spec
        shape = (spec.attention.num_heads, spec.head_dim, spec.width)
        kernel = self.param("kernel", xavier_uniform(in_axis=(0, 1), out_axis=2), shape).astype(spec.dtype)
        bias = self.param("bias", nn.initializers.zeros, (spec.width,)).astype(spec.dtype)
        kernel = gather(kernel, ("heads", "head_dim", "width"))
        return attended @ kernel.reshape(spec.width, spec.width) + bias


class SelfAttention(nn.Module):
    """Multi-head self-attention (appendix A), without dropout of the attention weights (appendix B.1)."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Tokens) -> tuple[Tokens, AttentionWeights]:
        """Returns the attended tokens and the attention weights."""
        names = ("batch", "tokens", "qkv", "heads", "head_dim")
        qkv = constrain(QKVProjection(self.spec, name="qkv")(x), names)
        attended, weights = ATTENTIONS[self.spec.attention.kind](qkv)
        return OutProjection(self.spec, name="out")(attended), weights


class Block(nn.Module):
    """z' = attention(norm(z)) + z, then mlp(norm(z')) + z'. Trains if a `dropout` random stream is given."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Tokens, drop_rate: float | Float[Array, ""] = 0.0) -> tuple[Tokens, AttentionWeights]:
        """Returns the tokens and the attention weights.

        Args:
            x: tokens.
            drop_rate: probability with which stochastic depth drops each of this block's branches.
        """
        branch, weights = SelfAttention(self.spec, name="attention")(LayerNorm(name="norm1")(x))
        x = x + self.drop_branch(dropout(self, branch), drop_rate)
        branch = MLPS[self.spec.mlp](self.spec, name="mlp")(LayerNorm(name="norm2")(x))
        x = x + self.drop_branch(branch, drop_rate)
        return constrain(x, ("batch", "tokens", "width")), weights

    def drop_branch(self, branch: Tokens, rate: float | Float[Array, ""]) -> Tokens:
        """Returns the branch, zero for examples drawn with probability `rate`, else divided by 1 - rate."""
        if not self.spec.stochastic_depth or not self.has_rng("dropout"):
            return branch
        keep = 1.0 - rate
        kept = jax.random.bernoulli(self.make_rng("dropout"), keep, (len(branch), 1, 1))
        return branch * (kept / keep).astype(branch.dtype)
