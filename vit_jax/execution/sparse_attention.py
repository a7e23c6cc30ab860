"""Attention in a pattern, computed for the pairs that attend and for few others.

The patches are arranged in blocks. A query has scores with the keys of its own block and of the blocks around it. These
are products with shifted copies of the blocks, so that no windows are gathered. The patterns of the Sparse Transformer
have a second set of pairs, in another arrangement of blocks, which is computed as a second part. One softmax goes over
the scores of all parts (the paper's "merged head"): each part gives sums of its own, which are put together at the end.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vit_jax.models import ModelSpec, block_distance, block_length, summary_size

AnyArray: TypeAlias = Array | np.ndarray
Places: TypeAlias = Int[np.ndarray, "..."]
PerHead: TypeAlias = Float[Array, "batch heads tokens head_dim"]
# (queries, keys) of the same blocks, -1 for padding -> which pairs attend.
Rule: TypeAlias = Callable[[Places, Places], Bool[np.ndarray, "..."]]
MASKED = -1e30  # as a score; finite, so that a query without a key in some part gives no NaN


class Sums(NamedTuple):
    """The sums of a softmax that each query has over one part of the keys, not yet divided.

    Attributes:
        highest: the highest score.
        total: the sum of the exponentials of (score - highest).
        values: the sum of the values, weighted by these exponentials.
    """

    highest: Float[Array, "batch heads tokens"]
    total: Float[Array, "batch heads tokens"]
    values: Float[Array, "batch heads tokens head_dim"]


class Chosen(NamedTuple):
    """A part with the same keys for all queries.

    Attributes:
        keys: the numbers of the keys.
        mask: which pairs attend.
    """

    keys: Int[np.ndarray, " keys"]
    mask: Bool[np.ndarray, "queries keys"]

    def attend(self, query: PerHead, key: PerHead, value: PerHead) -> Sums:
        """Returns the sums over these keys."""
        key, value = key[:, :, self.keys], value[:, :, self.keys]
        return _sum([(_scores(query, key), value)], self.mask)


class Blocks(NamedTuple):
    """A part with the keys of the query's block and of the blocks around it.

    Attributes:
        grid: (patches,) or (rows, columns). Each dimension is padded to a multiple of `length`.
        length: the length of a block along each dimension of the grid.
        reach: how many blocks away, along each dimension, the farthest of the other blocks is; 0: there are none.
        strides: whether a block has the patches that are `length` apart, instead of `length` consecutive patches.
        rule: which pairs of the queries and keys in these blocks attend.
    """

    grid: tuple[int, ...]
    length: int
    reach: int
    strides: bool
    rule: Rule

    def attend(self, query: PerHead, key: PerHead, value: PerHead) -> Sums:
        """Returns the sums over the keys of these blocks."""
        query, keys, values = self.arrange(query), self.around(self.arrange(key)), self.around(self.arrange(value))
        sums = _sum([(_scores(query, one), other) for one, other in zip(keys, values, strict=True)], self.mask())
        return Sums(*map(self.restore, sums))

    def mask(self) -> Bool[np.ndarray, "... queries keys"]:
        """Returns which pairs attend. The keys are those of the blocks around the query's, in the order of `around`."""
        places = self.arrange(np.arange(math.prod(self.grid))[None, None], -1)
        keys = np.concatenate([one[0, 0] for one in self.around(places, -1)], axis=-1)[..., None, :]
        query = places[0, 0][..., None]
        return (query >= 0) & (keys >= 0) & self.rule(query, keys)

    def arrange(self, x: AnyArray, fill: int = 0) -> AnyArray:
        """Returns [batch, heads, patches, ...] as [batch, heads, *blocks, patches of a block, ...].

        The grid is padded with `fill` to whole blocks.
        """
        library = np if isinstance(x, np.ndarray) else jnp
        lead, rest, dims = x.shape[:2], x.shape[3:], len(self.grid)
        padding = [(0, -size % self.length) for size in self.grid]
        x = x.reshape(*lead, *self.grid, *rest)
        x = library.pad(x, ((0, 0),) * 2 + (*padding, *((0, 0),) * len(rest)), constant_values=fill)
        x = x.reshape(*lead, *itertools.chain(*((-(-size // self.length), self.length) for size in self.grid)), *rest)
        x = x.transpose(*self._axes(), *range(2 * dims + 2, x.ndim))
        return x.reshape(*x.shape[: dims + 2], -1, *rest)

    def restore(self, x: Array) -> Array:
        """Returns [batch, heads, patches, ...] from what `arrange` returned: the inverse, which drops the padding."""
        lead, rest, dims = x.shape[:2], x.shape[len(self.grid) + 3 :], len(self.grid)
        counts = [-(-size // self.length) for size in self.grid]
        split = [self.length if self.strides else count for count in counts]
        within = counts if self.strides else [self.length] * dims
        x = x.reshape(*lead, *split, *within, *rest)
        x = x.transpose(*np.argsort(self._axes()).tolist(), *range(2 * dims + 2, x.ndim))
        x = x.reshape(*lead, *(count * self.length for count in counts), *rest)
        return x[(slice(None), slice(None), *map(slice, self.grid))].reshape(*lead, -1, *rest)

    def _axes(self) -> list[int]:
        first, second = ([2 + 2 * dim + part for dim in range(len(self.grid))] for part in range(2))
        return [0, 1, *second, *first] if self.strides else [0, 1, *first, *second]

    def around(self, blocks: AnyArray, fill: int = 0) -> list[AnyArray]:
        """Returns a copy of the blocks for each shift within reach, `fill` beyond the border.

        At the place of a block, the copies have this block and the blocks around it.
        """
        if not self.reach:
            return [blocks]
        library, dims = np if isinstance(blocks, np.ndarray) else jnp, len(self.grid)
        padding = [(0, 0)] * 2 + [(self.reach, self.reach)] * dims + [(0, 0)] * (blocks.ndim - dims - 2)
        padded, counts = library.pad(blocks, padding, constant_values=fill), blocks.shape[2 : dims + 2]
        shifts = itertools.product(range(2 * self.reach + 1), repeat=dims)
        return [
            padded[(slice(None), slice(None), *(slice(s, s + count) for s, count in zip(shift, counts, strict=True)))]
            for shift in shifts
        ]


def _scores(query: Array, key: Array) -> Array:
    return jnp.einsum("...qd,...kd->...qk", query, key, preferred_element_type=jnp.float32)


def _sum(pairs: list[tuple[Array, Array]], mask: np.ndarray | None) -> Sums:
    """Returns the sums over the keys of several arrays.

    Args:
        pairs: (scores, values) of each array.
        mask: which pairs attend, with the keys of all arrays side by side; None: all attend.
    """
    sizes = [scores.shape[-1] for scores, _ in pairs]
    scores = [scores for scores, _ in pairs]
    if mask is not None:
        masks = np.split(mask, np.cumsum(sizes)[:-1], axis=-1)
        scores = [jnp.where(own, one, MASKED) for own, one in zip(masks, scores, strict=True)]
    highest = jax.lax.stop_gradient(jnp.stack([one.max(-1) for one in scores]).max(0))
    weights = [jnp.exp(one - highest[..., None]) for one in scores]
    total = sum(one.sum(-1) for one in weights)
    values = sum(
        jnp.einsum("...qk,...kd->...qd", one.astype(value.dtype), value, preferred_element_type=jnp.float32)
        for one, (_, value) in zip(weights, pairs, strict=True)
    )
    return Sums(highest, total, values)


def pattern_parts(spec: ModelSpec) -> list[Blocks | Chosen]:
    """Returns the parts of a model's pattern. Each pair of patches that attend is in exactly one of them."""
    places, window = np.arange(spec.tokens - spec.prefix_rows), block_length(spec)

    def blocks(reach: int, rule: Rule, grid: tuple[int, ...] = places.shape, strides: bool = False) -> Blocks:
        return Blocks(grid, window, reach, strides, rule)

    match spec.attention.pattern:
        case "local":
            return [blocks(1, all_attend)]
        case "local2d":
            return [blocks(1, all_attend, spec.grid)]
        case "strided":
            near = blocks(1, lambda query, key: abs(query - key) < window)
            return [near, blocks(0, lambda query, key: abs(query - key) >= window, strides=True)]
        case "fixed":
            keys = places[places % window >= window - summary_size(window)]
            return [blocks(0, all_attend), Chosen(keys, block_distance(places[:, None], keys, window) > 0)]
    raise ValueError(f"{spec.attention.pattern} has no parts")


def all_attend(query: Places, key: Places) -> Bool[np.ndarray, "..."]:
    """Returns True for every pair: all attend."""
    return np.ones(np.broadcast_shapes(query.shape, key.shape), bool)


def attend_in_pattern(
    spec: ModelSpec, qkv: Float[Array, "batch tokens 3 heads head_dim"]
) -> Float[Array, "batch tokens heads head_dim"]:
    """Returns what each token attends to in the pattern of a model.

    All tokens attend to the class token and the registers, which attend to all tokens.
    """
    query, key, value = qkv.transpose(2, 0, 3, 1, 4)
    query *= spec.head_dim**-0.5
    prefix, patches = (slice(spec.prefix_rows), slice(spec.prefix_rows, None))
    sums = [part.attend(*(x[:, :, patches] for x in (query, key, value))) for part in pattern_parts(spec)]
    merged = []
    if spec.prefix_rows:
        merged.append(_merge([_sum([(_scores(query[:, :, prefix], key), value)], None)]))
        sums.append(_sum([(_scores(query[:, :, patches], key[:, :, prefix]), value[:, :, prefix])], None))
    merged.append(_merge(sums))
    return jnp.concatenate(merged, axis=2).astype(qkv.dtype).swapaxes(1, 2)


def _merge(parts: list[Sums]) -> PerHead:
    """Returns the mean of the values over the keys of all parts, weighted by the exponentials of the scores."""
    highest = functools.reduce(jnp.maximum, (part.highest for part in parts))
    factors = [jnp.exp(part.highest - highest) for part in parts]
    total = sum(part.total * factor for part, factor in zip(parts, factors, strict=True))
    values = sum(part.values * factor[..., None] for part, factor in zip(parts, factors, strict=True))
    return values / total[..., None]
