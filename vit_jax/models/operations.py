"""The operations of which the paper's equations are made.

Modules call them as `self.ops`. `PlainOps` computes them on tokens, [batch, tokens, width], by ordinary
differentiation; the batch may be symbolic. It says what the operations mean. `execution.DeviceOps` computes the same in
the forms that suit a device, where the tokens of all images are rows of one matrix.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Shaped

from vit_jax.models.attention_extras import AttentionExtras, AttentionWeights
from vit_jax.models.norms import NORMS, Channels, NormParameters, Rows
from vit_jax.models.spec import ModelSpec
from vit_jax.tree import ArrayTree

Tokens: TypeAlias = Float[Array, "batch tokens width"]
DenseArrays: TypeAlias = tuple[Float[Array, "..."], Float[Array, "..."]]  # kernel and bias
# Kernel and bias of E.
Projection: TypeAlias = tuple[Float[Array, "size size channels width"], Channels]
QKVKernel: TypeAlias = Float[Array, "width 3 heads head_dim"]
QKVBias: TypeAlias = Float[Array, "3 heads head_dim"]
Size: TypeAlias = Any  # of a dimension: an int, or a symbol
# (rows, parameters of one block, its number, its rate of stochastic depth) -> (rows, intermediates by name)
BlockStep: TypeAlias = Callable[[Rows, ArrayTree, Array | int, Array], tuple[Rows, dict[str, Array]]]


@runtime_checkable
class TwoLayers(Protocol):
    """The two dense layers of an MLP, with what is between and after them; `models.mlp.Mlp`."""

    def arrays(self) -> tuple[DenseArrays, DenseArrays]:
        """Returns kernel and bias of each layer."""

    def __call__(self, x: Rows) -> Rows:
        """Returns the result of both layers."""


@dataclasses.dataclass(frozen=True)
class PlainOps:
    """The operations on [batch, tokens, width].

    Attributes:
        lines: the number of lines into which each image was divided, every line being an image to the operations.
    """

    lines: int = 1

    # The same operations for other rows.

    def for_images(self, spec: ModelSpec, images: Size) -> "PlainOps":
        """Returns the operations for the blocks of a model, given the number of images in the batch."""
        return self

    def for_lines(self, images: Size, lines: int, patches: int) -> "PlainOps":
        """Returns the operations for lines of patches, each of which is treated as an image; `lines` in each image."""
        return dataclasses.replace(self, lines=lines)

    @property
    def for_pooled(self) -> "PlainOps":
        """The operations for one row per image, [batch, width]."""
        return self

    # Where tokens lie.

    def rows(self, tokens: Tokens) -> Rows:
        """Returns the rows of the tokens of all images."""
        return tokens

    def tokens(self, rows: Rows) -> Tokens:
        """Returns the tokens of each image."""
        return rows

    def place(self, x: Shaped[Array, "..."], *dimensions: str) -> Shaped[Array, "..."]:
        """Returns `x`, whose dimensions have these names, divided over the devices as `sharding/axis_rules.py` says."""
        return x

    def embed(
        self,
        patches: Float[Array, "batch patches inputs"],
        projection: Projection,
        learned: Sequence[Float[Array, "_ width"]],
        positions: Float[Array, "tokens width"] | None,
        replaced: tuple[Bool[Array, "batch patches"], Channels] | None,
        drop: "Callable[[Rows, PlainOps], Rows]",
    ) -> Rows:
        """Returns the rows of [x_class; x_1 E; x_2 E; ...] + E_pos (equation 1), after dropout.

        Args:
            patches: the patches x_1, x_2, ... of each image.
            projection: the kernel of E, of patches with their channels first, and its bias.
            learned: the learned tokens before the patches: x_class, registers.
            positions: E_pos; None: nothing is added.
            replaced: which products of patch and kernel a vector replaces, and this vector; None: none are replaced.
            drop: dropout of rows, given the operations for them.
        """
        kernel, bias = projection
        x = jnp.tensordot(patches, as_matrix_of_patches(kernel).astype(patches.dtype), 1)
        if replaced is not None:
            x = jnp.where(replaced[0][..., None], replaced[1].astype(x.dtype), x)
        first = [jnp.broadcast_to(rows, (x.shape[0], *rows.shape)) for rows in learned]
        z = jnp.concatenate([*first, x.astype(jnp.float32) + bias], axis=1)  # in float32, so that it is rounded once
        z = z if positions is None else z + positions
        return drop(z.astype(x.dtype), self)

    # What is computed for each row alone.

    def dense(self, x: Array, kernel: Array, bias: Array, name: str) -> Array:
        """Returns `x @ kernel + bias` in the dtype of `x`, [*rows, *outputs].

        Args:
            x: [*rows, inputs].
            kernel: [*inputs, *outputs], whose inputs may be several dimensions that are one in `x`.
            bias: [*outputs].
            name: the name of the layer.
        """
        kernel = kernel.reshape(x.shape[-1], *bias.shape).astype(x.dtype)
        return jnp.tensordot(x, kernel, 1) + bias.astype(x.dtype)

    def norm(self, x: Rows, norm: NormParameters) -> Rows:
        """Returns the normalised rows, in the dtype of `x`."""
        return NORMS[norm.kind].normalise(x, norm)

    def gelu(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns the GELU in the approximation by tanh, as published."""
        return jax.nn.gelu(x, approximate=True)

    # What is computed for each image.

    def table(self, parameter: Array, name: str, dtype: DTypeLike) -> Array:
        """Returns a table of positions of this name, which is added to rows of this dtype."""
        return parameter

    def add(self, x: Rows, table: Float[Array, "tokens width"]) -> Rows:
        """Returns the rows plus a row of the table for each token of an image."""
        return x + table.astype(x.dtype)

    def per_token(self, x: Rows, draw: Callable[[tuple[Size, int]], Array]) -> Array:
        """Returns `draw((tokens of all images, width))`, whose rows are arranged as those of `x`."""
        width = x.shape[-1]
        return draw((x.size // width, width)).reshape(x.shape)

    def per_image(self, x: Rows, draw: Callable[[Size], Array]) -> Array:
        """Returns factors of the rows of `x`, given `draw(images)`, [images, 1, 1]."""
        factors = draw(x.shape[0] // self.lines)
        return factors if self.lines == 1 else jnp.repeat(factors, self.lines, axis=0)

    def attend(
        self, x: Rows, kernel: QKVKernel, bias: QKVBias, extras: AttentionExtras
    ) -> tuple[Rows, AttentionWeights]:
        """Returns the values weighted by softmax(q kᵀ / √head_dim), heads side by side, and these weights in float32.

        Args:
            x: the rows of all images.
            kernel: the kernel of queries, keys and values.
            bias: the bias of queries, keys and values.
            extras: what the model does besides equations 5 to 7.
        """
        qkv = extras.normalised_and_rotated(self.dense(x, kernel, bias, "qkv"), self.norm)  # equation 5
        attended, weights = softmax_attention(qkv, extras.scores)  # equations 6 and 7
        return self.rows(attended), weights

    def widen(self, x: Rows, kernel: Array, bias: Array, name: str, activate: Callable[[Array], Array]) -> Array:
        """Returns the hidden channels of an MLP: `activate(x @ kernel + bias)`."""
        return activate(self.dense(x, kernel, bias, name))

    def narrow(self, hidden: Array, kernel: Array, bias: Array) -> Rows:
        """Returns `hidden @ kernel + bias`, the result of the second layer of an MLP."""
        return self.dense(hidden, kernel, bias, "dense2")

    def add_mlp(self, x: Rows, norm: NormParameters, mlp: TwoLayers, branch: Callable[[Rows], Rows]) -> Rows:
        """Returns x + branch(mlp(norm(x))): equation 3, where `branch` is LayerScale and stochastic depth."""
        return x + branch(mlp(self.norm(x, norm)))

    # The blocks.

    def run_blocks(
        self, step: BlockStep, x: Rows, stacks: tuple[ArrayTree, ...], rates: Array
    ) -> tuple[Rows, dict[str, Any]]:
        """Applies the blocks one after the other.

        Args:
            step: applies one block.
            x: the rows of all images.
            stacks: the parameters of consecutive blocks, each array with a leading axis of blocks.
            rates: the rate of stochastic depth in each block.

        Returns:
            The rows, and the intermediates, each with a leading axis of blocks.
        """
        layers = [jax.tree.map(lambda leaf, row=row: leaf[row], each) for each in stacks for row in range(_depth(each))]
        outs = []
        for index, (layer, rate) in enumerate(zip(layers, rates, strict=True)):
            x, out = step(x, layer, index, rate)
            outs.append(out)
        return x, jax.tree.map(lambda *each: jnp.stack(each), *outs)


def softmax_attention(
    qkv: Float[Array, "batch tokens 3 heads head_dim"], scores: Callable[[Array], Array] | None = None
) -> tuple[Float[Array, "batch tokens width"], Float[Array, "batch heads tokens tokens"]]:
    """Returns the sums of values weighted by attention (equations 6 and 7), heads side by side, and float32 weights.

    Args:
        qkv: queries, keys and values.
        scores: scaled queries -> what is added to their scores; None: nothing is added.
    """
    batch, tokens, _, heads, head_dim = qkv.shape
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    products = jnp.einsum("bqhd,bkhd->bhqk", scaled(query), key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(products + scores(scaled(query)) if scores else products)  # equation 6
    attended = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(qkv.dtype), value)  # equation 7
    return attended.reshape(batch, tokens, heads * head_dim), weights


def as_matrix_of_patches(kernel: Float[Array, "size size channels width"]) -> Float[Array, "inputs width"]:
    """Returns the kernel of E as a matrix, for patches that are flattened with their channels first."""
    return jnp.moveaxis(kernel, 2, 0).reshape(-1, kernel.shape[-1])


def scaled(queries: Float[Array, "... head_dim"]) -> Float[Array, "... head_dim"]:
    """Returns queries divided by √head_dim."""
    return queries * queries.shape[-1] ** -0.5


def _depth(stack: ArrayTree) -> int:
    return len(jax.tree.leaves(stack)[0])
