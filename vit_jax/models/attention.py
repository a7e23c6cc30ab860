"""Multi-head self-attention (appendix A): its parameters, and equation 8. Equations 5 to 7 are `PlainOps.attend`."""

import flax.linen as nn
from flax.linen.initializers import xavier_uniform

from vit_jax.models.attention_extras import AttentionExtras, AttentionWeights, Pattern
from vit_jax.models.layers import Dense, norm_of
from vit_jax.models.norms import Rows
from vit_jax.models.operations import PlainOps
from vit_jax.models.position import RELATIVES, RelativeTable, relative_table
from vit_jax.models.rotary import ROTARIES
from vit_jax.models.spec import BiasedProjections, ModelSpec

# Word of `model.qkv_bias` -> the projections with a bias: 0 queries, 1 keys, 2 values; None: all.
BIASED: dict[BiasedProjections, tuple[int, ...] | None] = {"all": None, "query_value": (0, 2), "none": ()}


def out_projection(spec: ModelSpec, ops: PlainOps) -> Dense:
    """Returns the output projection of the concatenated heads (equation 8), the submodule `out` of the calling module.

    Its kernel is [heads, head_dim, width].
    """
    init, heads = xavier_uniform(in_axis=(0, 1), out_axis=2), (spec.attention.num_heads, spec.head_dim)
    return Dense(spec.width, ops, init, inputs=heads, biased=None if spec.block.dense_bias else (), name="out")


class SelfAttention(nn.Module):
    """Multi-head self-attention, without dropout of the attention weights (appendix B.1)."""

    spec: ModelSpec
    ops: PlainOps

    @nn.compact
    def __call__(self, x: Rows, relative: RelativeTable | None = None) -> tuple[Rows, AttentionWeights]:
        """Returns the projected sums of the values that every token attends to, and the attention weights.

        Args:
            x: the rows of all images.
            relative: the relative positions that all blocks share; None: they share none.
        """
        spec = self.spec
        # Queries, keys and values are projected by one product (equation 5), each initialised with its own fans.
        init = xavier_uniform(in_axis=0, out_axis=(2, 3), batch_axis=(1,))
        shape = (3, spec.attention.num_heads, spec.head_dim)
        biased = BIASED[spec.attention.qkv_bias]
        kernel, bias = Dense(shape, self.ops, init, biased=biased, name="qkv").arrays((spec.width,))
        attended, weights = self.ops.attend(x, kernel, bias, self._extras(relative))  # equations 5 to 7
        return out_projection(spec, self.ops)(attended), weights  # equation 8

    def _extras(self, shared: RelativeTable | None) -> AttentionExtras:
        spec, ops, relative = self.spec, self.ops, None
        names = ("query_norm", "key_norm") if spec.attention.qk_norm else ()
        norms = tuple(norm_of(spec.block, ops, name).parameters(spec.head_dim) for name in names)
        if spec.position.is_relative:
            table = relative_table(self.param, spec) if shared is None else shared
            relative = RELATIVES[spec.position.kind](spec, table)
        pattern = Pattern(spec) if spec.attention.is_sparse else None
        return AttentionExtras(norms, ROTARIES[spec.position.rotary](spec), relative, pattern)
