"""Self-attention of short sequences on TPUs (Pallas): scores and softmax stay in VMEM, forwards and backwards.

The kernels read and write the fused layout of the projections, [packs, rows, 3 x heads x head_dim], so that nothing is
transposed in HBM; images need not begin at a tile of memory (`Packing`). Scores are stored as [keys, queries]: a
softmax then runs along sublanes, by plain additions of vector registers, and the products with it need no transposition
of scores. Heads that share 128 lanes are separated by zeroing the others' lanes in one operand; that costs the matrix
unit nothing, which contracts 128 lanes at a time. The backward pass computes the scores again, from the
log-sum-exp of each query.
"""

import collections
import functools
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from vit_jax.kernels.dispatch import kernel_or_plain
from vit_jax.kernels.packing import ROW_TILE, Packing
from vit_jax.kernels.tiles import LANES, Group, Shape, Tile, make_shape, pipelined, tiles

FusedQKV: TypeAlias = Float[Array, "packs rows qkv_width"]
Attended: TypeAlias = Float[Array, "packs rows width"]
Bias: TypeAlias = Float[Array, " qkv_width"]
LogSumExp: TypeAlias = Float[Array, "packs blocks heads lanes"]

NEVER = 1e30  # a log-sum-exp beside which every weight is zero


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def fused_attention(projected: FusedQKV, bias: Bias, packing: Packing, heads: int) -> Attended:
    """Returns the sum of an image's values weighted by softmax(q kᵀ / √head_dim) (equations 6 and 7).

    Only reverse-mode differentiation works. Empty rows are not attended to; their own results are finite.

    Args:
        projected: queries, keys and values of all heads, side by side, still without their bias.
        bias: in float32; its gradient is summed in float32.
        packing: what the rows hold.
        heads: the number of heads.
    """
    return _forward(projected, bias, packing, heads)[0]


def plain_attention(qkv: FusedQKV, packing: Packing, heads: int) -> Attended:
    """Returns the same as `fused_attention` without a kernel."""
    images, width = packing.unpack(qkv.reshape(-1, qkv.shape[-1])), qkv.shape[-1] // 3
    query, key, value = jnp.moveaxis(images.reshape(*images.shape[:2], 3, heads, -1), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    attended = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(qkv.dtype), value)
    return packing.pack(attended.reshape(*images.shape[:2], width)).reshape(*qkv.shape[:2], width)


def _forward(projected: FusedQKV, bias: Bias, packing: Packing, heads: int) -> tuple[Attended, tuple]:
    qkv = checkpoint_name(projected + bias.astype(projected.dtype), "qkv")
    attended, lse = kernel_or_plain(_forward_on_tpu, _forward_plain, make_shape(qkv.shape, packing, heads), qkv)
    attended, lse = checkpoint_name(attended, "attended"), checkpoint_name(lse, "log_sum_exp")
    return attended, (qkv, attended, lse)


def _backward(packing: Packing, heads: int, residuals: tuple, grad: Attended) -> tuple[FusedQKV, Bias]:
    shape = make_shape(residuals[0].shape, packing, heads)
    grad_qkv, sums = kernel_or_plain(_backward_on_tpu, _backward_plain, shape, *residuals, grad)
    return grad_qkv, sums.sum((0, 1))


fused_attention.defvjp(_forward, _backward)


def _forward_on_tpu(interpret: bool, shape: Shape, qkv: FusedQKV) -> list[Array]:
    outputs = jax.ShapeDtypeStruct((*qkv.shape[:2], shape.width), qkv.dtype), _lse(shape, len(qkv))
    return _call(_forward_kernel, "attention_forward", shape, (qkv,), outputs, (), interpret)


def _forward_plain(shape: Shape, qkv: FusedQKV) -> list[Array]:
    lse = _lse(shape, len(qkv))
    return [
        plain_attention(qkv, shape.packing, shape.heads),
        jnp.broadcast_to(qkv.ravel()[0].astype(lse.dtype), lse.shape),
    ]


def _backward_on_tpu(interpret: bool, shape: Shape, *operands: Array) -> list[Array]:
    qkv = operands[0]
    scratch = (
        [pltpu.VMEM((shape.packs, shape.packing.rows, shape.width), jnp.float32)] * 2 if shape.query_steps > 1 else []
    )
    outputs = jax.ShapeDtypeStruct(qkv.shape, qkv.dtype), _sums(shape, len(qkv))
    return _call(_backward_kernel, "attention_backward", shape, operands, outputs, scratch, interpret)


def _backward_plain(shape: Shape, qkv: FusedQKV, attended: Attended, lse: LogSumExp, grad: Attended) -> list[Array]:
    del attended, lse
    [grad_qkv] = jax.vjp(lambda qkv: plain_attention(qkv, shape.packing, shape.heads), qkv)[1](grad)
    sums = _sums(shape, len(qkv))
    return [grad_qkv, grad_qkv.reshape(*sums.shape[:2], -1, sums.shape[2]).sum(2, dtype=sums.dtype)]


