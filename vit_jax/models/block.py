"""One encoder block: self-attention and MLP, each after a LayerNorm and inside a residual (equations 2 and 3)."""

from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from vit_jax.kernels import Packing
from vit_jax.models.attention import AttentionWeights, choose_packing
from vit_jax.models.attention_choice import attention_sizes
from vit_jax.models.layers import LayerNorm, NormParameters, Rows, add_bias, dropout
from vit_jax.models.mlp import FusedMlp, Mlp, is_fused
from vit_jax.models.part_specs import BlockKind
from vit_jax.models.position import PositionTable, RelativeTable, relative_table, table_of_tokens
from vit_jax.models.self_attention import SelfAttention
from vit_jax.models.spec import ModelSpec
from vit_jax.sharding import constrain, gather, local_size

Lines: TypeAlias = Float[Array, "batch lines patches width"]
WeightsInLines: TypeAlias = Float[Array, "batch lines heads queries keys"]


def shared_positions(encoder: nn.Module, spec: ModelSpec) -> PositionTable | RelativeTable | None:
    """Returns the positions that all blocks share, which are parameters of the encoder; None: they share none."""
    if spec.position.owner != "encoder":
        return None
    return relative_table(encoder.param, spec) if spec.position.is_relative else _gathered_positions(encoder, spec)


def _gathered_positions(module: nn.Module, spec: ModelSpec) -> PositionTable:
    def parameter(name: str, *declaration: Any) -> Array:
        return gather(module.param(name, *declaration), name, spec.dtype)

    return table_of_tokens(parameter, spec)


