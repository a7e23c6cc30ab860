"""The bodies of the attention kernels: what one step of the grid computes."""

import collections
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from vit_jax.kernels.attention_shape import AttentionShape
from vit_jax.kernels.matrix_products import dot, dot_transposed
from vit_jax.kernels.packing import ROW_TILE
from vit_jax.kernels.qk_change_steps import differentiate_change, write_changed
from vit_jax.kernels.relative_scores import RelativeScores
from vit_jax.kernels.tiles import Group, Tile, first_query, pipelined, tiles
from vit_jax.kernels.tpu_kinds import LANES

NEVER = 1e30  # a log-sum-exp beside which every weight is zero


class _Operand:
    """An array of a step of the grid. Each part that is taken from it is loaded once."""

    def __init__(self, shape: AttentionShape, ref: Any):
        self.shape, self.ref = shape, ref
        self.rows = functools.cache(self._rows)
        self.transposed = functools.cache(lambda group, section: ref[group.pack, group.rows, group.lanes(section)].T)
        self.queries = functools.cache(self._queries)

    def _rows(self, group: Group, section: int, head: int) -> Array:
        """Returns a head's keys (section 1) or values (2), [rows, lanes].

        The lanes are the head's own channels, or all 128 lanes if several heads share them.
        """
        lanes, channels = group.lanes(section), group.channels(head)
        if LANES % self.shape.head_dim:
            lanes = slice(lanes.start + channels.start, lanes.start + channels.stop)
        return self.ref[group.pack, group.rows, lanes]

    def _queries(self, group: Group, block: int) -> Array:
        """Returns a block of queries of a group's heads, [channels, queries], with zeros beyond it."""
        x = self.ref[group.pack, _query_rows(group, block), group.lanes(0)]
        missing = self.shape.queries - x.shape[0]
        return (jnp.concatenate([x, jnp.zeros((missing, x.shape[1]), x.dtype)]) if missing else x).T

    def query(self, tile: Tile) -> Array:
        """Returns a head's block of queries, [lanes, queries], to be multiplied by `rows`; other heads' lanes are 0."""
        x = self.queries(tile.group, tile.block)
        if LANES % self.shape.head_dim:
            return x[tile.channels]
        channel = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return jnp.where((channel >= tile.channels.start) & (channel < tile.channels.stop), x, jnp.zeros_like(x))


def _query_rows(group: Group, block: int) -> Any:
    """Returns the rows of a pack in which a block of queries lies."""
    first, rows, queries = first_query(group.shape, block), group.rows, group.shape.queries
    if group.shape.query_steps > 1:
        return pl.ds(first, queries)
    return slice(rows.start + first, min(rows.start + first + queries, rows.stop))


def _only_new(shape: AttentionShape, x: Array, axis: int = 1) -> Array:
    """Returns `x` with zeros for the queries, along an axis, that an earlier step of the grid has already computed."""
    rows, queries = shape.packing.rows, shape.queries
    if shape.query_steps == 1 or rows % queries == 0:
        return x
    position = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(position >= pl.program_id(1) * queries - (rows - queries), x, jnp.zeros_like(x))


def forward_kernel(shape: AttentionShape, qkv: Any, *refs: Any) -> None:
    """Writes the attended values, and the logarithm to base 2 of the sum of each query's exponentials."""
    tables, (attended, lse, *scratch) = refs[: shape.num_tables], refs[shape.num_tables :]
    compared, relative = qkv, None
    if shape.change is not None:
        (compared,) = scratch
        write_changed(shape, qkv, tables[: shape.change_tables], compared)
    if shape.relative is not None:
        relative = RelativeScores(shape, tables[-1])
    scale = shape.head_dim**-0.5 * math.log2(math.e)
    operand = _Operand(shape, compared)
    own_values = functools.cache(lambda group: group.only_own(qkv[group.pack, group.rows, group.lanes(2)]).T)
    results: dict[int, list[Array]] = collections.defaultdict(list)  # of each block, by head

    def scores(tile: Tile) -> Array:
        products = dot(operand.rows(tile.group, 1, tile.head), operand.query(tile))
        return relative.add(products, tile, operand.queries(tile.group, tile.block)) if relative else products

    def attend(tile: Tile, scores: Array) -> None:
        scores = tile.only_tokens(scores, -jnp.inf)
        highest = scores.max(0, keepdims=True)
        weights = jnp.exp2((scores - highest) * scale)
        total = weights.sum(0, keepdims=True)
        # Queries of other images get weights of zero in the backward pass, and results of zero in this one. Whatever
        # these images hold, even if it is no number, does not reach this one.
        lse[tile.lse] = tile.only_queries(highest * scale + jnp.log2(total), NEVER)
        values = own_values(tile.group)[tile.channels]
        results[tile.block].append(tile.only_queries(dot(values, weights.astype(qkv.dtype)) * (1 / total), 0.0))
        if tile.last_of_group:
            _store_queries(tile.group, attended, results)

    pipelined(tiles(shape), scores, attend)


def _store_queries(group: Group, ref: Any, results: dict[int, list[Array]]) -> list[Array]:
    """Writes the rows of blocks of queries to `ref`, and empties `results`.

    Args:
        group: the heads.
        ref: the array to write to.
        results: block -> an array [channels, queries] for each head of the group.

    Returns:
        An array [queries, channels] for each block, with the channels of all heads of the group.
    """
    stored = []
    for block, heads in results.items():
        where = _query_rows(group, block)
        count = where.size if isinstance(where, pl.Slice) else where.stop - where.start
        stored.append(jnp.concatenate(heads).T)
        _store_rows(group, 0, ref, where, stored[-1][:count], 0 if block else group.shared_rows)
    results.clear()
    return stored


