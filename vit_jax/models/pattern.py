"""Which patches attend to which, where not all attend to all: local and sparse attention.

Patches are numbered in raster order. Attention is not causal: a patch attends to later patches as it does to earlier
ones. The class token and the registers attend to all tokens, and all tokens attend to them.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Int

from vit_jax.models.spec import AttentionPattern, ModelSpec

Places: TypeAlias = Int[np.ndarray, "..."]
Pairs: TypeAlias = Bool[np.ndarray, "..."]
Rule: TypeAlias = Callable[[Places, Places, int, int], Pairs]  # (queries, keys, window, patches in a row) -> pairs


def block_distance(query: Places, key: Places, length: int) -> Int[np.ndarray, "..."]:
    """Returns the distance from the block of a query to that of a key, in blocks of `length` places; 0: the same."""
    return abs(query // length - key // length)


def local(query: Places, key: Places, window: int, columns: int) -> Pairs:
    """Returns which keys lie in the block of the query or in one beside it (1-D; Image Transformer, 1802.05751)."""
    return block_distance(query, key, window) <= 1


def local2d(query: Places, key: Places, window: int, columns: int) -> Pairs:
    """Returns which keys lie in the square block of the query or in the eight around it (2-D; Image Transformer)."""
    rows = block_distance(query // columns, key // columns, window)
    return np.maximum(rows, block_distance(query % columns, key % columns, window)) <= 1


def strided(query: Places, key: Places, window: int, columns: int) -> Pairs:
    """Returns which keys are less than `window` places from the query, or a multiple of `window` places (Sparse
    Transformer, 1904.10509).
    """
    return (abs(query - key) < window) | ((query - key) % window == 0)


def fixed(query: Places, key: Places, window: int, columns: int) -> Pairs:
    """Returns which keys lie in the block of the query, or are among the last `summary_size(window)` of any block
    (Sparse Transformer).
    """
    return (block_distance(query, key, window) == 0) | (key % window >= window - summary_size(window))


def summary_size(window: int) -> int:
    """Returns how many patches at the end of a block all patches attend to: an eighth of the block, rounded up.

    The paper has 8 to 32 in blocks of 128 to 256.
    """
    return -(-window // 8)


RULES: dict[AttentionPattern, Rule] = {"local": local, "local2d": local2d, "strided": strided, "fixed": fixed}


def block_length(spec: ModelSpec) -> int:
    """Returns the window of a model: the patches of a block, on a side if it is square, by default those of a row."""
    return spec.attention.window or spec.grid[1]


def attended_pairs(spec: ModelSpec) -> Bool[np.ndarray, "queries keys"]:
    """Returns which tokens attend to which."""
    places, rule = np.arange(spec.tokens - spec.prefix_rows), RULES[spec.attention.pattern]
    pairs: Bool[np.ndarray, "queries keys"] = np.ones((spec.tokens, spec.tokens), bool)
    pairs[spec.prefix_rows :, spec.prefix_rows :] = rule(places[:, None], places, block_length(spec), spec.grid[1])
    return pairs
