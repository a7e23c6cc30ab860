"""The units of an AxialResNet (appendix D.6): each 3x3 convolution is replaced by attention along columns, then rows.

The attention is that of Axial-DeepLab (arXiv 2003.07853, equation 4). The paper's authors ported it to GroupNorm and
standardised weights: google-research/scenic, projects/baselines/axial_resnet.py. Their port adds the product of a key
with its relative position at the place of the query. Here, as in csrhddlam/axial-deeplab, it is added at the place of
the key.
"""

from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.initializers import normal
from jaxtyping import Array, Float

from vit_jax.models.resnet import Epsilons, FeatureMap, StdConv, StridedMap, group_norm, standardise

HEADS = 8
EPSILONS = Epsilons(standardise, 1e-4)
Lines: TypeAlias = Float[Array, "batch lines length channels"]


class LineAttention(nn.Module):
    """Self-attention along lines of a feature map, with learned positions of query, key and value (D.6).

    For a query i and a key j of a head, v_j + r^v_(i-j) has the weight softmax_j(q_i k_j + q_i r^q_(i-j) + k_j
    r^k_(j-i)). There is no scale. Queries and keys have half the channels of values. A GroupNorm follows the
    projection, and another one the weighted sum. Both have statistics of each line.
    """

    @nn.compact
    def __call__(self, x: Lines) -> Lines:
        """Returns what each position of a line attends to."""
        length, channels = x.shape[2:]
        size = channels // HEADS
        project = StdConv(
            2 * channels, 1, standardise=lambda kernel: kernel, kernel_init=normal(1 / channels), name="conv_qkv"
        )
        qkv = group_norm(project(x.reshape(-1, 1, length, channels)), "norm_qkv", epsilon=EPSILONS.norm)
        parts = np.array([size // 2, size])
        query, key, value = jnp.split(qkv.reshape(-1, length, HEADS, 2 * size), parts, axis=-1)
        table = self.param("relative_line", normal(1 / size), (2 * length - 1, 2 * size)).astype(x.dtype)
        offsets = np.subtract.outer(*[np.arange(length)] * 2) + length - 1
        of_query, of_key, of_value = jnp.split(table[offsets], parts, axis=-1)
        scores = (
            jnp.einsum("nihd,njhd->nhij", query, key, preferred_element_type=jnp.float32)
            + jnp.einsum("nihd,ijd->nhij", query, of_query, preferred_element_type=jnp.float32)
            + jnp.einsum("njhd,jid->nhij", key, of_key, preferred_element_type=jnp.float32)
        )
        weights = jax.nn.softmax(scores).astype(x.dtype)
        attended = jnp.einsum("nhij,njhd->nihd", weights, value) + jnp.einsum("nhij,ijd->nihd", weights, of_value)
        attended = attended.reshape(-1, 1, length, channels)
        return group_norm(attended, "norm_out", epsilon=EPSILONS.norm).reshape(x.shape)


def average(x: FeatureMap, stride: int) -> StridedMap:
    """Returns `x` average-pooled with windows as large as the stride. Zeros that fill the last window count too."""
    return nn.avg_pool(x, (stride, stride), (stride, stride), "SAME") if stride > 1 else x


def attend_axially(x: FeatureMap, stride: int, epsilons: Epsilons) -> StridedMap:
    """Returns `x` after attention along columns, then along rows, and average pooling with the stride."""
    x = LineAttention(name="columns")(x.swapaxes(1, 2)).swapaxes(1, 2)
    return average(LineAttention(name="rows")(x), stride)
