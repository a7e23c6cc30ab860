"""The TPU kernels in a model: what they take of its parameters, and how devices share their work.

A device computes alone what its TPU kernel computes, so that this gets the layout which the product before it writes.
The argument `kernel` is the matrix of a dense layer, as in Flax.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax import kernels
from vit_jax.execution.dense_layers import ROWS
from vit_jax.execution.forms_by_chip import relative_kind
from vit_jax.execution.norms_and_products import as_matrix, product
from vit_jax.kernels import Packing, QKChange
from vit_jax.models import AttentionExtras, DenseArrays, NormKind, NormParameters, QKVBias, QKVKernel, Rows
from vit_jax.sharding import dimensions_of, per_device, sum_over, traced_device_kind

# Norm of queries and keys that the TPU kernel computes -> whether it subtracts the mean.
SUBTRACTS_MEAN: dict[NormKind, bool] = {"layer": True, "rms": False}


def fused(x: Rows, kernel: QKVKernel, bias: QKVBias, packing: Packing, extras: AttentionExtras) -> Rows:
    """Returns attention by the TPU kernel, which keeps scores and softmax on the chip.

    Raises:
        ValueError: the TPU kernel does not compute all that is added to the scores.
    """
    relative_to = extras.relative and relative_kind(extras.relative.spec)
    if extras.pattern or (extras.relative and relative_to is None):
        raise ValueError("the kernel does not compute all that is added to the scores")

    def attend(
        x: Rows, norms: Array, relative: Array, kernel: QKVKernel, bias: QKVBias
    ) -> Float[Array, "*rows channels"]:
        _, _, heads, head_dim = kernel.shape
        if extras.norms and SUBTRACTS_MEAN[extras.norms[0].kind]:
            kernel, bias = centred(kernel), centred(bias)
        projected = product(x, as_matrix(kernel, bias.size)).reshape(-1, packing.rows, bias.size)
        tables = kernel_tables(extras, norms, packing, heads, head_dim)
        tables += (kernels.spread_table(relative, packing),) if extras.relative else ()
        attended = kernels.fused_attention(
            *(projected, bias.reshape(-1), packing, heads),
            change=kernel_change(extras),
            relative=relative_to,
            tables=tables,
        )
        return attended.reshape(-1, heads * head_dim)

    relative = extras.relative.table if extras.relative else jnp.zeros((0, 1))
    # Parameters are gathered in the dtype of the rows. The norms and the relative positions, whose gradients stay in
    # float32, are passed like rows.
    of_relative = dimensions_of("relative_heads" if relative.ndim == 3 else "relative")
    names = ("batch", "width"), ("norms", "channels"), of_relative
    attend = per_device(attend, names, ("qkv/kernel", "qkv/bias"), ("batch", "heads"), packing.rows)
    return attend(x, norm_rows(extras), relative, kernel, bias)


def kernel_change(extras: AttentionExtras) -> QKChange | None:
    """Returns what the TPU kernel does to queries and keys; None: nothing."""
    rotates = extras.angles is not None
    return QKChange(extras.norms[0].epsilon if extras.norms else None, rotates) if extras.norms or rotates else None


def centred(x: Float[Array, "*dims 3 heads head_dim"]) -> Float[Array, "*dims 3 heads head_dim"]:
    """Returns the projection's kernel or bias that makes the mean of queries and keys zero in each head.

    Their LayerNorm then need not subtract a mean.
    """
    compared, values = jnp.split(x.astype(jnp.float32), [2], axis=-3)
    return jnp.concatenate([compared - compared.mean(-1, keepdims=True), values], axis=-3).astype(x.dtype)


def norm_rows(extras: AttentionExtras) -> Float[Array, "rows head_dim"]:
    """Returns four rows: scale and bias of the queries' norm, then of the keys'. There are no rows without norms."""
    if not extras.norms:
        return jnp.zeros((0, 1))
    pairs = [(norm.scale, jnp.zeros_like(norm.scale) if norm.bias is None else norm.bias) for norm in extras.norms]
    return jnp.stack([each for pair in pairs for each in pair])


def kernel_tables(
    extras: AttentionExtras, norms: Array, packing: Packing, heads: int, head_dim: int
) -> tuple[jax.Array, ...]:
    """Returns the tables that the attention kernel needs, see `kernels.QKChange.num_tables`.

    Args:
        extras: what the model adds.
        norms: scale and bias, as `norm_rows` returns them.
        packing: the packing of the rows of queries and keys.
        heads: the number of heads on one device.
        head_dim: the channels of a head.
    """
    repeats = kernels.lanes_of_heads(head_dim, heads * head_dim) // head_dim
    tables = [jnp.tile(norms, (1, repeats))] if extras.norms else []
    if extras.angles is not None:
        empty = (0, packing.rows - packing.images * len(extras.angles)), (0, 0)
        for function in (np.cos, np.sin):
            pairs = jnp.repeat(jnp.asarray(function(extras.angles), jnp.float32), 2, axis=1)
            tables.append(jnp.pad(jnp.tile(pairs, (packing.images, repeats)), empty))
    return tuple(tables)


def add_fused_mlp(x: Rows, norm: NormParameters, first: DenseArrays, second: DenseArrays, packing: Packing) -> Rows:
    """Returns x + MLP(LayerNorm(x)) by one TPU kernel.

    Args:
        x: the rows of all images.
        norm: the LayerNorm.
        first: kernel and bias of the first dense layer.
        second: those of the second one.
        packing: the packing of the rows.
    """
    (kernel1, bias1), (kernel2, bias2) = first, second

    def run(x: Rows, vectors: Float[Array, "3 width"], kernel1: Array, bias1: Array, kernel2: Array) -> Rows:
        memory = kernels.choose_division(traced_device_kind()).memory
        y = kernels.fused_mlp(x, vectors[:2], kernel1, bias1, kernel2, vectors[2], norm.epsilon, memory)
        return sum_over("mlp", y)  # one device has all hidden channels: the sum states it

    # Vectors of the width are passed like rows, so that they are not rounded where they are gathered.
    names = "dense1/kernel", "dense1/bias", "dense2/kernel"
    run = per_device(run, (ROWS, ("norms", "channels")), names, ROWS, packing.rows)
    return run(x, jnp.stack([norm.scale, norm.bias, bias2]), kernel1, bias1, kernel2)