class _Read(NamedTuple):
    """The arrays from which the gradient is computed; see `backward_kernel`."""

    compared: Any  # queries and keys after their change
    qkv: Any
    attended: Any
    lse: Any
    grad: Any


def backward_kernel(shape: AttentionShape, qkv: Any, attended: Any, lse: Any, grad: Any, *refs: Any) -> None:
    """Writes the gradient of queries, keys and values, and its sums over rows.

    Args:
        shape: the sizes of the call.
        qkv: the kernel's operand in the forward pass.
        attended: the result of the forward pass.
        lse: the logarithms of the sums of exponentials, from the forward pass.
        grad: the gradient of `attended`.
        refs: in this order, the tables; the gradient of `qkv`; its sums, see `attention._sums`; the gradients of the
            trained tables; the changed queries and keys, if there is a change; and the float32 gradients of keys
            and values accumulated so far, if the grid has steps over the queries.
    """
    tables, (grad_qkv, sums, *rest) = refs[: shape.num_tables], refs[shape.num_tables :]
    of_norms, rest = tuple(rest[: shape.norm_tables]), rest[shape.norm_tables :]
    relative = None
    if shape.relative is not None:
        of_relative, *rest = rest
        relative = RelativeScores(shape, tables[-1], of_relative)
    if shape.change is None:
        _differentiate(shape, _Read(qkv, qkv, attended, lse, grad), grad_qkv, sums, rest, relative)
        return
    compared, *totals = rest
    of_change = tables[: shape.change_tables]
    write_changed(shape, qkv, of_change, compared)
    _differentiate(shape, _Read(compared, qkv, attended, lse, grad), grad_qkv, sums, totals, relative)
    differentiate_change(shape, qkv, of_change, grad_qkv, sums, of_norms)


def _differentiate(
    shape: AttentionShape, read: _Read, grad_qkv: Any, sums: Any, totals: Any, relative: RelativeScores | None
) -> None:
    """Writes the gradient of the queries, keys and values that attention gets, and its sums over rows.

    If there is a change, only the sums of values are
    written; those of queries and keys are left to `differentiate_change`.
    """
    scale = shape.head_dim**-0.5
    inputs, values, outputs, output_grads = (
        _Operand(shape, ref) for ref in (read.compared, read.qkv, read.attended, read.grad)
    )
    dtype = read.qkv.dtype
    query_grads: dict[int, list[Array]] = collections.defaultdict(list)  # of each block, by head
    key_grads: list[tuple[Array, Array]] = []  # of keys and of values, [channels, rows], by head
    blocks: list[tuple[Array, ...]] = []  # of a head
    added = _Sums()

    def scores(tile: Tile) -> tuple[Array, Array]:
        keys, own_values = inputs.rows(tile.group, 1, tile.head), values.rows(tile.group, 2, tile.head)
        products = dot(keys, inputs.query(tile))
        products = relative.add(products, tile, inputs.queries(tile.group, tile.block)) if relative else products
        return products, dot(own_values, output_grads.query(tile))

    def differentiate(tile: Tile, computed: tuple[Array, Array]) -> None:
        scores, weights_grad = computed
        weights = tile.only_tokens(jnp.exp2(scores * (scale * math.log2(math.e)) - read.lse[tile.lse]), 0.0)
        query, out_grad, out = (
            operand.queries(tile.group, tile.block)[tile.channels] for operand in (inputs, output_grads, outputs)
        )
        along = (out_grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(0, keepdims=True)
        wide_grad, query = weights * (weights_grad - along), _only_new(shape, query)
        scores_grad = wide_grad.astype(dtype)
        keys = inputs.transposed(tile.group, 1)[tile.channels]
        query_grad = dot(keys, scores_grad)
        query_grad += relative.differentiate(tile, wide_grad, query, scale) if relative else 0.0
        query_grads[tile.block].append(query_grad * scale)
        blocks.append((scores_grad, query, weights.astype(dtype), _only_new(shape, out_grad)))
        if tile.last_of_head:
            scores_grads, queries, weights_, out_grads = (
                jnp.concatenate(each, 1) for each in zip(*blocks, strict=True)
            )
            blocks.clear()
            key_grads.append((dot_transposed(queries, scores_grads) * scale, dot_transposed(out_grads, weights_)))
        if tile.last_of_group:
            for block in _store_queries(tile.group, grad_qkv, query_grads):
                if shape.change is None:
                    added.add(tile.group.lanes(0), _only_new(shape, block, 0))
            for section, grads in enumerate(zip(*key_grads, strict=True), 1):
                rows = jnp.concatenate(grads).T
                if section == 2 or shape.change is None:
                    added.add(tile.group.lanes(section), rows)
                _store_keys(tile.group, section, grad_qkv, totals, rows)
            key_grads.clear()

    pipelined(tiles(shape), scores, differentiate)
    added.store(shape, sums)


def _store_rows(group: Group, section: int, ref: Any, where: Any, x: Array, shared: int) -> None:
    """Writes the rows of an image, whose first `shared` rows also belong to the image before.

    These rows are added to what that image has written: each image has zeros in the tokens of the other.
    """
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

    def store(self, shape: AttentionShape, ref: Any) -> None:
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
