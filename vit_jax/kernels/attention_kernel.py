"""Self-attention of short sequences on TPUs (Pallas): scores and softmax stay in VMEM, forwards and backwards.

The kernels read and write the fused layout of the projections, [packs, rows, 3 x heads x head_dim], so that nothing is
transposed in HBM; images need not begin at a tile of memory (`Packing`). Scores are stored as [keys, queries]: a
softmax then runs along sublanes, by plain additions of vector registers, and the products with it need no transposition
of scores. Heads that share 128 lanes are separated by zeroing the lanes of other heads in one operand. That costs
nothing, because the matrix unit contracts 128 lanes at a time. The backward pass computes the scores again, and the
softmax from the log-sum-exp of each query.
"""

import functools
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from vit_jax.kernels.attention_bodies import backward_kernel, forward_kernel
from vit_jax.kernels.attention_shape import AttentionShape, make_shape, relative_bytes
from vit_jax.kernels.kernel_or_plain import kernel_or_plain, varying_like
from vit_jax.kernels.packing import ROW_TILE, Packing, round_up
from vit_jax.kernels.qk_change import QKChange
from vit_jax.kernels.qk_change_steps import FusedQKV, apply_change
from vit_jax.kernels.relative_table import RelativeKind

# The compiler may use twice as many bytes for its temporary arrays in a step of the grid, and as many more for each
# further pack: in float32 it takes 21 MiB for two packs of 257 tokens of 16 x 80, and 24 for three (libtpu 0.0.42).
TEMPORARIES = 8 * 2**20

