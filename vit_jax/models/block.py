"""One encoder block: self-attention and MLP, each after a LayerNorm and inside a residual (equations 2 and 3)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import xavier_uniform
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from vit_jax.kernels import Packing
from vit_jax.models.attention import ATTENTIONS, AttentionWeights, QKVBias, QKVKernel
from vit_jax.models.layers import LayerNorm, Rows, add_bias, as_matrix, dropout, product
from vit_jax.models.mlp import MLPS
from vit_jax.models.spec import ModelSpec
from vit_jax.sharding import constrain, gather


class QKVParameters(nn.Module):
    """The projection to queries, keys and values by one matmul (equation 5); each is initialised with its own fans."""

    spec: ModelSpec

    @nn.compact
    def __call__(self) -> tuple[QKVKernel, QKVBias]:
        """Returns the kernel in the dtype of its gradient, and the bias."""
        spec = self.spec
        shape = (3, spec.attention.num_heads, spec.head_dim)
        kernel_init = xavier_uniform(in_axis=0, out_axis=(2, 3), batch_axis=(1,))
        kernel = self.param("kernel", kernel_init, (spec.width, *shape)).astype(spec.kernel_dtype)
        return kernel, self.param("bias", nn.initializers.zeros, shape)


class OutProjection(nn.Module):
    """The output projection of the concatenated heads (equation 8)."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, attended: Rows) -> Rows:
        """Returns the projection of `attended`, the concatenated heads."""
        spec = self.spec
        shape = (spec.attention.num_heads, spec.head_dim, spec.width)
        kernel = self.param("kernel", xavier_uniform(in_axis=(0, 1), out_axis=2), shape).astype(spec.kernel_dtype)
        bias = self.param("bias", nn.initializers.zeros, (spec.width,))
        kernel = gather(kernel, ("heads", "head_dim", "width"), attended.dtype)
        return add_bias(product(attended, as_matrix(kernel, spec.width)), bias)


class SelfAttention(nn.Module):
    """Multi-head self-attention (appendix A), without dropout of the attention weights (appendix B.1)."""

    spec: ModelSpec
    packing: Packing  # of the rows

    @nn.compact
    def __call__(self, x: Rows) -> tuple[Rows, AttentionWeights]:
        """Returns what every row attends to, and the attention weights of the tokens."""
        kernel, bias = QKVParameters(self.spec, name="qkv")()
        attended, weights = ATTENTIONS[self.spec.attention.kind](x, kernel, bias, self.packing)
        return OutProjection(self.spec, name="out")(attended), weights


class Block(nn.Module):
    """z' = attention(norm(z)) + z, then mlp(norm(z')) + z'. Trains if a `dropout` random stream is given."""

    spec: ModelSpec
    packing: Packing  # of the rows

    @nn.compact
    def __call__(self, x: Rows, drop_rate: float | Float[Array, ""] = 0.0) -> tuple[Rows, AttentionWeights]:
        """Returns the rows and the attention weights.

        Args:
            x: the rows of all images.
            drop_rate: probability with which stochastic depth drops each of this block's branches.
        """
        branch, weights = SelfAttention(self.spec, self.packing, name="attention")(LayerNorm(name="norm1")(x))
        x = checkpoint_name(x + self.drop_branch(dropout(self, branch, self.packing), drop_rate), "between")
        branch = MLPS[self.spec.block.mlp](self.spec, self.packing, name="mlp")(LayerNorm(name="norm2")(x))
        x = x + self.drop_branch(branch, drop_rate)
        return constrain(x, ("batch", "width")), weights

    def drop_branch(self, branch: Rows, rate: float | Float[Array, ""]) -> Rows:
        """Returns the branch, zero for images drawn with probability `rate`, else divided by 1 - rate."""
        if not self.spec.block.stochastic_depth or not self.has_rng("dropout"):
            return branch
        keep, images = 1.0 - rate, len(branch) // self.packing.rows * self.packing.images
        kept = jax.random.bernoulli(self.make_rng("dropout"), keep, (images, 1, 1)) / keep
        return branch * self.packing.pack(jnp.broadcast_to(kept, (images, self.packing.tokens, 1))).astype(branch.dtype)
