"""Fingerprints of arrays: 64 bits that change when a value is changed, swapped, rounded or missing, and that do not
depend on how the array lies on the devices.

An array is read as unsigned words. Each word is mixed with its position by a bijection of 32 bits, and the results are
added modulo 2^32. Two different bijections give two such sums, which are the fingerprint. Integer sums do not depend on
the order, so that any sharding, any replication and NumPy give the same fingerprint. One changed word always changes
it. A fingerprint guards against accidents, not against forgers.
"""

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax import tree
from vit_jax.tree import ArrayTree

ZERO = np.uint32(0)
LIMIT = 2**32  # positions that one unsigned word tells apart
CHUNK = 2**16  # words of a NumPy array taken at once: few enough to stay in the processor's cache
# For each of the two sums: the factor of the position, and the two factors of the bijection of words. All are odd. The
# bijections have the factors of MurmurHash3's finaliser and of Wellons' lowbias32 (nullprogram.com/blog/2018/07/31).
LANES = ((0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35), (0x632BE5AB, 0x7FEB352D, 0x846CA68B))


class Fingerprint(NamedTuple):
    """A summary of an array's values.

    Attributes:
        digits: the fingerprint, 16 hexadecimal digits.
        finite: whether no value is NaN or infinite.
    """

    digits: str
    finite: bool


def fingerprints(state: ArrayTree) -> dict[str, Fingerprint]:
    """Returns name -> fingerprint for every array of a tree. Every process must call it.

    All JAX arrays on the same mesh are handled in one call of a jitted function, NumPy arrays one by one. Several
    programs could run in a different order on each host, and a host would wait for a sum that the others do not make.
    No array is gathered: each device adds up the part that it holds, and the sums of the devices are added.

    Raises:
        ValueError: an array has a dtype or a dimension for which no fingerprint is defined.
    """
    leaves = tree.flatten(state)
    there: dict[Any, list[str]] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.Array):
            placed = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
            there.setdefault(placed and placed.mesh, []).append(name)
    by_name: dict[str, Fingerprint] = {}
    for mesh, names in there.items():
        arrays = [leaves[name] for name in names]
        specs = tuple(leaf.sharding.spec for leaf in arrays) if mesh else ()
        rows = np.asarray(rows_on(mesh, specs)(arrays))
        for name, row in zip(names, rows, strict=True):
            by_name[name] = Fingerprint(_digits(*row[:2].tolist()), not row[2])
    here = [name for name in leaves if name not in by_name]
    with ThreadPoolExecutor(4) as pool:
        by_name |= dict(zip(here, pool.map(lambda name: fingerprint(leaves[name]), here), strict=True))
    return {name: by_name[name] for name in leaves}


def fingerprint(array: Any) -> Fingerprint:
    """Returns the fingerprint of a NumPy array. If the array is contiguous, this takes a few MB of memory at most."""
    array = np.asarray(array)
    words = _numpy_words(array)
    sizes, totals, finite = split_index(words.shape), [0, 0], True
    flat = words.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        part: Any = flat[start : start + CHUNK].astype(np.uint32)
        index: Any = np.arange(start, start + part.size, dtype=np.uint64)
        positions = []
        for size in sizes:
            positions.append((index % np.uint64(size)).astype(np.uint32))
            index //= np.uint64(size)
        sums = [int(term.sum(dtype=np.uint64)) for term in mixed(part, positions)]
        totals = [(old + new) % 2**32 for old, new in zip(totals, sums, strict=True)]
    if jnp.issubdtype(array.dtype, jnp.inexact):
        values = array.reshape(-1)
        finite = all(np.isfinite(values[start : start + CHUNK]).all() for start in range(0, values.size, CHUNK))
    return Fingerprint(_digits(*totals), finite)


@functools.cache
def rows_on(mesh: Mesh | None, specs: tuple[P, ...]) -> Callable[[list[jax.Array]], jax.Array]:
    """Returns a jitted function that takes arrays and returns uint32 [arrays, 3] on every device.

    The columns of the result are the two sums of an array, and a number that is 0 if all its values are finite.

    Args:
        mesh: the mesh on which the arrays lie; None: each array lies on one device.
        specs: the partition spec of each array; empty without a mesh.
    """
    if mesh is None:
        return jax.jit(lambda leaves: jnp.stack([_row(leaf, P()) for leaf in leaves]))

    def local(leaves: list[jax.Array]) -> jax.Array:
        rows = [_row(leaf, spec, mesh) for leaf, spec in zip(leaves, specs, strict=True)]
        split = [tuple(sorted(axis for axes in spec for axis in _names(axes))) for spec in specs]
        # An array is not summed over an axis along which it is copied. The order is that of the arrays on every host.
        for axes in dict.fromkeys(axes for axes in split if axes):
            numbers = [number for number, along in enumerate(split) if along == axes]
            sums = jax.lax.psum(jnp.stack([rows[number] for number in numbers]), axes)
            for number, row in zip(numbers, sums, strict=True):
                rows[number] = row
        return jnp.stack(rows)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(list(specs),), out_specs=P(), check_vma=False))


