"""Attention-augmented convolutions (arXiv 1904.09925): attention computes some channels of a 3x3 convolution.

Queries and keys have 0.2 of the channels, and at least 20 channels a head. Values have 0.1 of the channels (kappa =
2 upsilon = 0.2). As the paper allows for large maps, attention may be computed on a map that is average-pooled (3x3,
stride 2), and its result resized. In a unit with a stride, the map is always pooled with that stride. The authors' code
for ImageNet is not published. Which stages have attention, and which one pools further, is chosen here so that
parameters and FLOPs are near the published ones.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.initializers import normal
from jaxtyping import Array, Float

from vit_jax.models.resnet import Epsilons, FeatureMap, StdConv, StridedMap, group_norm

HEADS, KEY_RATIO, VALUE_RATIO, MIN_KEY_SIZE = 8, 0.2, 0.1, 20


class RelativeAttention(nn.Module):
    """Attention of all places to all, with learned positions of offsets in rows and in columns that heads share.

    For a query q and a key k: softmax((q k + q r + q c) / sqrt(key size)), and a projection of all heads (section 3.1).
    """

    values: int  # channels, of all heads

    @nn.compact
    def __call__(self, x: FeatureMap) -> Float[Array, "batch rows columns values"]:
        """Returns, for each place, the sum of the values of all places, weighted by the attention weights."""
        batch, rows, columns, channels = x.shape
        size = max(MIN_KEY_SIZE, round(KEY_RATIO * channels / HEADS))
        keys = HEADS * size
        project = StdConv(2 * keys + self.values, 1, standardise=lambda kernel: kernel, name="conv_qkv")
        query, key, value = (
            part.reshape(batch, rows, columns, HEADS, -1) for part in jnp.split(project(x), [keys, 2 * keys], axis=-1)
        )
        query *= size**-0.5

        def positions(name: str, length: int) -> Float[Array, "queries keys size"]:
            table = self.param(f"relative_{name}", normal(size**-0.5), (2 * length - 1, size)).astype(x.dtype)
            return table[np.arange(length) - np.arange(length)[:, None] + length - 1]

        wide = {"preferred_element_type": jnp.float32}
        scores = (
            jnp.einsum("nijhd,nabhd->nhijab", query, key, **wide)
            + jnp.einsum("nijhd,iad->nhija", query, positions("rows", rows), **wide)[..., None]
            + jnp.einsum("nijhd,jbd->nhijb", query, positions("columns", columns), **wide)[..., None, :]
        )
        weights = jax.nn.softmax(scores, (-2, -1)).astype(x.dtype)
        attended = jnp.einsum("nhijab,nabhd->nijhd", weights, value).reshape(batch, rows, columns, self.values)
        return StdConv(self.values, 1, standardise=lambda kernel: kernel, name="conv_out")(attended)


def augment(x: FeatureMap, stride: int, epsilons: Epsilons, pooling: int = 1) -> StridedMap:
    """Returns the channels of a 3x3 convolution with the stride beside those of attention, after one norm.

    Args:
        x: the feature map.
        stride: the stride of the unit.
        epsilons: those of the unit's convolution and norm.
        pooling: 1, or 2: attention has half of the rows and columns of the result.
    """
    channels = x.shape[-1]
    values = max(1, round(VALUE_RATIO * channels / HEADS)) * HEADS
    convolve = StdConv(channels - values, 3, stride, standardise=epsilons.standardise, name="conv2")
    convolved, coarse = convolve(x), x
    for step in (stride, pooling):
        if step > 1:
            coarse = nn.avg_pool(coarse, (3, 3), (step, step), "SAME", count_include_pad=False)
    attended = RelativeAttention(values, name="attention")(coarse)
    attended = jax.image.resize(attended, (*convolved.shape[:3], values), "bilinear")
    return group_norm(jnp.concatenate([convolved, attended], axis=-1), "norm2", epsilon=epsilons.norm)
