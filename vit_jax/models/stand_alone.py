"""Stand-alone self-attention (arXiv 1906.05909): attention in a neighbourhood for each 3x3 convolution, and a stem.

As the paper defines the neighbourhood, a query has scores with the keys around it and no others. Places outside the map
are not keys. The paper states neither the initial values nor whether heads share their positions. Here the initial
kernel of the queries is divided by the root of the head's channels, in place of a scale of the scores, and each head
has positions of its own.
"""

from typing import Literal, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.initializers import lecun_normal, normal
from jaxtyping import Array, Bool, Float, Int

from vit_jax.models.axial_resnet import average
from vit_jax.models.resnet import Epsilons, FeatureMap, Kernel, StdConv, StridedMap, group_norm
from vit_jax.sharding import constrain

HEADS, EXTENT = 8, 7  # rows and columns of a neighbourhood
REACH = EXTENT // 2
BLOCK, WHOLE = 8, 16  # most places of a block of queries; an axis of up to `WHOLE` places is a single block
STEM_HEADS, STEM_BLOCK, STEM_MIXTURES = 4, 4, 4
MASKED = -1e30  # as a score; finite, as queries that only fill a block have no keys

PerHead: TypeAlias = Float[Array, "batch rows columns heads size"]
Table: TypeAlias = Float[Array, "offsets heads half"]
Cut: TypeAlias = Float[Array, "batch row_blocks column_blocks heads block_rows block_columns channels"]


class Line(NamedTuple):
    """How an axis of a map is cut into blocks of queries, each with a window of keys: the block and 3 on each side.

    Attributes:
        size: the number of places of the axis.
        length: the number of places of a block; the last block may end outside the map.
        halo: the number of keys on each side of a block; 0 if there is one block.
    """

    size: int
    length: int
    halo: int

    @property
    def starts(self) -> range:
        """The first query of each block."""
        return range(0, self.size, self.length)

    @property
    def offsets(self) -> Int[np.ndarray, "queries keys"]:
        """The offset of each key of a window from each query of the block."""
        return np.arange(-self.halo, self.length + self.halo) - np.arange(self.length)[:, None]

    @property
    def outside(self) -> Bool[np.ndarray, "blocks keys"]:
        """Which keys of the windows are not on the map."""
        keys = np.array(self.starts)[:, None] + np.arange(-self.halo, self.length + self.halo)
        return (keys < 0) | (keys >= self.size)

    def windows(self, x: Array, axis: int, halo: int) -> Array:
        """Returns `x` with an axis replaced by two: the blocks or windows, and the places of each.

        Args:
            x: any array; places outside it become zero.
            axis: the axis to replace.
            halo: the number of places to add on each side of a block: 0 for blocks, `self.halo` for windows.
        """
        padding = [(0, 0)] * axis + [(halo, len(self.starts) * self.length - self.size + halo)]
        x = jnp.pad(x, padding + [(0, 0)] * (x.ndim - axis - 1))
        slices = [jax.lax.slice_in_dim(x, start, start + self.length + 2 * halo, axis=axis) for start in self.starts]
        return jnp.stack(slices, axis)

    def position_scores(self, query: Array, table: Table, axis: Literal["i", "j"]) -> Array:
        """Returns the products of queries with the positions of each row (i) or column (j) of their window.

        For rows and columns outside the query's neighbourhood, the products are replaced by `MASKED`.
        """
        positions, near = table[np.clip(self.offsets + REACH, 0, EXTENT - 1)], abs(self.offsets) <= REACH
        scores = jnp.einsum(f"nRChijd,{axis}khd->nRChijk", query, positions)
        return jnp.where(near[:, None] if axis == "i" else near, scores, MASKED)


