"""One encoder block: self-attention and MLP, each after a LayerNorm and inside a residual (equations 2 and 3)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.attention import ATTENTIONS, Weights
from vit_jax.models.mlp import MLPS, Tokens, dropout, kernel_init
from vit_jax.models.norm import Norm
from vit_jax.models.spec import ModelSpec
from vit_jax.sharding import constrain, gather


class Fused(nn.Module):
    """Queries, keys and values by one matmul (equation 5); each is initialised with its own fans."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Tokens) -> Float[Array, "batch tokens 3 heads head_dim"]:
        """Returns the three projections of the tokens, side by side."""
        spec = self.spec
        shape = (3, spec.attention.num_heads, spec.head_dim)
        fans = kernel_init(in_axis=0, out_axis=(2, 3), batch_axis=(1,))
        kernel = self.param("kernel", fans, (spec.width, *shape)).astype(spec.dtype)
        bias = self.param("bias", nn.initializers.zeros, shape).astype(spec.dtype)
        kernel = gather(kernel, ("width", "qkv", "heads", "head_dim"))
        return jnp.einsum("btw,wshd->btshd", x, kernel) + bias


class Out(nn.Module):
    """The projection of the heads' mixed values (equation 8)."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, mixed: Tokens) -> Tokens:
        """Returns the heads, concatenated in `mixed`, times the output kernel."""
        spec = self.spec
        fans = kernel_init(in_axis=(0, 1), out_axis=2)
        kernel = self.param("kernel", fans, (spec.attention.num_heads, spec.head_dim, spec.width)).astype(spec.dtype)
        bias = self.param("bias", nn.initializers.zeros, (spec.width,)).astype(spec.dtype)
        kernel = gather(kernel, ("heads", "head_dim", "width"))
        return mixed @ kernel.reshape(spec.width, spec.width) + bias


class SelfAttention(nn.Module):
    """Multi-head self-attention (appendix A). Nothing is dropped from the attention weights (appendix B.1)."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Tokens) -> tuple[Tokens, Weights]:
        """Returns the attended tokens and the attention weights."""
        names = ("batch", "tokens", "qkv", "heads", "head_dim")
        qkv = constrain(Fused(self.spec, name="qkv")(x), names)
        mixed, weights = ATTENTIONS[self.spec.attention.attention](qkv)
        return Out(self.spec, name="out")(mixed), weights


class Block(nn.Module):
    """z' = attention(norm(z)) + z, then mlp(norm(z')) + z'. Training when a `dropout` random stream is given."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Tokens, drop_branch: float | Float[Array, ""] = 0.0) -> tuple[Tokens, Weights]:
        """Returns the tokens and the attention weights.

        Args:
            x: tokens.
            drop_branch: rate of this block's stochastic depth.
        """
        branch, weights = SelfAttention(self.spec, name="attention")(Norm(name="norm1")(x))
        x = x + self.surviving(dropout(self, branch), drop_branch)
        branch = MLPS[self.spec.mlp](self.spec, name="mlp")(Norm(name="norm2")(x))
        x = x + self.surviving(branch, drop_branch)
        return constrain(x, ("batch", "tokens", "width")), weights

    def surviving(self, branch: Tokens, rate: float | Float[Array, ""]) -> Tokens:
        """Returns a branch without the examples that lose it, the others scaled by 1 / (1 - rate)."""
        if not self.spec.stochastic_depth or not self.has_rng("dropout"):
            return branch
        keep = 1.0 - rate
        kept = jax.random.bernoulli(self.make_rng("dropout"), keep, (len(branch), 1, 1))
        return branch * (kept / keep).astype(branch.dtype)
