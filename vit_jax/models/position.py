"""Position embeddings (appendix D.4): the table that is added to the tokens, in several forms with one signature; and
relative positions, which add to the score of two tokens a term that depends on their offset.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vit_jax.models.spec import ModelSpec, PositionKind

Parameter: TypeAlias = Callable[..., Array]  # (name, initializer, shape, dtype) -> the parameter
PositionTable: TypeAlias = Float[Array, "tokens width"]
RelativeTable: TypeAlias = Float[Array, "*heads offsets head_dim"]
BiasTable: TypeAlias = Float[Array, "offsets heads"]
Queries: TypeAlias = Float[Array, "batch queries heads head_dim"]
Scores: TypeAlias = Float[Array, "batch heads queries keys"]
AnglesOfAxes: TypeAlias = Float[np.ndarray, "2 patches quarter"]

TEMPERATURE = 10_000.0


def learned(param: Parameter, spec: ModelSpec) -> PositionTable:
    """Returns learned rows: `position_rows` for tokens before the patches, then one per patch in raster order (1-D)."""
    tokens = spec.position_rows + math.prod(spec.grid)
    return param("position", _normal(spec), (tokens, spec.width), jnp.float32)


def learned2d(param: Parameter, spec: ModelSpec) -> PositionTable:
    """Returns learned positions (2-D). The first half of a patch's vector is that of its column, the second half that
    of its row.

    The paper does not say which position the class token has. Here each token before the patches that `position_rows`
    includes has a learned vector of the whole width. With `position_rows=patches`, none of these tokens has a position.
    """
    half, (rows, columns) = spec.width // 2, spec.grid
    x, y = (
        param(f"position_{axis}", _normal(spec), (size, half), jnp.float32)
        for axis, size in (("x", columns), ("y", rows))
    )
    halves = jnp.broadcast_to(x, (rows, columns, half)), jnp.broadcast_to(y[:, None], (rows, columns, half))
    patches = jnp.concatenate(halves, axis=-1).reshape(-1, spec.width)
    if not spec.position_rows:
        return patches
    prefix = param("position_prefix", _normal(spec), (spec.position_rows, spec.width), jnp.float32)
    return jnp.concatenate([prefix, patches])


def sincos2d(param: Parameter, spec: ModelSpec) -> PositionTable:
    """Returns fixed sines and cosines of column and row; the rows before the patches are zero.

    As in big_vision: the quarters of the width are, in this order, sin(x f), cos(x f), sin(y f) and cos(y f), for the
    patch's column x and row y. The frequencies f fall geometrically from 1 to 1/10000. Not in the paper.
    """
    return _sinusoids(_angles(spec, spec.width // 4 - 1)[::-1], spec.position_rows)


def sincos2d_moco(param: Parameter, spec: ModelSpec) -> PositionTable:
    """Returns fixed sines and cosines of row and column; the rows before the patches are zero.

    As in MoCo v3, whose code calls the row x. The quarters of the width are, in this order, sin(y f), cos(y f),
    sin(x f) and cos(x f), for the patch's row y and column x. The frequencies f fall from 1 towards 1/10000 without
    reaching it. Not in the paper.
    """
    return _sinusoids(_angles(spec, spec.width // 4), spec.position_rows)


def none(param: Parameter, spec: ModelSpec) -> None:
    """Returns no table: nothing is added to the tokens, and without other positions the patches have no order."""


POSITIONS: dict[PositionKind, Callable[[Parameter, ModelSpec], PositionTable | None]] = {
    "learned": learned,
    "learned2d": learned2d,
    "relative": none,
    "relative_bias": none,
    "sincos2d": sincos2d,
    "sincos2d_moco": sincos2d_moco,
    "none": none,
}


def table_of_tokens(param: Parameter, spec: ModelSpec) -> PositionTable | None:
    """Returns the table that is added to all tokens, prefix included, or None if nothing is added.

    Tokens without a position have rows of zeros.
    """
    table, before = POSITIONS[spec.position.kind](param, spec), spec.position_rows
    if table is None or before == spec.prefix_rows:
        return table
    return jnp.concatenate([table[:before], jnp.zeros((spec.prefix_rows - before, table.shape[1])), table[before:]])


def relative_table(param: Parameter, spec: ModelSpec) -> RelativeTable | BiasTable:
    """Returns the learned table with a row for every offset (place of the query - place of the key), the lowest first.

    With `relative_clip`, the first and the last row also stand for all offsets beyond it. The rows of the table of
    biases are those of `RelativeBias`.
    """
    if spec.position.kind == "relative_bias":
        offsets = math.prod(2 * side - 1 for side in spec.grid) + prefix_biases(spec)
        return param("relative_bias", _normal(spec), (offsets, spec.attention.num_heads), jnp.float32)
    rows = 2 * (spec.position.relative_clip or len(_placed(spec)) - 1) + 1
    init = _normal(spec)
    if spec.position.relative_tables == "head":
        return param("relative_heads", init, (spec.attention.num_heads, rows, spec.head_dim), jnp.float32)
    return param("relative", init, (rows, spec.head_dim), jnp.float32)


class RelativePositions(NamedTuple):
    """A table of relative positions, and the model that has it.

    The row r of the offset counts like a key, and is scaled like one: softmax(q (k + r)ᵀ / √head_dim). Places are
    numbered in the raster order of the patches (1-D). The paper does not state the class token's place. With
    `position_rows=all`, the tokens before the patches come first in this order. With `position_rows=class`, registers
    have no place. With `position_rows=patches`, only patches have one. Nothing is added to the score of a pair if one
    of its tokens has no place.
    """

    spec: ModelSpec
    table: RelativeTable

    def scores(self, queries: Queries) -> Scores:
        """Returns what is added to the scores of scaled queries: their products with the rows of the offsets."""
        table = self.table
        # The row that stands for no offset is zero.
        rows = jnp.pad(table, (*((0, 0),) * (table.ndim - 2), (0, 1), (0, 0))).astype(queries.dtype)
        pairs = jnp.take(rows, offset_rows(self.spec, table.shape[-2]), axis=-2)
        names = "hqkd" if pairs.ndim == 4 else "qkd"
        return jnp.einsum(f"bqhd,{names}->bhqk", queries, pairs, preferred_element_type=jnp.float32)


class RelativeBias(NamedTuple):
    """A table of biases of the scores, one for each head and displacement of two patches, and the model that has it.

    The displacements (rows, columns) from key to query are in raster order, the lowest first. Three more rows, where
    tokens before the patches have a place (`position_rows`), are the biases of such a query for a patch, of a patch for
    such a key, and among such tokens. As in BEiT (arXiv 2106.08254), whose only such token is the class token.
    """

    spec: ModelSpec
    table: BiasTable

    def scores(self, queries: Queries) -> Scores:
        """Returns what is added to the scores of any queries: the biases of the displacements."""
        rows = jnp.pad(self.table, ((0, 1), (0, 0)))  # the row of pairs without a place is zero
        biases = jnp.moveaxis(jnp.take(rows, bias_rows(self.spec), axis=0), -1, 0)
        return jnp.broadcast_to(biases, (queries.shape[0], *biases.shape))


def bias_rows(spec: ModelSpec) -> Int[np.ndarray, "queries keys"]:
    """Returns the index of the row of `RelativeBias` for each pair of tokens.

    A pair with a token that has no place gets the index just past the end.
    """
    rows, columns = spec.grid
    y, x = (np.subtract.outer(places, places) for places in np.mgrid[:rows, :columns].reshape(2, -1))
    offsets = (2 * rows - 1) * (2 * columns - 1)
    indices = np.full((spec.tokens, spec.tokens), offsets + prefix_biases(spec))
    indices[spec.prefix_rows :, spec.prefix_rows :] = (y + rows - 1) * (2 * columns - 1) + x + columns - 1
    before = spec.position_rows
    indices[:before, spec.prefix_rows :] = offsets
    indices[spec.prefix_rows :, :before] = offsets + 1
    indices[:before, :before] = offsets + 2
    return indices


def prefix_biases(spec: ModelSpec) -> int:
    """Returns the number of rows of `RelativeBias` that are not those of two patches."""
    return 3 if spec.position_rows else 0


RELATIVES: dict[PositionKind, type[RelativePositions] | type[RelativeBias]] = {
    "relative": RelativePositions,
    "relative_bias": RelativeBias,
}


def offset_rows(spec: ModelSpec, rows: int) -> Int[np.ndarray, "queries keys"]:
    """Returns the index of the table's row for each pair of tokens, in a table of `rows` rows.

    A pair with a token that has no place gets the index `rows`, just past the end.
    """
    places = _placed(spec)
    reach = (rows - 1) // 2
    indices = np.full((spec.tokens, spec.tokens), rows)
    indices[np.ix_(places, places)] = np.clip(np.subtract.outer(*[np.arange(len(places))] * 2), -reach, reach) + reach
    return indices


def _placed(spec: ModelSpec) -> Int[np.ndarray, " places"]:
    """Returns the numbers of the tokens that have places, in the order of these places."""
    return np.concatenate([np.arange(spec.position_rows), np.arange(spec.prefix_rows, spec.tokens)])


def _normal(spec: ModelSpec) -> Callable[..., Array]:
    return jax.nn.initializers.normal(spec.position.std)


def _angles(spec: ModelSpec, steps: int) -> AnglesOfAxes:
    """Returns the row and the column of every patch, in raster order, times each of width / 4 frequencies.

    The frequencies fall geometrically from 1: frequency i, from 0, is 10000^(-i / steps).
    """
    places = np.mgrid[: spec.grid[0], : spec.grid[1]].reshape(2, -1, 1)
    return places * TEMPERATURE ** -(np.arange(spec.width // 4) / steps)


def _sinusoids(angles: AnglesOfAxes, prefix_rows: int) -> PositionTable:
    """Returns a row for each patch: sines and cosines of its angles of the first axis, then those of the second.

    `prefix_rows` rows of zeros come before the patches.
    """
    patches = np.concatenate([function(angle) for angle in angles for function in (np.sin, np.cos)], axis=1)
    return jnp.asarray(np.pad(patches, ((prefix_rows, 0), (0, 0))), jnp.float32)
