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

from vit_jax.kernels.bodies import backward_kernel, forward_kernel
from vit_jax.kernels.change_steps import FusedQKV, apply_change
from vit_jax.kernels.changes import NORM_ROWS, QKChange, lanes_of_heads
from vit_jax.kernels.dispatch import kernel_or_plain
from vit_jax.kernels.packing import LANES, ROW_TILE, Packing
from vit_jax.kernels.tiles import Shape, make_shape

Attended: TypeAlias = Float[Array, "packs rows width"]
Bias: TypeAlias = Float[Array, " qkv_width"]
LogSumExp: TypeAlias = Float[Array, "packs blocks heads lanes"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def fused_attention(
    projected: FusedQKV,
    bias: Bias,
    packing: Packing,
    heads: int,
    change: QKChange | None = None,
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
        tables: the tables that `change` needs, see `QKChange.num_tables`. Only the table of the norms gets a gradient;
            the others get zeros.
    """
    return _forward(projected, bias, packing, heads, change, tables)[0]


def plain_attention(qkv: FusedQKV, packing: Packing, heads: int) -> Attended:
    """Returns what `fused_attention` does, without a kernel, given `qkv` with its bias and its change."""
    images, width = packing.unpack(qkv.reshape(-1, qkv.shape[-1])), qkv.shape[-1] // 3
    query, key, value = jnp.moveaxis(images.reshape(*images.shape[:2], 3, heads, -1), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    attended = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(qkv.dtype), value)
    return packing.pack(attended.reshape(*images.shape[:2], width)).reshape(*qkv.shape[:2], width)


def _forward(
    projected: FusedQKV, bias: Bias, packing: Packing, heads: int, change: QKChange | None, tables: tuple[Array, ...]
) -> tuple[Attended, tuple]:
    qkv = checkpoint_name(projected + bias.astype(projected.dtype), "qkv")
    shape = make_shape(qkv.shape, packing, heads)._replace(change=change)
    attended, lse = kernel_or_plain(_forward_on_tpu, _forward_plain, shape, qkv, *tables)
    attended, lse = checkpoint_name(attended, "attended"), checkpoint_name(lse, "log_sum_exp")
    return attended, (qkv, attended, lse, tables)


def _backward(
    packing: Packing, heads: int, change: QKChange | None, residuals: tuple, grad: Attended
) -> tuple[FusedQKV, Bias, tuple[Array, ...]]:
    *saved, tables = residuals
    shape = make_shape(saved[0].shape, packing, heads)._replace(change=change)
    grad_qkv, sums, *of_norms = kernel_or_plain(_backward_on_tpu, _backward_plain, shape, *saved, grad, *tables)
    constant = [jnp.zeros_like(table) for table in tables[len(of_norms) :]]
    return grad_qkv, sums.sum((0, 1)), (*(each.sum(0)[:NORM_ROWS] for each in of_norms), *constant)


fused_attention.defvjp(_forward, _backward)


def _forward_on_tpu(interpret: bool, shape: Shape, qkv: FusedQKV, *tables: Array) -> list[Array]:
    outputs = jax.ShapeDtypeStruct((*qkv.shape[:2], shape.width), qkv.dtype), _lse(shape, len(qkv))
    scratch = _scratch(shape, qkv)
    return _call(forward_kernel, "attention_forward", shape, (qkv, *tables), outputs, scratch, interpret)


def _forward_plain(shape: Shape, qkv: FusedQKV, *tables: Array) -> list[Array]:
    lse = _lse(shape, len(qkv))
    return [
        plain_attention(apply_change(shape, qkv, tables), shape.packing, shape.heads),
        jnp.broadcast_to(qkv.ravel()[0].astype(lse.dtype), lse.shape),
    ]


def _backward_on_tpu(interpret: bool, shape: Shape, *operands: Array) -> list[Array]:
    qkv = operands[0]
    totals = [pltpu.VMEM((shape.packs, shape.packing.rows, shape.width), jnp.float32)] * 2
    scratch = _scratch(shape, qkv) + (totals if shape.query_steps > 1 else [])
    outputs = jax.ShapeDtypeStruct(qkv.shape, qkv.dtype), _sums(shape, len(qkv)), *_norm_sums(shape, len(qkv))
    return _call(backward_kernel, "attention_backward", shape, operands, outputs, scratch, interpret)


def _backward_plain(
    shape: Shape, qkv: FusedQKV, attended: Attended, lse: LogSumExp, grad: Attended, *tables: Array
) -> list[Array]:

    def attend(qkv: FusedQKV, tables: tuple[Array, ...]) -> Attended:
        return plain_attention(apply_change(shape, qkv, tables), shape.packing, shape.heads)

    grad_qkv, grad_tables = jax.vjp(attend, qkv, tables)[1](grad)
    sums = _sums(shape, len(qkv))
    of_norms = [jnp.zeros(each.shape).at[0, :NORM_ROWS].set(grad_tables[0]) for each in _norm_sums(shape, len(qkv))]
    return [grad_qkv, grad_qkv.reshape(*sums.shape[:2], -1, sums.shape[2]).sum(2, dtype=sums.dtype), *of_norms]


def _scratch(shape: Shape, qkv: FusedQKV) -> list[Any]:
    """Returns the scratch memory in which a kernel keeps changed queries and keys; none without a change."""
    return [] if shape.change is None else [pltpu.VMEM((shape.packs, qkv.shape[1], 2 * shape.width), qkv.dtype)]


def _norm_sums(shape: Shape, packs: int) -> list[jax.ShapeDtypeStruct]:
    """Returns the shape of the gradient of the norms' table, one part for each step of the grid; none without norms."""
    if shape.change is None or shape.change.epsilon is None:
        return []
    size = lanes_of_heads(shape.head_dim, shape.width)
    return [jax.ShapeDtypeStruct((packs // shape.packs, ROW_TILE, size), jnp.float32)]


def _lse(shape: Shape, packs: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((packs, shape.packing.images * shape.blocks, shape.heads, LANES), jnp.float32)


def _sums(shape: Shape, packs: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of the gradient's sums over rows: 8 partial sums for each step of the grid."""
    return jax.ShapeDtypeStruct((packs // shape.packs, ROW_TILE, 3 * shape.width), jnp.float32)


def _call(
    kernel: Any, name: str, shape: Shape, operands: tuple, outputs: tuple, scratch: Any, interpret: bool
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
        out_shape=[_like(operands[0], each) for each in outputs],
        scratch_shapes=list(scratch),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=2 * (moved + kept) + 16 * 2**20,
        ),
        name=name,
        interpret=interpret,
    )
    return list(run(*operands))


def _like(operand: Array, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape with the mesh axes over which `operand` varies, inside a `shard_map`."""
    return jax.eval_shape(lambda x: jnp.broadcast_to(x.ravel()[0].astype(shape.dtype), shape.shape), operand)
