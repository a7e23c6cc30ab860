"""The operations of a model on devices: rows of one matrix, their packing, and the forms that the spec names."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Shaped

from vit_jax.execution import dense_layers, norms_and_products
from vit_jax.execution.attention_kinds import ATTENTIONS, fastest_attention
from vit_jax.execution.dense_layers import MLPS
from vit_jax.execution.forms_by_chip import AttentionSizes, allows_fused_mlp, choose_packing, sizes_of_images
from vit_jax.execution.stack import run_blocks
from vit_jax.execution.tpu import add_fused_mlp
from vit_jax.kernels import Packing, gelu_tanh
from vit_jax.models import (
    AttentionExtras,
    AttentionWeights,
    BlockStep,
    Channels,
    ModelSpec,
    NormParameters,
    PlainOps,
    Projection,
    QKVBias,
    QKVKernel,
    Rows,
    Tokens,
    TwoLayers,
    as_matrix_of_patches,
)
from vit_jax.sharding import constrain, gather, local_size
from vit_jax.tree import ArrayTree

ALONE = Packing(1, 1, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOps(PlainOps):
    """The operations of `PlainOps` in the forms that a spec names, on the mesh for which the model is traced.

    What each method computes is documented in `PlainOps`; this class documents only how.
    The tokens of all images are rows of one matrix: all arrays of the blocks then have one layout in memory, that of
    their products.

    Attributes:
        spec: the spec of the model, a `ModelSpec` or a `BitSpec`.
        packing: the packing of the rows.
    """

    spec: Any
    packing: Packing = ALONE  # until `for_images`

    def for_images(self, spec: ModelSpec, images: int) -> "DeviceOps":
        """See `PlainOps`."""
        sizes = _local_sizes(spec, local_size("batch", images), spec.tokens)
        # Axial blocks pack their lines themselves.
        kind = spec.attention.kind if spec.block.kind == "standard" else "tokens_first"
        return dataclasses.replace(self, spec=spec, packing=choose_packing(kind, sizes))

    def for_lines(self, images: int, lines: int, patches: int) -> "DeviceOps":
        """See `PlainOps`."""
        sizes = _local_sizes(self.spec, local_size("batch", images) * lines, patches)
        return dataclasses.replace(self, packing=choose_packing(self.spec.attention.kind, sizes), lines=lines)

    @property
    def for_pooled(self) -> "DeviceOps":
        """See `PlainOps`."""
        return dataclasses.replace(self, packing=ALONE)

    def rows(self, tokens: Tokens) -> Rows:
        """See `PlainOps`."""
        return self.packing.pack(tokens)

    def tokens(self, rows: Rows) -> Tokens:
        """See `PlainOps`."""
        return self.packing.unpack(rows)

    def place(self, x: Shaped[Array, "..."], *dimensions: str) -> Shaped[Array, "..."]:
        """See `PlainOps`."""
        return constrain(x, dimensions)

    def _cast(self, kernel: Array, dtype: DTypeLike) -> Array:
        """Returns a layer's kernel in the dtype of its gradient: float32, or the activation's if the spec says so."""
        follows = isinstance(self.spec, ModelSpec) and self.spec.grad_dtype == "auto"
        return kernel.astype(dtype if follows else jnp.float32)

    def dense(self, x: Array, kernel: Array, bias: Array, name: str) -> Array:
        """See `PlainOps`."""
        return dense_layers.dense(x, self._cast(kernel, x.dtype), bias, name)

    def norm(self, x: Rows, norm: NormParameters) -> Rows:
        """Returns the normalised rows. The backward pass of LayerNorm is written out."""
        return norms_and_products.normalise(x, norm)

    def gelu(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns the approximate GELU, whose gradient has few operations."""
        return gelu_tanh(x)

    def embed(
        self,
        patches: Float[Array, "batch patches inputs"],
        projection: Projection,
        learned: Sequence[Float[Array, "_ width"]],
        positions: Float[Array, "tokens width"] | None,
        replaced: tuple[Bool[Array, "batch patches"], Channels] | None,
        drop: Callable[[Rows, PlainOps], Rows],
    ) -> Rows:
        """Returns the rows of equation 1 after dropout, see `PlainOps.embed`, as [0; x_1 K; ...] + `added`.

        K is the kernel of E, and `added` is what is the same for all images: the learned tokens and, for every patch,
        the bias of E; plus the positions. Images share no rows before dropout. The empty rows are there from the
        patches on, so that the sum is one pass.
        """
        kernel, bias = projection
        added = jnp.concatenate([*learned, jnp.broadcast_to(bias, (patches.shape[1], self.spec.width))])
        if positions is not None:
            added += positions
        stem = dataclasses.replace(self, packing=self.packing.unshared)
        kernel = gather(self._cast(kernel, patches.dtype), "embed/kernel", patches.dtype)
        before = len(added) - patches.shape[1]
        empty = (0, 0), (before, stem.packing.rows - len(added))
        x = norms_and_products.product(jnp.pad(patches, (*empty, (0, 0))), as_matrix_of_patches(kernel))
        if replaced is not None:
            masked, mask = replaced
            x = jnp.where(jnp.pad(masked, empty)[..., None], norms_and_products.add_bias(jnp.zeros_like(x), mask), x)
        x = constrain(norms_and_products.add_bias(x, stem.packing.pack(added[None])), ("batch", "tokens", "width"))
        x = drop(x.reshape(-1, self.spec.width), stem)
        return constrain(stem.packing.repack(x, self.packing), ("batch", "width"))

    def table(self, parameter: Array, name: str, dtype: DTypeLike) -> Array:
        """Returns a table of positions, whole on each device."""
        return gather(parameter, name, dtype)

    def add(self, x: Rows, table: Float[Array, "tokens width"]) -> Rows:
        """See `PlainOps`."""
        added = self.packing.pack(jnp.broadcast_to(table, (self.packing.images, *table.shape)))
        x = norms_and_products.add_bias(x.reshape(-1, *added.shape), added).reshape(x.shape)
        return constrain(x, ("batch", "width"))

    def per_token(self, x: Rows, draw: Callable[[tuple[int, int]], Array]) -> Array:
        """See `PlainOps`."""
        tokens = len(x) // self.packing.rows * self.packing.images * self.packing.tokens
        return self.packing.complete(draw((tokens, x.shape[-1])))

    def per_image(self, x: Rows, draw: Callable[[int], Array]) -> Array:
        """See `PlainOps`."""
        lines = len(x) // self.packing.rows * self.packing.images
        factors = draw(lines // self.lines)
        factors = factors if self.lines == 1 else jnp.repeat(factors, self.lines, axis=0)
        return self.packing.pack(jnp.broadcast_to(factors, (lines, self.packing.tokens, 1)))

    def attend(
        self, x: Rows, kernel: QKVKernel, bias: QKVBias, extras: AttentionExtras
    ) -> tuple[Rows, AttentionWeights]:
        """Returns attention in the form that the spec names, see `PlainOps.attend`."""
        spec, packing = self.spec, self.packing
        if spec.attention.kind == "auto":
            images = len(x) // packing.rows * packing.images
            attention = fastest_attention(_local_sizes(spec, local_size("batch", images), packing.tokens))
        else:
            attention = ATTENTIONS[spec.attention.kind]
        return attention(x, self._cast(kernel, x.dtype), bias, packing, extras)

    def widen(self, x: Rows, kernel: Array, bias: Array, name: str, activate: Callable[[Array], Array]) -> Array:
        """Returns the hidden channels of an MLP, with the communication that the spec names."""
        widen, _ = MLPS[self.spec.block.mlp]
        return widen(x, self._cast(kernel, x.dtype), bias, name, activate)

    def narrow(self, hidden: Array, kernel: Array, bias: Array) -> Rows:
        """Returns the result of the second layer of an MLP, with the communication that the spec names."""
        _, narrow = MLPS[self.spec.block.mlp]
        return narrow(hidden, self._cast(kernel, hidden.dtype), bias)

    def add_mlp(self, x: Rows, norm: NormParameters, mlp: TwoLayers, branch: Callable[[Rows], Rows]) -> Rows:
        """Returns x + branch(mlp(norm(x))), by one TPU kernel if the spec names it and a device has all channels."""
        spec, x = self.spec, checkpoint_name(x, "between")
        whole = local_size("mlp", spec.mlp_dim) == spec.mlp_dim
        if not (spec.block.mlp == "fused" and allows_fused_mlp(spec) and whole):
            return super().add_mlp(x, norm, mlp, branch)
        first, second = ((self._cast(kernel, x.dtype), bias) for kernel, bias in mlp.arrays())
        return add_fused_mlp(x, norm, first, second, self.packing)

    def run_blocks(
        self, step: BlockStep, x: Rows, stacks: tuple[ArrayTree, ...], rates: Array
    ) -> tuple[Rows, dict[str, Any]]:
        """Applies the blocks one by one or as a loop, see `PlainOps.run_blocks`."""
        return run_blocks(self.spec, step, x, stacks, rates)


def _local_sizes(spec: ModelSpec, images: int, tokens: int) -> AttentionSizes:
    return sizes_of_images(spec, images, tokens, local_size("heads", spec.attention.num_heads))