def cut_line(size: int) -> Line:
    """Returns how an axis of `size` places is cut: into one block, or several whose lengths are nearly equal."""
    if size <= WHOLE:
        return Line(size, size, 0)
    return Line(size, -(-size // -(-size // BLOCK)), REACH)


def attend(query: PerHead, key: PerHead, value: PerHead, down: Table, across: Table) -> PerHead:
    """Returns what each place attends to in its neighbourhood: softmax(q k + q r) v, without a scale (equation 3).

    One product gives the scores of a block of queries with a window of keys, because both get more channels. A query
    gets its position scores with each row and each column of the window. A key gets a one at its own row and its own
    column, and zeros elsewhere. A last channel masks keys that are not on the map.

    Args:
        query: the queries of all places.
        key: the keys of all places.
        value: the values of all places.
        down: positions of the row offsets from -3 to 3, for the first half of a query's channels.
        across: positions of the column offsets from -3 to 3, for the second half of a query's channels.
    """
    (batch, height, width, heads, size), dtype = query.shape, query.dtype
    rows, columns = cut_line(height), cut_line(width)

    def cut(x: PerHead, halos: tuple[int, int]) -> Cut:
        x = columns.windows(rows.windows(x, 1, halos[0]), 3, halos[1])
        return x.transpose(0, 1, 3, 5, 2, 4, 6)

    query, (key, value) = cut(query, (0, 0)), (cut(x, (rows.halo, columns.halo)) for x in (key, value))
    by_row = rows.position_scores(query[..., : size // 2], down, "i")
    by_column = columns.position_scores(query[..., size // 2 :], across, "j")
    query = jnp.concatenate([query, by_row, by_column, jnp.ones_like(query[..., :1])], -1)
    keys = key.shape[:-1]
    outside = rows.outside[:, None, None, :, None, None] | columns.outside[:, None, None, :, None]
    ones = (np.eye(keys[-2])[:, None], np.eye(keys[-1]), MASKED * outside)
    key = jnp.concatenate([key, *(jnp.broadcast_to(each, (*keys, each.shape[-1])).astype(dtype) for each in ones)], -1)
    query, key, value = (x.reshape(*x.shape[:4], -1, x.shape[-1]) for x in (query, key, value))
    scores = jnp.einsum("...qf,...kf->...qk", query, key, preferred_element_type=jnp.float32)
    attended = jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(scores).astype(dtype), value)
    attended = attended.reshape(*attended.shape[:4], rows.length, columns.length, size).transpose(0, 1, 4, 2, 5, 3, 6)
    filled = (len(line.starts) * line.length for line in (rows, columns))
    return attended.reshape(batch, *filled, heads, size)[:, :height, :width]


class NeighbourhoodAttention(nn.Module):
    """Attention of 8 heads in a neighbourhood of 7x7 places, with learned positions in rows and in columns."""

    @nn.compact
    def __call__(self, x: FeatureMap) -> FeatureMap:
        """Returns a feature map of the same shape."""
        *places, channels = x.shape
        size = channels // HEADS

        def smaller_queries(key: Array, shape: tuple[int, ...], dtype: type = jnp.float32) -> Kernel:
            return lecun_normal()(key, shape, dtype).at[..., :channels].multiply(size**-0.5)

        project = StdConv(
            3 * channels, 1, standardise=lambda kernel: kernel, kernel_init=smaller_queries, name="conv_qkv"
        )
        query, key, value = jnp.moveaxis(project(x).reshape(*places, 3, HEADS, size), 3, 0)
        tables = (
            self.param(f"relative_{axis}", normal(size**-0.5), (EXTENT, channels // 2)) for axis in ("rows", "columns")
        )
        down, across = (table.astype(x.dtype).reshape(EXTENT, HEADS, size // 2) for table in tables)
        return attend(query, key, value, down, across).reshape(x.shape)


def attend_nearby(x: FeatureMap, stride: int, epsilons: Epsilons) -> StridedMap:
    """Returns `x` after attention in neighbourhoods, average pooling with the stride, and a norm."""
    x = average(NeighbourhoodAttention(name="attention")(x), stride)
    return group_norm(x, "norm2", epsilon=epsilons.norm)


class AttentionRoot(nn.Module):
    """The attention stem: attention in each block of 4x4 pixels, a norm, and the maximum over the block (appendix A.1).

    Values depend on the place in the block: v = (sum_m p_m W_m) x. Here p_m is the softmax over m of the product
    (row + column) · mixture_m, whose vectors of rows, columns and mixtures are learned. The paper leaves open how many
    mixtures there are and how many channels their vectors have. Here there are 4, with as many channels as a head.
    """

    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "batch height width 3"]) -> StridedMap:
        """Returns `width` channels at a quarter of the rows and columns."""
        (batch, height, width, channels), side, size = x.shape, STEM_BLOCK, self.width // STEM_HEADS
        x = x.reshape(batch, height // side, side, width // side, side, channels)
        kernel = self.param("query_key_kernel", lecun_normal(), (channels, 2, self.width))
        kernels = self.param("values_kernel", lecun_normal(batch_axis=0), (STEM_MIXTURES, channels, self.width))
        rows, columns, mixtures = (
            self.param(f"mixture_{name}", normal(size**-0.5), (count, size))
            for name, count in (("rows", side), ("columns", side), ("values", STEM_MIXTURES))
        )
        shares = jax.nn.softmax((rows[:, None] + columns) @ mixtures.T)
        spatial = jnp.einsum("abm,mcf->abcf", shares, kernels).astype(x.dtype)
        query, key = jnp.einsum("nRaCbc,cqf->qnRaCbf", x, kernel.astype(x.dtype))
        value = jnp.einsum("nRaCbc,abcf->nRaCbf", x, spatial)
        query, key, value = (each.reshape(*each.shape[:-1], STEM_HEADS, size) for each in (query, key, value))
        scores = jnp.einsum("nRiCjhd,nRaCbhd->nRChijab", query, key, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores, (-2, -1)).astype(x.dtype)
        x = jnp.einsum("nRChijab,nRaCbhd->nRiCjhd", weights, value).reshape(batch, height, width, self.width)
        x = group_norm(constrain(x, ("batch", "rows", "columns", "channels")), "norm")
        return nn.max_pool(x, (side, side), (side, side))