class Block(nn.Module):
    """z' = attention(norm(z)) + z, then mlp(norm(z')) + z'; with LayerScale, each channel of both branches has a factor
    (arXiv 2103.17239, equation 4). Dropout and stochastic depth are active if a `dropout` random stream is given.
    """

    spec: ModelSpec
    packing: Packing  # of the rows
    lines: int = 1  # in each image; the packing treats every line as an image

    @nn.compact
    def __call__(
        self,
        x: Rows,
        drop_rate: float | Float[Array, ""] = 0.0,
        shared: PositionTable | RelativeTable | None = None,
    ) -> tuple[Rows, AttentionWeights]:
        """Returns the rows and the attention weights.

        Args:
            x: the rows of all images.
            drop_rate: probability with which stochastic depth drops each of this block's branches.
            shared: the positions that all blocks share; None: they share none.
        """
        spec, packing = self.spec, self.packing
        x = self._add_positions(x, shared)
        y = LayerNorm(spec.block.norm_epsilon, name="norm1")(x)
        y, weights = SelfAttention(spec, packing, name="attention")(y, shared if spec.position.is_relative else None)
        y = dropout(self, y, packing)
        y = self._scale_branch("layer_scale1", y)
        x = x + self._drop_branch(y, drop_rate)
        x = self._add_mlp(checkpoint_name(x, "between"), drop_rate)
        return constrain(x, ("batch", "width")), weights

    def _add_mlp(self, x: Rows, drop_rate: float | Float[Array, ""]) -> Rows:
        """Returns the rows plus the MLP's branch."""
        spec, packing = self.spec, self.packing
        if is_fused(spec):
            return FusedMlp(spec, packing, name="mlp")(x, NormParameters(spec.width, name="norm2")())
        y = LayerNorm(spec.block.norm_epsilon, name="norm2")(x)
        y = Mlp(spec, packing, name="mlp")(y)
        y = self._scale_branch("layer_scale2", y)
        return x + self._drop_branch(y, drop_rate)

    def _add_positions(self, x: Rows, shared: PositionTable | RelativeTable | None) -> Rows:
        """Returns the rows plus the positions of the block's input; unchanged with `position_place=stem`."""
        if self.spec.position.place == "stem":
            return x
        table = _gathered_positions(self, self.spec) if shared is None else shared
        added = self.packing.pack(jnp.broadcast_to(table, (self.packing.images, *table.shape)))
        x = add_bias(x.reshape(-1, *added.shape), added).reshape(x.shape)
        return constrain(x, ("batch", "width"))

    def _scale_branch(self, name: str, branch: Rows) -> Rows:
        """Returns the branch times the factors of its channels, if the spec has any."""
        initial = self.spec.block.layer_scale
        if not initial:
            return branch
        factors = self.param(name, nn.initializers.constant(initial), branch.shape[-1:])
        return (branch.astype(jnp.float32) * factors).astype(branch.dtype)

    def _drop_branch(self, branch: Rows, rate: float | Float[Array, ""]) -> Rows:
        """Returns the branch after stochastic depth: zero for images drawn with probability `rate`, for the others
        divided by 1 - rate. Outside training the branch is unchanged.
        """
        if not self.spec.block.stochastic_depth or not self.has_rng("dropout"):
            return branch
        keep, lines = 1.0 - rate, len(branch) // self.packing.rows * self.packing.images
        kept = jax.random.bernoulli(self.make_rng("dropout"), keep, (lines // self.lines, 1, 1)) / keep
        kept = kept if self.lines == 1 else jnp.repeat(kept, self.lines, axis=0)
        return branch * self.packing.pack(jnp.broadcast_to(kept, (lines, self.packing.tokens, 1))).astype(branch.dtype)


class AxialBlock(nn.Module):
    """Two blocks in the place of one (Axial-ViT, appendix D.6). In the first, each patch attends to the patches of its
    row. In the second, it attends to the patches of its column.
    """

    spec: ModelSpec
    packing: Packing  # of the rows of the matrix

    @nn.compact
    def __call__(
        self, x: Rows, drop_rate: float | Float[Array, ""] = 0.0, shared: None = None
    ) -> tuple[Rows, AttentionWeights]:
        """Returns the rows and the attention weights between all patches, [batch, 2 x heads, patches, patches].

        The heads of the first block come before those of the second. Weights between patches that share no line are 0.

        Args:
            x: the rows of all images.
            drop_rate: the rate of stochastic depth in both blocks; see `Block`.
            shared: always None, as axial blocks share no positions.
        """
        rows, columns = self.spec.grid
        x = self.packing.unpack(x).reshape(-1, rows, columns, x.shape[-1])
        x, along_rows = self._attend(x, drop_rate, "rows")
        x, along_columns = self._attend(x.swapaxes(1, 2), drop_rate, "columns")
        weights = (
            jnp.einsum("brhcd,rs->bhrcsd", along_rows, jnp.eye(rows)),
            jnp.einsum("bchrs,cd->bhrcsd", along_columns, jnp.eye(columns)),
        )
        whole = jnp.concatenate(weights, axis=1).reshape(len(x), -1, rows * columns, rows * columns)
        return self.packing.pack(x.swapaxes(1, 2).reshape(len(x), rows * columns, -1)), whole

    def _attend(self, x: Lines, drop_rate: float | Float[Array, ""], name: str) -> tuple[Lines, WeightsInLines]:
        """Applies a block to lines [batch, lines, patches, width], each of which it treats as an image.

        Returns:
            The lines, and the attention weights within each line.
        """
        lines, patches, width = x.shape[1:]
        images, heads = local_size("batch", len(x)) * lines, local_size("heads", self.spec.attention.num_heads)
        sizes = attention_sizes(self.spec, images)._replace(images=images, tokens=patches, heads=heads)
        packing = choose_packing(self.spec.attention.kind, sizes)
        block = Block(self.spec, packing, lines, name=name)
        output, weights = block(packing.pack(x.reshape(-1, patches, width)), drop_rate)
        return packing.unpack(output).reshape(x.shape), weights.reshape(len(x), lines, *weights.shape[1:])


BLOCKS: dict[BlockKind, type[nn.Module]] = {"standard": Block, "axial": AxialBlock}