Attended: TypeAlias = Float[Array, "packs rows width"]
Bias: TypeAlias = Float[Array, " qkv_width"]
LogSumExp: TypeAlias = Float[Array, "packs blocks heads queries"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def fused_attention(
    projected: FusedQKV,
    bias: Bias,
    packing: Packing,
    heads: int,
    change: QKChange | None = None,
    relative: RelativeKind | None = None,
    tables: tuple[Array, ...] = (),
) -> Attended:
    """Returns the sum of an image's values weighted by softmax(q kᵀ / √head_dim) (equations 6 and 7).

    Only reverse-mode differentiation works. Empty rows are not attended to; their own results are finite.

    Args:
        projected: queries, keys and values of all heads, side by side, still without their bias.
        bias: in float32; its gradient is summed in float32.
        packing: the packing of the rows.
        heads: the number of heads.
        change: the change of queries and keys before their products; None: there is none.
        relative: the kind of the relative positions; None: there are none.
        tables: the tables that `change` needs, see `QKChange.num_tables`; then that of the relative positions, see
            `relative_table.spread_table`, which is rounded to the dtype of `projected`. The tables of the norms and of
            the relative positions get a gradient in float32; the others get zeros.
    """
    return _forward(projected, bias, packing, heads, change, relative, tables)[0]


def plain_attention(shape: AttentionShape, qkv: FusedQKV, tables: tuple[Array, ...]) -> Attended:
    """Returns what `fused_attention` does, without a kernel, given `qkv` with its bias."""
    packing, changed = shape.packing, apply_change(shape, qkv, tables[: shape.change_tables])
    images = packing.unpack(changed.reshape(-1, qkv.shape[-1]))
    query, key, value = jnp.moveaxis(images.reshape(*images.shape[:2], 3, shape.heads, -1), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    if shape.relative is not None:
        rows = shape.relative.rows_of_pairs(tables[-1], packing, shape.head_dim)
        rows, names = (rows, "qkhd") if shape.relative.per_head else (rows[:, :, 0], "qkd")
        scores += jnp.einsum(f"bqhd,{names}->bhqk", query, rows, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * shape.head_dim**-0.5).astype(qkv.dtype)
    attended = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return packing.pack(attended.reshape(*images.shape[:2], shape.width)).reshape(*qkv.shape[:2], shape.width)


def _forward(
    projected: FusedQKV,
    bias: Bias,
    packing: Packing,
    heads: int,
    change: QKChange | None,
    relative: RelativeKind | None,
    tables: tuple[Array, ...],
) -> tuple[Attended, tuple]:
    qkv = checkpoint_name(projected + bias.astype(projected.dtype), "qkv")
    shape = make_shape(qkv.shape, packing, heads, qkv.dtype.itemsize, change, relative)
    if relative is not None:
        tables = *tables[:-1], tables[-1].astype(qkv.dtype)
    attended, lse = kernel_or_plain(_forward_on_tpu, _forward_plain, shape, qkv, *tables)
    attended, lse = checkpoint_name(attended, "attended"), checkpoint_name(lse, "log_sum_exp")
    return attended, (qkv, attended, lse, tables)


def _backward(
    packing: Packing,
    heads: int,
    change: QKChange | None,
    relative: RelativeKind | None,
    residuals: tuple,
    grad: Attended,
) -> tuple[FusedQKV, Bias, tuple[Array, ...]]:
    *saved, tables = residuals
    shape = make_shape(saved[0].shape, packing, heads, saved[0].dtype.itemsize, change, relative)
    grad_qkv, sums, *trained = kernel_or_plain(_backward_on_tpu, _backward_plain, shape, *saved, grad, *tables)
    of_tables = [jnp.zeros(table.shape) for table in tables]
    for index, each in zip(shape.trained_tables, trained, strict=True):
        of_tables[index] = each.sum(0)[: len(tables[index])]
    return grad_qkv, sums.sum((0, 1)), tuple(of_tables)


fused_attention.defvjp(_forward, _backward)


def _forward_on_tpu(interpret: bool, shape: AttentionShape, qkv: FusedQKV, *tables: Array) -> list[Array]:
    outputs = jax.ShapeDtypeStruct((*qkv.shape[:2], shape.width), qkv.dtype), _lse(shape, len(qkv))
    scratch = _scratch(shape, qkv)
    return _call(forward_kernel, "attention_forward", shape, (qkv, *tables), outputs, scratch, interpret)


def _forward_plain(shape: AttentionShape, qkv: FusedQKV, *tables: Array) -> list[Array]:
    lse = _lse(shape, len(qkv))
    # `_backward_plain` does not read the second result. A value of `qkv` instead of zeros gives it the mesh axes over
    # which the kernel's result varies inside a `shard_map`.
    unread = jnp.broadcast_to(qkv.ravel()[0].astype(lse.dtype), lse.shape)
    return [plain_attention(shape, qkv, tables), unread]


def _backward_on_tpu(interpret: bool, shape: AttentionShape, *operands: Array) -> list[Array]:
    qkv = operands[0]
    totals = [pltpu.VMEM((shape.packs, shape.packing.rows, shape.width), jnp.float32)] * 2
    scratch = _scratch(shape, qkv) + (totals if shape.query_steps > 1 else [])
    of_tables = _table_sums(shape, len(qkv), operands[4:])
    outputs = jax.ShapeDtypeStruct(qkv.shape, qkv.dtype), _sums(shape, len(qkv)), *of_tables
    return _call(backward_kernel, "attention_backward", shape, operands, outputs, scratch, interpret)


def _backward_plain(
    shape: AttentionShape, qkv: FusedQKV, attended: Attended, lse: LogSumExp, grad: Attended, *tables: Array
) -> list[Array]:

    def attend(qkv: FusedQKV, tables: tuple[Array, ...]) -> Attended:
        return plain_attention(shape, qkv, tables)

    grad_qkv, grad_tables = jax.vjp(attend, qkv, tables)[1](grad)
    sums = _sums(shape, len(qkv))
    trained = [
        jnp.zeros(each.shape).at[0, : len(tables[index])].set(grad_tables[index])
        for index, each in zip(shape.trained_tables, _table_sums(shape, len(qkv), tables), strict=True)
    ]
    return [grad_qkv, grad_qkv.reshape(*sums.shape[:2], -1, sums.shape[2]).sum(2, dtype=sums.dtype), *trained]


def _scratch(shape: AttentionShape, qkv: FusedQKV) -> list[Any]:
    """Returns the scratch memory in which a kernel keeps changed queries and keys; none without a change."""
    return [] if shape.change is None else [pltpu.VMEM((shape.packs, qkv.shape[1], 2 * shape.width), qkv.dtype)]


def _table_sums(shape: AttentionShape, packs: int, tables: tuple[Any, ...]) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of the gradients of the trained tables, one part for each step of the grid."""
    steps, rows = packs // shape.packs, [round_up(len(tables[index]), ROW_TILE) for index in shape.trained_tables]
    return [
        jax.ShapeDtypeStruct((steps, count, tables[index].shape[1]), jnp.float32)
        for index, count in zip(shape.trained_tables, rows, strict=True)
    ]


def _lse(shape: AttentionShape, packs: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((packs, shape.packing.images * shape.blocks, shape.heads, shape.queries), jnp.float32)


def _sums(shape: AttentionShape, packs: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of the gradient's sums over rows: 8 partial sums for each step of the grid."""
    return jax.ShapeDtypeStruct((packs // shape.packs, ROW_TILE, 3 * shape.width), jnp.float32)


def _call(
    kernel: Any, name: str, shape: AttentionShape, operands: tuple, outputs: tuple, scratch: Any, interpret: bool
) -> list[Array]:
    """Runs a kernel over a grid of packs and, for long sequences, blocks of queries."""
    packs = len(operands[0])

    def block(array: Any) -> pl.BlockSpec:
        if len(array.shape) == 2:  # a table
            return pl.BlockSpec(array.shape, lambda pack, step: (0, 0))
        if len(array.shape) == 4:  # the log-sum-exp, of the blocks in this step
            return pl.BlockSpec((shape.packs, shape.lse_rows, *array.shape[2:]), lambda pack, step: (pack, step, 0, 0))
        together = array.shape[0] * shape.packs // packs
        return pl.BlockSpec((together, *array.shape[1:]), lambda pack, step: (pack, 0, 0))

    in_specs, out_specs = [block(array) for array in operands], [block(array) for array in outputs]
    moved = sum(
        math.prod(spec.block_shape) * array.dtype.itemsize
        for spec, array in zip(in_specs + out_specs, operands + outputs, strict=True)
    )
    kept = sum(math.prod(each.shape) * each.dtype.itemsize for each in scratch)
    run = pl.pallas_call(
        functools.partial(kernel, shape),
        grid=(packs // shape.packs, shape.query_steps),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[varying_like(operands[0], each) for each in outputs],
        scratch_shapes=list(scratch),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=2 * (moved + kept) + TEMPORARIES * (1 + shape.packs) + relative_bytes(shape),
        ),
        name=name,
        interpret=interpret,
    )
    return list(run(*operands))
