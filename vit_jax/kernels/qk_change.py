"""The change of queries and keys before the attention kernels compare them: a norm of each head, a rotation.

The norm divides by the root of the mean square. For channels whose mean is zero, that is a LayerNorm.

Both run on whole windows of lanes in VMEM. Sums over the channels of a head, and the exchange of the two channels of a
pair, are products with matrices of 0, 1 and -1.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.kernels.packing import round_up
from vit_jax.kernels.tpu_kinds import LANES

Rows: TypeAlias = Float[Array, "rows lanes"]
Table: TypeAlias = Float[Array, "_ _"]  # rows, lanes

CHANGED_ROWS = 256  # at once: the compiler keeps all that is computed of them in vector memory
NORM_ROWS = 4  # of the norms' table: scale and bias of queries, then of keys


class QKChange(NamedTuple):
    """The kind of change of queries and keys.

    Attributes:
        epsilon: the number added to the mean square of a head's channels; None: there is no norm.
        rotates: whether pairs of channels are rotated, as points.
    """

    epsilon: float | None
    rotates: bool

    @property
    def norm_tables(self) -> int:
        """The number of tables for the norms: 1, [4, lanes], with scale and bias of queries, then of keys; or 0."""
        return int(self.epsilon is not None)

    @property
    def num_tables(self) -> int:
        """The number of all tables: that of the norms, then cosines and sines, [rows, lanes] each, if it rotates."""
        return self.norm_tables + 2 * self.rotates

    def apply(self, x: Rows, section: int, head_dim: int, tables: tuple[Table, ...]) -> Rows:
        """Returns the changed queries (section 0) or keys (1) of whole heads, given their parts of the tables."""
        dtype = x.dtype
        if self.epsilon is not None:
            scale, bias = tables[0][2 * section], tables[0][2 * section + 1]
            x = x.astype(jnp.float32) * _inverse_root(x, head_dim, self.epsilon) * scale + bias
        if self.rotates:
            cosines, sines = tables[-2:]
            x = _rotate(x, cosines, sines, dtype)
        return x.astype(dtype)

    def transpose(
        self, x: Rows, grad: Rows, section: int, head_dim: int, tables: tuple[Table, ...]
    ) -> tuple[Rows, Float[Array, "2 lanes"] | None]:
        """Returns the gradient of `x` in float32, and the gradient of the norm's scale and bias (None without a norm).

        Args:
            x: as given to `apply`.
            grad: the gradient of what it returned.
            section: 0 for queries, 1 for keys.
            head_dim: channels of a head.
            tables: as given to `apply`.
        """
        if self.rotates:
            cosines, sines = tables[-2:]
            grad = _rotate(grad, cosines, -sines, x.dtype)
        if self.epsilon is None:
            return grad, None
        inverse, wide = _inverse_root(x, head_dim, self.epsilon), grad.astype(jnp.float32)
        normalised = x.astype(jnp.float32) * inverse
        of_parameters = jnp.stack([(wide * normalised).sum(0), wide.sum(0)])
        wide = wide * tables[0][2 * section]
        along = _mean_of_head((wide * normalised).astype(x.dtype), head_dim)
        return inverse * (wide - normalised * along), of_parameters


def lanes_of_heads(head_dim: int, width: int) -> int:
    """Returns how many channels are changed at once: whole heads that fill lanes.

    Args:
        head_dim: channels of a head.
        width: channels of all heads on one device.
    """
    return min(math.lcm(head_dim, LANES), width)


def _inverse_root(x: Rows, head_dim: int, epsilon: float) -> Rows:
    """Returns, for each channel, 1 / sqrt(mean square of its head's channels + epsilon) in float32.

    The matrix unit multiplies bfloat16 numbers, so that a square is split into a sum of two such numbers.
    """
    square = jnp.square(x.astype(jnp.float32))
    high = square.astype(x.dtype)
    mean = _mean_of_head(high, head_dim)
    if x.dtype != jnp.float32:
        mean += _mean_of_head((square - high.astype(jnp.float32)).astype(x.dtype), head_dim)
    return jax.lax.rsqrt(mean + epsilon)


def _rotate(x: Rows, cosines: Table, sines: Table, dtype: Any) -> Rows:
    """Returns pairs of channels (a, b) as (a cos - b sin, b cos + a sin), in float32."""

    def exchange(row: Array, column: Array) -> Array:
        return jnp.where((row ^ 1) == column, jnp.where((column & 1) == 0, -1.0, 1.0), 0.0)

    return x.astype(jnp.float32) * cosines + _mix(x.astype(dtype), 2, exchange) * sines


def _mean_of_head(x: Rows, head_dim: int) -> Rows:
    """Returns, for each channel, the mean over the channels of its head, summed in float32."""

    def is_same_head(row: Array, column: Array) -> Array:
        return (jax.lax.div(row, head_dim) == jax.lax.div(column, head_dim)).astype(jnp.float32)

    return _mix(x, head_dim, is_same_head) * (1 / head_dim)


def _mix(x: Rows, unit: int, entries: Callable[[Array, Array], Array]) -> Rows:
    """Returns the product of `x` with a matrix of 0, 1 and -1 in float32, exact but for the order of sums.

    Args:
        x: [rows, lanes].
        unit: the number of neighbouring channels that are mixed with one another.
        entries: (row numbers, column numbers of the matrix) -> its entries, which must be zero where row and column
            belong to different units.
    """
    lanes = x.shape[1]
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    parts = []
    for start in range(0, lanes, LANES):
        stop = min(start + LANES, lanes)
        first = start // unit * unit // LANES * LANES
        last = min(round_up(round_up(stop, unit), LANES), lanes)
        row, column = (
            jax.lax.broadcasted_iota(jnp.int32, (last - first, stop - start), axis) + offset
            for axis, offset in enumerate((first, start))
        )
        matrix = entries(row, column).astype(x.dtype)
        parts.append(jnp.dot(x[:, first:last], matrix, precision=precision, preferred_element_type=jnp.float32))
    return jnp.concatenate(parts, axis=1)