def _row(leaf: jax.Array, spec: P, mesh: Mesh | None = None) -> jax.Array:
    """Returns uint32 [3] of the part of an array on this device: both sums, and 1 if a value is not finite, else 0."""
    words = _device_words(leaf)
    shape, offsets = list(words.shape), [jnp.uint32(0)] * words.ndim
    for dimension, axes in enumerate(spec):
        if mesh and _names(axes):
            offsets[dimension] = jax.lax.axis_index(_names(axes)).astype(jnp.uint32) * np.uint32(shape[dimension])
            shape[dimension] *= math.prod(mesh.shape[axis] for axis in _names(axes))
    terms = mixed(words.astype(jnp.uint32), _positions(words.shape, shape, offsets))
    finite = jnp.isfinite(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.ones(leaf.shape, bool)
    bad = jnp.broadcast_to(~finite.reshape(*leaf.shape, *[1] * (words.ndim - leaf.ndim)), words.shape)
    # In one pass: three reductions would each be fed from memory on CPU.
    return jnp.stack(jax.lax.reduce((*terms, bad.astype(jnp.uint32)), (ZERO,) * 3, _add, tuple(range(words.ndim))))


def _names(axes: Any) -> tuple[str, ...]:
    """Returns the names of the mesh axes in one entry of a partition spec."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _add(one: Sequence[jax.Array], other: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return one[0] + other[0], one[1] + other[1], one[2] | other[2]


def mixed(words: Any, positions: Sequence[Any]) -> list[Any]:
    """Returns the terms of the first sum and those of the second: for each word, its mix with its position.

    Args:
        words: a uint32 array of NumPy or JAX.
        positions: the positions of the words, each in one or more uint32 arrays as `split_index` splits them.
    """
    terms = []
    for step, first, second in LANES:
        low, *rest = positions
        key = low * np.uint32(step) + np.uint32(first)
        for higher in rest:  # not linear: else positions 2^32 apart could share their keys in both sums
            key = key + _scrambled(higher + np.uint32(step), first, second)
        terms.append(_scrambled(words ^ key, first, second))
    return terms


def _scrambled(word: Any, first: int, second: int) -> Any:
    """Returns 32-bit words after a bijection, which the odd factors `first` and `second` define."""
    word = (word ^ (word >> np.uint32(16))) * np.uint32(first)
    word = (word ^ (word >> np.uint32(15))) * np.uint32(second)
    return word ^ (word >> np.uint32(16))


def split_index(shape: Sequence[int]) -> list[int]:
    """Returns the sizes of the parts into which a flat index of an array of this shape is split, lowest part first.

    A size is a product of adjacent dimensions and at most 2^32, so that each part of an index fits into a uint32. An
    array of up to 2^32 words has a single part.

    Raises:
        ValueError: one dimension alone is above 2^32.
    """
    if max(shape, default=1) > LIMIT:
        raise ValueError(f"a dimension of {max(shape):,} is too large for a fingerprint")
    sizes = [1]
    for size in reversed(shape):
        if sizes[-1] * size > LIMIT:
            sizes.append(1)
        sizes[-1] *= size
    return sizes


def _positions(local: Sequence[int], shape: Sequence[int], offsets: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the flat index of each word of a part of an array, split as `split_index` says.

    The array has the shape `shape`; the part has the shape `local` and begins at `offsets`. Indices are computed where
    they are used and take no memory.
    """
    dimension, positions = len(shape), []
    for size in split_index(shape):
        position, stride = jnp.zeros(local, jnp.uint32), 1
        while dimension and stride * shape[dimension - 1] <= size:
            dimension -= 1
            index = jax.lax.broadcasted_iota(jnp.uint32, local, dimension) + offsets[dimension]
            position += index * np.uint32(stride)
            stride *= shape[dimension]
        positions.append(position)
    return positions


def _device_words(leaf: jax.Array) -> jax.Array:
    """Returns the values of an array as unsigned words. A value of 8 bytes gives two, along a new last dimension."""
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(leaf, _word(leaf.dtype))


def _numpy_words(array: np.ndarray) -> np.ndarray:
    word = _word(array.dtype)
    split = (array.dtype.itemsize // word.itemsize,) if array.dtype.itemsize > word.itemsize else ()
    return array.ravel().view(word).reshape((*array.shape, *split))


def _word(dtype: Any) -> np.dtype:
    sizes = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}
    real = dtype.kind == "b" or (jnp.issubdtype(dtype, jnp.number) and not jnp.issubdtype(dtype, jnp.complexfloating))
    if not real or dtype.itemsize not in sizes:
        raise ValueError(f"no fingerprint is defined for {dtype}")
    return np.dtype(sizes[dtype.itemsize])


def _digits(first: int, second: int) -> str:
    return f"{first:08x}{second:08x}"
