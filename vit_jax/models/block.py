"""One encoder block: self-attention and MLP, each after a LayerNorm and inside a residual (equations 2 and 3)."""

from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.attention import ATTENTIONS, Weights
from vit_jax.models.dense import narrow
from vit_jax.models.norm import Norm
from vit_jax.models.spec import Spec
from vit_jax.sharding import constrain

Tokens: TypeAlias = Float[Array, "batch tokens width"]

kernel_init = nn.initializers.xavier_uniform
bias_init = nn.initializers.normal(1e-6)


class Fused(nn.Module):
    """Queries, keys and values by one matmul (equation 5); each is initialised with its own fans."""

    spec: Spec

    @nn.compact
    def __call__(self, x: Tokens) -> Float[Array, "batch tokens 3 heads head_dim"]:
        """Returns the three projections of the tokens, side by side."""
        spec = self.spec
        shape = (3, spec.attention.num_heads, spec.head_dim)
        fans = kernel_init(in_axis=0, out_axis=(2, 3), batch_axis=(1,))
        kernel = self.param("kernel", fans, (spec.width, *shape)).astype(spec.dtype)
        bias = self.param("bias", nn.initializers.zeros, shape).astype(spec.dtype)
        return jnp.einsum("btw,wshd->btshd", x, kernel) + bias


class Out(nn.Module):
    """The projection of the heads' mixed values (equation 8)."""

    spec: Spec

    @nn.compact
    def __call__(self, mixed: Tokens) -> Tokens:
        """Returns the heads, concatenated in `mixed`, times the output kernel."""
        spec = self.spec
        fans = kernel_init(in_axis=(0, 1), out_axis=2)
        kernel = self.param("kernel", fans, (spec.attention.num_heads, spec.head_dim, spec.width)).astype(spec.dtype)
        bias = self.param("bias", nn.initializers.zeros, (spec.width,)).astype(spec.dtype)
        return mixed @ kernel.reshape(spec.width, spec.width) + bias


class SelfAttention(nn.Module):
    """Multi-head self-attention (appendix A). Nothing is dropped from the attention weights (appendix B.1)."""

    spec: Spec

    @nn.compact
    def __call__(self, x: Tokens) -> tuple[Tokens, Weights]:
        """Returns the attended tokens and the attention weights."""
        names = ("batch", "tokens", "qkv", "heads", "head_dim")
        qkv = constrain(Fused(self.spec, name="qkv")(x), names)
        mixed, weights = ATTENTIONS[self.spec.attention.attention](qkv)
        return Out(self.spec, name="out")(mixed), weights


class Mlp(nn.Module):
    """Dense, GELU by tanh, dense; dropout after both (section 3.1, appendix B.1)."""

    spec: Spec

    @nn.compact
    def __call__(self, x: Tokens) -> Tokens:
        """Returns tokens of the same width."""
        spec = self.spec
        dense1 = nn.Dense(spec.mlp_dim, dtype=spec.dtype, kernel_init=kernel_init(), bias_init=bias_init, name="dense1")
        hidden = nn.gelu(dense1(x), approximate=True)
        hidden = dropout(self, constrain(hidden, ("batch", "tokens", "mlp")))
        return dropout(self, Narrowing(spec, name="dense2")(hidden))


class Narrowing(nn.Module):
    """The MLP's second dense layer, back to the width."""

    spec: Spec

    @nn.compact
    def __call__(self, hidden: Float[Array, "batch tokens mlp"]) -> Tokens:
        """Returns the hidden values times the kernel, plus the bias."""
        kernel = self.param("kernel", kernel_init(), (hidden.shape[-1], self.spec.width)).astype(hidden.dtype)
        bias = self.param("bias", bias_init, (self.spec.width,)).astype(hidden.dtype)
        return narrow(hidden, kernel) + bias


class Block(nn.Module):
    """z' = attention(norm(z)) + z, then mlp(norm(z')) + z'. Training when a `dropout` random stream is given."""

    spec: Spec

    @nn.compact
    def __call__(self, x: Tokens, drop_branch: float | Float[Array, ""] = 0.0) -> tuple[Tokens, Weights]:
        """Returns the tokens and the attention weights.

        Args:
            x: tokens.
            drop_branch: rate of this block's stochastic depth.
        """
        branch, weights = SelfAttention(self.spec, name="attention")(Norm(name="norm1")(x))
        x = x + self.surviving(dropout(self, branch), drop_branch)
        branch = Mlp(self.spec, name="mlp")(Norm(name="norm2")(x))
        x = x + self.surviving(branch, drop_branch)
        return constrain(x, ("batch", "tokens", "width")), weights

    def surviving(self, branch: Tokens, rate: float | Float[Array, ""]) -> Tokens:
        """Returns a branch without the examples that lose it, the others scaled by 1 / (1 - rate)."""
        if not self.spec.stochastic_depth or not self.has_rng("dropout"):
            return branch
        keep = 1.0 - rate
        kept = jax.random.bernoulli(self.make_rng("dropout"), keep, (len(branch), 1, 1))
        return branch * (kept / keep).astype(branch.dtype)


def dropout(module: nn.Module, x: Tokens) -> Tokens:
    """Returns `x` after dropout at the spec's rate, if the module has a `dropout` random stream."""
    return nn.Dropout(module.spec.dropout_rate, deterministic=not module.has_rng("dropout"))(x)
