"""One encoder block: self-attention and MLP, each after a LayerNorm and inside a residual (equations 2 and 3)."""

from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.attention import SelfAttention
from vit_jax.models.attention_extras import AttentionWeights
from vit_jax.models.layers import dropout, norm_of
from vit_jax.models.mlp import Mlp
from vit_jax.models.norms import Rows
from vit_jax.models.operations import PlainOps
from vit_jax.models.position import PositionTable, RelativeTable, relative_table, table_of_tokens
from vit_jax.models.spec import BlockKind, ModelSpec

Lines: TypeAlias = Float[Array, "batch lines patches width"]
WeightsInLines: TypeAlias = Float[Array, "batch lines heads queries keys"]


def shared_positions(encoder: nn.Module, spec: ModelSpec, ops: PlainOps) -> PositionTable | RelativeTable | None:
    """Returns the positions that all blocks share, which are parameters of the encoder; None: they share none."""
    if spec.position.owner != "encoder":
        return None
    return relative_table(encoder.param, spec) if spec.position.is_relative else _position_table(encoder, spec, ops)


def _position_table(module: nn.Module, spec: ModelSpec, ops: PlainOps) -> PositionTable:
    def parameter(name: str, *declaration: Any) -> Array:
        return ops.table(module.param(name, *declaration), name, spec.dtype)

    return table_of_tokens(parameter, spec)


class Block(nn.Module):
    """z' = MSA(LN(z)) + z, then MLP(LN(z')) + z'; with LayerScale, each channel of both branches has a factor (arXiv
    2103.17239, equation 4). Dropout and stochastic depth are active if a `dropout` random stream is given.
    """

    spec: ModelSpec
    ops: PlainOps

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
        spec, ops = self.spec, self.ops
        if spec.position.place != "stem":
            x = ops.add(x, _position_table(self, spec, ops) if shared is None else shared)
        # Equation 2: z' = MSA(LN(z)) + z.
        y = norm_of(spec.block, ops, "norm1")(x)
        y, weights = SelfAttention(spec, ops, name="attention")(y, shared if spec.position.is_relative else None)
        x = x + self._branch("layer_scale1", dropout(self, y, ops), drop_rate)
        # Equation 3: z = MLP(LN(z')) + z'. One operation, since one kernel may compute it.
        norm, mlp = norm_of(spec.block, ops, "norm2").parameters(spec.width), Mlp(spec, ops, name="mlp")
        x = ops.add_mlp(x, norm, mlp, lambda y: self._branch("layer_scale2", y, drop_rate))
        return ops.place(x, "batch", "width"), weights

    def _branch(self, name: str, x: Rows, drop_rate: float | Float[Array, ""]) -> Rows:
        """Returns a residual branch after LayerScale and stochastic depth, if the spec has them.

        Stochastic depth is zero for images drawn with probability `drop_rate`, and divides the others by 1 - drop_rate.
        """
        if initial := self.spec.block.layer_scale:
            factors = self.param(name, nn.initializers.constant(initial), x.shape[-1:])
            x = (x.astype(jnp.float32) * factors).astype(x.dtype)
        if not self.spec.block.stochastic_depth or not self.has_rng("dropout"):
            return x
        keep = 1.0 - drop_rate

        def draw(images: int) -> Float[Array, "images 1 1"]:
            return jax.random.bernoulli(self.make_rng("dropout"), keep, (images, 1, 1)) / keep

        return x * self.ops.per_image(x, draw).astype(x.dtype)


class AxialBlock(nn.Module):
    """Two blocks in the place of one (Axial-ViT, appendix D.6). In the first, each patch attends to the patches of its
    row. In the second, it attends to the patches of its column.
    """

    spec: ModelSpec
    ops: PlainOps

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
        x = self.ops.tokens(x).reshape(-1, rows, columns, x.shape[-1])
        x, along_rows = self._attend(x, drop_rate, "rows")
        x, along_columns = self._attend(x.swapaxes(1, 2), drop_rate, "columns")
        weights = (
            jnp.einsum("brhcd,rs->bhrcsd", along_rows, jnp.eye(rows)),
            jnp.einsum("bchrs,cd->bhrcsd", along_columns, jnp.eye(columns)),
        )
        whole = jnp.concatenate(weights, axis=1).reshape(x.shape[0], -1, rows * columns, rows * columns)
        return self.ops.rows(x.swapaxes(1, 2).reshape(-1, rows * columns, x.shape[-1])), whole

    def _attend(self, x: Lines, drop_rate: float | Float[Array, ""], name: str) -> tuple[Lines, WeightsInLines]:
        """Applies a block to lines [batch, lines, patches, width], each of which it treats as an image.

        Returns:
            The lines, and the attention weights within each line.
        """
        lines, patches, width = x.shape[1:]
        ops = self.ops.for_lines(x.shape[0], lines, patches)
        output, weights = Block(self.spec, ops, name=name)(ops.rows(x.reshape(-1, patches, width)), drop_rate)
        return ops.tokens(output).reshape(x.shape), weights.reshape(-1, lines, *weights.shape[1:])


BLOCKS: dict[BlockKind, type[nn.Module]] = {"standard": Block, "axial": AxialBlock}