def _lse(shape: Shape, packs: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((packs, shape.packing.images * shape.blocks, shape.heads, LANES), jnp.float32)


def _sums(shape: Shape, packs: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of the gradient's sums: of the rows that lie in one row of a tile, in each step of the grid."""
    return jax.ShapeDtypeStruct((packs // shape.packs, ROW_TILE, 3 * shape.width), jnp.float32)


def _call(
    kernel: Any, name: str, shape: Shape, operands: tuple, outputs: tuple, scratch: Any, interpret: bool
) -> list[Array]:
    """Runs a kernel over a grid of packs and, for long sequences, blocks of queries."""
    packs = len(operands[0])

    def block(array: Any) -> pl.BlockSpec:
        if len(array.shape) == 4:  # the log-sum-exp: those of the blocks in this step
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


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _dot_transposed(a: Array, b: Array) -> Array:
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


class _Operand:
    """An array of a step of the grid; what is taken from it is loaded once."""

    def __init__(self, shape: Shape, ref: Any):
        self.shape, self.ref = shape, ref
        self.rows = functools.cache(self._rows)
        self.transposed = functools.cache(lambda group, section: ref[group.pack, group.rows, group.lanes(section)].T)
        self.queries = functools.cache(self._queries)

    def _rows(self, group: Group, section: int, head: int) -> Array:
        """Returns [rows, lanes] of a head's keys (1) or values (2): its own channels, or 128 that heads share."""
        lanes, channels = group.lanes(section), group.channels(head)
        if LANES % self.shape.head_dim:
            lanes = slice(lanes.start + channels.start, lanes.start + channels.stop)
        return self.ref[group.pack, group.rows, lanes]

    def _queries(self, group: Group, block: int) -> Array:
        """Returns [channels, 128] of a block of queries, zero beyond the array."""
        x = self.ref[group.pack, _query_rows(group, block), group.lanes(0)]
        missing = LANES - x.shape[0]
        return (jnp.concatenate([x, jnp.zeros((missing, x.shape[1]), x.dtype)]) if missing else x).T

    def query(self, tile: Tile) -> Array:
        """Returns [lanes, 128], a head's block of queries, to be multiplied by `rows`."""
        x = self.queries(tile.group, tile.block)
        if LANES % self.shape.head_dim:
            return x[tile.channels]
        channel = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return jnp.where((channel >= tile.channels.start) & (channel < tile.channels.stop), x, jnp.zeros_like(x))


def _query_rows(group: Group, block: int) -> Any:
    """Returns the rows of a pack in which a block of queries lies."""
    shape, rows = group.shape, group.rows
    if shape.query_steps == 1:
        return slice(rows.start + block * LANES, min(rows.start + (block + 1) * LANES, rows.stop))
    start = jnp.minimum(pl.program_id(1) * LANES, shape.packing.rows - LANES)
    return pl.ds(pl.multiple_of(start, ROW_TILE), LANES)


def _only_new(shape: Shape, x: Array, axis: int = 1) -> Array:
    """Returns `x` with the queries, along an axis, that an earlier step of the grid saw set to zero."""
    if shape.query_steps == 1 or shape.packing.rows % LANES == 0:
        return x
    position = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(position >= pl.program_id(1) * LANES - (shape.packing.rows - LANES), x, jnp.zeros_like(x))


def _forward_kernel(shape: Shape, qkv: Any, attended: Any, lse: Any) -> None:
    """Writes the attended values, and the logarithm to base 2 of the sum of each query's exponentials."""
    scale = shape.head_dim**-0.5 * math.log2(math.e)
    operand = _Operand(shape, qkv)
    own_values = functools.cache(lambda group: group.only_own(qkv[group.pack, group.rows, group.lanes(2)]).T)
    results: dict[int, list[Array]] = collections.defaultdict(list)  # of each block, by head

    def scores(tile: Tile) -> Array:
        return _dot(operand.rows(tile.group, 1, tile.head), operand.query(tile))

    def attend(tile: Tile, scores: Array) -> None:
        scores = tile.only_tokens(scores, -jnp.inf)
        highest = scores.max(0, keepdims=True)
        weights = jnp.exp2((scores - highest) * scale)
        total = weights.sum(0, keepdims=True)
        # Queries of other images get weights of zero in the backward pass, and results of zero in this one. Whatever
        # these images hold, even if it is no number, does not reach this one.
        lse[tile.lse] = tile.only_queries(highest * scale + jnp.log2(total), NEVER)
        values = own_values(tile.group)[tile.channels]
        results[tile.block].append(tile.only_queries(_dot(values, weights.astype(qkv.dtype)) * (1 / total), 0.0))
        if tile.last_of_group:
            _store_queries(tile.group, attended, results)

    pipelined(tiles(shape), scores, attend)


def _store_queries(group: Group, ref: Any, results: dict[int, list[Array]]) -> list[Array]:
    """Writes the rows of blocks of queries, given [channels, 128] of every head of the group; empties the results.

    Returns:
        The [128, channels] of every block.
    """
    stored = []
    for block, heads in results.items():
        where = _query_rows(group, block)
        count = where.size if isinstance(where, pl.Slice) else where.stop - where.start
        stored.append(jnp.concatenate(heads).T)
        _store_rows(group, 0, ref, where, stored[-1][:count], 0 if block else group.shared_rows)
    results.clear()
    return stored


def _backward_kernel(
    shape: Shape, qkv: Any, attended: Any, lse: Any, grad: Any, grad_qkv: Any, sums: Any, *totals: Any
) -> None:
    """Writes the gradient of queries, keys and values, and its sums over rows.

    Args:
        shape: sizes.
        qkv: the kernel's operand in the forward pass.
        attended: its result.
        lse: likewise.
        grad: the gradient of `attended`.
        grad_qkv: the gradient.
        sums: see `_sums`.
        totals: the gradients of keys and values so far, in float32, if the grid has steps over the queries.
    """
    scale = shape.head_dim**-0.5
    inputs, outputs, output_grads = _Operand(shape, qkv), _Operand(shape, attended), _Operand(shape, grad)
    query_grads: dict[int, list[Array]] = collections.defaultdict(list)  # of each block, by head
    key_grads: list[tuple[Array, Array]] = []  # of keys and of values, [channels, rows], by head
    blocks: list[tuple[Array, ...]] = []  # of a head
    added = _Sums()

    def scores(tile: Tile) -> tuple[Array, Array]:
        keys, values = (inputs.rows(tile.group, section, tile.head) for section in (1, 2))
        return _dot(keys, inputs.query(tile)), _dot(values, output_grads.query(tile))

    def differentiate(tile: Tile, computed: tuple[Array, Array]) -> None:
        scores, weights_grad = computed
        log_total = lse[tile.lse]
        weights = tile.only_tokens(jnp.exp2(scores * (scale * math.log2(math.e)) - log_total), 0.0)
        query, out_grad, out = (
            operand.queries(tile.group, tile.block)[tile.channels] for operand in (inputs, output_grads, outputs)
        )
        along = (out_grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(0, keepdims=True)
        scores_grad = (weights * (weights_grad - along)).astype(qkv.dtype)
        keys = inputs.transposed(tile.group, 1)[tile.channels]
        query_grads[tile.block].append(_dot(keys, scores_grad) * scale)
        blocks.append((scores_grad, _only_new(shape, query), weights.astype(qkv.dtype), _only_new(shape, out_grad)))
        if tile.last_of_head:
            scores_grads, queries, weights_, out_grads = (
                jnp.concatenate(each, 1) for each in zip(*blocks, strict=True)
            )
            blocks.clear()
            key_grads.append((_dot_transposed(queries, scores_grads) * scale, _dot_transposed(out_grads, weights_)))
        if tile.last_of_group:
            for block in _store_queries(tile.group, grad_qkv, query_grads):
                added.add(tile.group.lanes(0), _only_new(shape, block, 0))
            for section, grads in enumerate(zip(*key_grads, strict=True), 1):
                rows = jnp.concatenate(grads).T
                added.add(tile.group.lanes(section), rows)
                _store_keys(tile.group, section, grad_qkv, totals, rows)
            key_grads.clear()

    pipelined(tiles(shape), scores, differentiate)
    added.store(shape, sums)


def _store_rows(group: Group, section: int, ref: Any, where: Any, x: Array, shared: int) -> None:
    """Writes rows, to the first of which images before have written: each has zeros in the others' tokens."""
    lanes = group.lanes(section)
    if shared:
        before = slice(group.rows.start, group.rows.start + shared)
        ref[group.pack, before, lanes] += x[:shared].astype(ref.dtype)
        if len(x) == shared:  # images of few tokens
            return
        where, x = slice(before.stop, where.stop), x[shared:]
    ref[group.pack, where, lanes] = x.astype(ref.dtype)


class _Sums:
    """Sums of gradients over the rows in a step of the grid, by channels."""

    def __init__(self) -> None:
        self.totals: dict[tuple[int, int], Array] = {}

    def add(self, lanes: slice, rows: Array) -> None:
        """Adds [rows, channels] to the sums of these channels."""
        tiled, key = rows.reshape(-1, ROW_TILE, rows.shape[1]).sum(0), (lanes.start, lanes.stop)
        self.totals[key] = self.totals[key] + tiled if key in self.totals else tiled

    def store(self, shape: Shape, ref: Any) -> None:
        """Writes the sums, added to those of earlier steps over the queries."""
        for (start, stop), total in self.totals.items():
            before = 0.0 if shape.query_steps == 1 else jnp.where(pl.program_id(1) == 0, 0.0, ref[0, :, start:stop])
            ref[0, :, start:stop] = before + total


def _store_keys(group: Group, section: int, ref: Any, totals: Any, grad: Array) -> None:
    """Writes the gradients of keys (section 1) or values (2), once all steps over the queries have added to them."""
    if not totals:
        _store_rows(group, section, ref, group.rows, grad, group.shared_rows)
        return
    total, where, step = totals[section - 1], (group.pack, group.rows, group.lanes(0)), pl.program_id(1)
    total[where] = jnp.where(step == 0, 0.0, total[where]) + grad

    @pl.when(step == group.shape.query_steps - 1)
    def _() -> None:
        ref[group.pack, group.rows, group.lanes(section)] = total[where].astype(ref.dtype)
