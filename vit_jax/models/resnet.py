"""The ResNet of a hybrid: standardised weights, GroupNorm, post-activation units (section 3.1, as released).

BiT (`bit.py`) shares its convolution, norm and stages, and in all forms but one its units.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.kernels import before_strided_convolution
from vit_jax.models.layers import Dense
from vit_jax.models.operations import PlainOps
from vit_jax.sharding import constrain, gather, traced_device_kind

FeatureMap: TypeAlias = Float[Array, "batch rows columns channels"]
StridedMap: TypeAlias = Float[Array, "batch fewer_rows fewer_columns filters"]
Kernel: TypeAlias = Float[Array, "kernel_rows kernel_columns channels filters"]

# Constrained after every layer: else the gradients follow the kernels' shards and are gathered over the batch.
DIMENSIONS = ("batch", "rows", "columns", "channels")


def standardise(kernel: Kernel) -> Kernel:
    """Returns (w - mean) / (standard deviation + 1e-5), both of each filter (arXiv 1903.10520), as released."""
    return (kernel - kernel.mean((0, 1, 2))) / (kernel.std((0, 1, 2)) + 1e-5)


def standardise_as_timm(kernel: Kernel) -> Kernel:
    """Returns (w - mean) / sqrt(variance + 1e-8), both of each filter."""
    return (kernel - kernel.mean((0, 1, 2))) * jax.lax.rsqrt(kernel.var((0, 1, 2)) + 1e-8)


class Epsilons(NamedTuple):
    """The constants that a ResNet adds to the standard deviations of weights and to the variances of norms."""

    standardise: Callable[[Kernel], Kernel]  # standardises the kernels of the convolutions
    norm: float  # the epsilon of GroupNorm


EPSILONS: dict[str, Epsilons] = {
    "released": Epsilons(standardise, 1e-6),
    "timm": Epsilons(standardise_as_timm, 1e-5),
}


def group_norm(
    x: FeatureMap, name: str, scale: float = 1.0, epsilon: float = 1e-6, fast_variance: bool = True
) -> FeatureMap:
    """Returns `x`, in its dtype, after GroupNorm over 32 groups; statistics in float32.

    Args:
        x: a feature map whose channels are a multiple of 32.
        name: name of the parameters in the calling module.
        scale: initial value of the scale.
        epsilon: added to the variance.
        fast_variance: whether the variance is computed as E[x²] - E[x]², which reads the feature map once less, or as
            the mean of (x - mean)².
    """
    scale_init = nn.initializers.constant(scale)
    norm = nn.GroupNorm(
        32, epsilon=epsilon, dtype=x.dtype, scale_init=scale_init, use_fast_variance=fast_variance, name=name
    )
    return constrain(norm(x), DIMENSIONS)


class StdConv(nn.Module):
    """A convolution with standardised weights and no bias."""

    filters: int
    size: int  # of the square kernel
    stride: int = 1
    padding: int | None = None  # rows of zeros on each side; None: the fewest with which there are ceil(rows / stride)
    standardise: Callable[[Kernel], Kernel] = standardise
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: FeatureMap) -> StridedMap:
        """Returns one channel per filter, in the dtype of `x`."""
        shape = (self.size, self.size, x.shape[-1], self.filters)
        kernel = self.standardise(self.param("kernel", self.kernel_init, shape)).astype(x.dtype)
        kernel = gather(kernel, f"{self.name}/kernel", x.dtype)
        if self.stride > 1:
            x = before_strided_convolution(x, traced_device_kind())
        strides, layouts = (self.stride, self.stride), ("NHWC", "HWIO", "NHWC")
        padding = "SAME" if self.padding is None else ((self.padding, self.padding),) * 2
        x = jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=layouts)
        return constrain(x, DIMENSIONS)


def conv_norm(
    x: FeatureMap, filters: int, size: int, stride: int, suffix: str, epsilons: Epsilons, scale: float = 1.0
) -> StridedMap:
    """Returns `x` after the convolution `conv<suffix>` and the GroupNorm `norm<suffix>` of the calling module.

    `scale` is the initial scale of the norm.
    """
    x = StdConv(filters, size, stride, standardise=epsilons.standardise, name=f"conv{suffix}")(x)
    return group_norm(x, f"norm{suffix}", scale, epsilons.norm)


class Root(nn.Module):
    """A 7x7 convolution and 3x3 max pooling, each with stride 2."""

    width: int
    epsilons: Epsilons = EPSILONS["released"]

    @nn.compact
    def __call__(self, x: FeatureMap) -> StridedMap:
        """Returns `width` channels at a quarter of the rows and columns."""
        x = nn.relu(conv_norm(x, self.width, 7, 2, "", self.epsilons))
        return nn.max_pool(x, (3, 3), (2, 2), "SAME")


def convolve(x: FeatureMap, stride: int, epsilons: Epsilons) -> StridedMap:
    """Returns `x` after the 3x3 convolution of a unit, which has the stride, and its norm."""
    return conv_norm(x, x.shape[-1], 3, stride, "2", epsilons)


# (feature map, stride, epsilons) -> what a unit computes between its 1x1 convolutions, norm included: as many channels,
# 1 / stride of the rows and columns. The parameters are those of the unit's module.
Spatial: TypeAlias = Callable[[FeatureMap, int, Epsilons], StridedMap]


class SqueezeExcitation(nn.Module):
    """A factor for each channel of an image, sigmoid(W2 relu(W1 mean)) with biases (arXiv 1709.01507, equation 3)."""

    reduction: int  # channels to one hidden unit
    ops: PlainOps

    @nn.compact
    def __call__(self, x: FeatureMap) -> FeatureMap:
        """Returns `x` times the factors. `mean` is the mean of each channel over rows and columns."""
        channels = x.shape[-1]
        mean = x.mean((1, 2), dtype=jnp.float32).astype(x.dtype)
        hidden = nn.relu(Dense(channels // self.reduction, self.ops, name="reduce")(mean))
        factors = nn.sigmoid(Dense(channels, self.ops, name="expand")(hidden))
        return constrain(x * factors[:, None, None], DIMENSIONS)


def recalibrate(x: FeatureMap, reduction: int, ops: PlainOps) -> FeatureMap:
    """Returns `x` after squeeze-and-excitation, or unchanged if the reduction is 0."""
    return SqueezeExcitation(reduction, ops, name="squeeze")(x) if reduction else x


class Unit(nn.Module):
    """A residual bottleneck with the ReLU last: 1x1, 3x3 with the stride, 1x1 to four times the width."""

    width: int
    stride: int = 1
    epsilons: Epsilons = EPSILONS["released"]
    spatial: Spatial = convolve
    se_reduction: int = 0  # 0: no squeeze-and-excitation
    ops: PlainOps = PlainOps()

    @nn.compact
    def __call__(self, x: FeatureMap) -> StridedMap:
        """Returns `4 * width` channels."""
        residual, wide, epsilons = x, 4 * self.width, self.epsilons
        if self.stride > 1 or x.shape[-1] != wide:
            residual = conv_norm(x, wide, 1, self.stride, "_proj", epsilons)
        x = nn.relu(conv_norm(x, self.width, 1, 1, "1", epsilons))
        x = nn.relu(self.spatial(x, self.stride, epsilons))
        x = conv_norm(x, wide, 1, 1, "3", epsilons, scale=0.0)  # the unit starts as its residual
        return nn.relu(residual + recalibrate(x, self.se_reduction, self.ops))


class Stage(nn.Module):
    """Units of one width; the first has the stride."""

    units: int
    width: int
    stride: int
    unit: Callable[..., nn.Module] = Unit

    @nn.compact
    def __call__(self, x: FeatureMap) -> StridedMap:
        """Returns the last unit's output."""
        for index in range(self.units):
            x = self.unit(self.width, self.stride if index == 0 else 1, name=f"unit{index + 1}")(x)
        return x


class ResNet(nn.Module):
    """The root, then the stages. Each stage after the first halves the rows and columns and doubles the width."""

    stages: tuple[int, ...]  # units in each
    width: int  # of the root and of the first stage
    epsilons: str = "released"  # of EPSILONS

    @nn.compact
    def __call__(self, x: FeatureMap) -> tuple[StridedMap, dict[str, Array]]:
        """Returns the last stage's output, or the root's if there is none, in the dtype of `x`.

        Returns:
            x: this output.
            out: that of the root and of each stage: `root`, `stage1`, `stage2`, ....
        """
        epsilons = EPSILONS[self.epsilons]
        unit = functools.partial(Unit, epsilons=epsilons)
        x = Root(self.width, epsilons, name="root")(x)
        out = {"root": x}
        for stage, units in enumerate(self.stages):
            name = f"stage{stage + 1}"
            x = out[name] = Stage(units, self.width * 2**stage, 2 if stage else 1, unit, name=name)(x)
        return x, out
