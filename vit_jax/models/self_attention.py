"""The self-attention of a block: its parameters, what the spec changes in it, and the output projection."""

import functools

import flax.linen as nn
from flax.linen.initializers import xavier_uniform
from jaxtyping import Array, Float

from vit_jax.kernels import Packing
from vit_jax.models.attention import ATTENTIONS, AttentionChange, AttentionWeights, Pattern
from vit_jax.models.attention_pattern import attended_pairs
from vit_jax.models.head_change import HeadChange
from vit_jax.models.layers import Dense, DenseParameters, NormParameters, Rows, as_matrix, product
from vit_jax.models.position import RelativePositions, RelativeTable, relative_table
from vit_jax.models.rotary import ROTARIES
from vit_jax.models.sparse_attention import attend_in_pattern
from vit_jax.models.spec import ModelSpec


def out_projection(spec: ModelSpec) -> Dense:
    """Returns the output projection of the concatenated heads (equation 8), the submodule `out` of the calling module.

    Its kernel is multiplied as a matrix.
    """
    init, heads = xavier_uniform(in_axis=(0, 1), out_axis=2), (spec.attention.num_heads, spec.head_dim)

    def multiply(attended: Rows, kernel: Float[Array, "heads head_dim width"]) -> Rows:
        return product(attended, as_matrix(kernel, spec.width))

    return Dense(spec.width, spec.kernel_dtype, init, inputs=heads, multiply=multiply, name="out")


class SelfAttention(nn.Module):
    """Multi-head self-attention (appendix A), without dropout of the attention weights (appendix B.1)."""

    spec: ModelSpec
    packing: Packing  # of the rows

    @nn.compact
    def __call__(self, x: Rows, relative: RelativeTable | None = None) -> tuple[Rows, AttentionWeights]:
        """Returns what every row attends to, and the attention weights of the tokens.

        Args:
            x: the rows of all images.
            relative: the relative positions that all blocks share; None: they share none.
        """
        spec = self.spec
        # Queries, keys and values are projected by one matmul (equation 5), each initialised with its own fans.
        init = xavier_uniform(in_axis=0, out_axis=(2, 3), batch_axis=(1,))
        shape = (3, spec.attention.num_heads, spec.head_dim)
        kernel, bias = DenseParameters((spec.width,), shape, spec.kernel_dtype, init, name="qkv")()
        change = AttentionChange(self._qkv_change(), self._relative(relative), self._pattern())
        attend = ATTENTIONS[spec.attention.kind]
        attended, weights = attend(x, kernel, bias, self.packing, change)
        return out_projection(spec)(attended), weights

    def _relative(self, shared: RelativeTable | None) -> RelativePositions | None:
        """Returns the relative positions; None: there are none."""
        if not self.spec.position.is_relative:
            return None
        return RelativePositions(self.spec, relative_table(self.param, self.spec) if shared is None else shared)

    def _pattern(self) -> Pattern | None:
        """Returns which tokens attend to which; None: all to all."""
        if not self.spec.attention.is_sparse:
            return None
        return Pattern(attended_pairs(self.spec), functools.partial(attend_in_pattern, self.spec))

    def _qkv_change(self) -> HeadChange:
        """Returns what happens to queries and keys after their projection."""
        spec = self.spec
        names = ("query_norm", "key_norm") if spec.attention.qk_norm else ()
        norms = tuple(NormParameters(spec.head_dim, name=name)() for name in names)
        return HeadChange(norms, spec.block.norm_epsilon, ROTARIES[spec.position.rotary](spec))
