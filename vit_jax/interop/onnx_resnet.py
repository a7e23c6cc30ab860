"""The ResNets of hybrids and BiT in an ONNX graph, whose convolutions have the channels before rows and columns.

The functions follow those of `models.resnet` and `models.bit`. Weights are standardised here, once.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from vit_jax.interop.onnx_builder import Arrays, Graph, Value
from vit_jax.models import BitSpec, ModelSpec, bit, resnet

GROUPS = 32
Standardise = Callable[[np.ndarray], np.ndarray]


class Map(NamedTuple):
    """A feature map: a value [batch, channels, rows, columns] of the graph, and its sizes."""

    value: Value
    channels: int
    rows: int
    columns: int

    @classmethod
    def of_images(cls, g: Graph, images: Value, size: tuple[int, int]) -> "Map":
        """Returns images [batch, height, width, 3] as a map."""
        return cls(g.Transpose(images, perm=[0, 3, 1, 2]), 3, *size)

    def relu(self, g: Graph) -> "Map":
        """Returns the map after ReLU."""
        return self._replace(value=g.Relu(self.value))


def same_padding(length: int, size: int, stride: int) -> tuple[int, int]:
    """Returns the zeros before and after, the fewest with which ceil(length / stride) places remain."""
    total = max((-(-length // stride) - 1) * stride + size - length, 0)
    return total // 2, total - total // 2


def sides(x: Map, size: int, stride: int, padding: int | None) -> tuple[list[int], int, int]:
    """Returns ONNX's `pads` of a window, and the rows and columns that it leaves.

    Args:
        x: the map that the window moves over.
        size: rows and columns of the window.
        stride: of the window.
        padding: zeros on each side; None: see `same_padding`.
    """
    pads = [
        (padding, padding) if padding is not None else same_padding(length, size, stride)
        for length in (x.rows, x.columns)
    ]
    left = [(length + sum(pad) - size) // stride + 1 for length, pad in zip((x.rows, x.columns), pads, strict=True)]
    return [pads[0][0], pads[1][0], pads[0][1], pads[1][1]], left[0], left[1]


def conv(
    g: Graph, x: Map, kernel: np.ndarray, standardise: Standardise, stride: int = 1, padding: int | None = None
) -> Map:
    """Returns a map after `StdConv`."""
    size, filters = kernel.shape[0], kernel.shape[3]
    weights = np.asarray(standardise(jnp.asarray(kernel))).transpose(3, 2, 0, 1)
    pads, rows, columns = sides(x, size, stride, padding)
    value = g.Conv(x.value, weights, kernel_shape=[size, size], strides=[stride, stride], pads=pads)
    return Map(value, filters, rows, columns)


def max_pool(g: Graph, x: Map, padding: int | None) -> Map:
    """Returns a map after 3x3 max pooling with stride 2, which ignores what is padded."""
    pads, rows, columns = sides(x, 3, 2, padding)
    value = g.MaxPool(x.value, kernel_shape=[3, 3], strides=[2, 2], pads=pads)
    return Map(value, x.channels, rows, columns)


def group_norm(g: Graph, x: Map, arrays: Arrays, epsilon: float) -> Map:
    """Returns a map after GroupNorm; a group is an instance of `InstanceNormalization`."""
    groups = g.reshape(x.value, 0, GROUPS, -1)
    value = g.InstanceNormalization(groups, np.ones(GROUPS), np.zeros(GROUPS), epsilon=epsilon)
    value = g.reshape(value, 0, x.channels, x.rows, x.columns)
    scale, bias = (arrays[name].reshape(-1, 1, 1) for name in ("scale", "bias"))
    return x._replace(value=g.Add(g.Mul(value, scale), bias))


def recalibrate(g: Graph, x: Map, arrays: Arrays) -> Map:
    """Returns a map after squeeze-and-excitation, or unchanged if the unit has none."""
    if "squeeze" not in arrays:
        return x
    first, second = arrays["squeeze"]["reduce"], arrays["squeeze"]["expand"]
    mean = g.ReduceMean(x.value, np.array([2, 3]), keepdims=0)
    hidden = g.Relu(g.dense(mean, first["kernel"], first["bias"]))
    factors = g.Sigmoid(g.dense(hidden, second["kernel"], second["bias"]))
    return x._replace(value=g.Mul(x.value, g.reshape(factors, 0, x.channels, 1, 1)))


def add_residual(g: Graph, x: Map, residual: Map) -> Map:
    """Returns the sum of two maps."""
    return x._replace(value=g.Add(residual.value, x.value))


class PostActivation(NamedTuple):
    """The root and the units of hybrids."""

    standardise: Standardise
    epsilon: float  # of the norms

    def conv_norm(self, g: Graph, x: Map, arrays: Arrays, suffix: str, stride: int = 1) -> Map:
        """Returns a map after a convolution and its norm."""
        x = conv(g, x, arrays[f"conv{suffix}"]["kernel"], self.standardise, stride)
        return group_norm(g, x, arrays[f"norm{suffix}"], self.epsilon)

    def root(self, g: Graph, x: Map, arrays: Arrays) -> Map:
        """Returns images after the root."""
        return max_pool(g, self.conv_norm(g, x, arrays, "", 2).relu(g), None)

    def unit(self, g: Graph, x: Map, arrays: Arrays, stride: int) -> Map:
        """Returns a map after a unit."""
        residual = self.conv_norm(g, x, arrays, "_proj", stride) if "conv_proj" in arrays else x
        x = self.conv_norm(g, x, arrays, "1").relu(g)
        x = self.conv_norm(g, x, arrays, "2", stride).relu(g)
        x = recalibrate(g, self.conv_norm(g, x, arrays, "3"), arrays)
        return add_residual(g, x, residual).relu(g)


class PreActivation(NamedTuple):
    """The root and the units of BiT as released."""

    border: float  # of the map that is pooled

    def conv(self, g: Graph, x: Map, arrays: Arrays, stride: int = 1) -> Map:
        """Returns a map after a convolution, padded by half of its kernel on each side."""
        return conv(g, x, arrays["kernel"], bit.standardise, stride, arrays["kernel"].shape[0] // 2)

    def norm(self, g: Graph, x: Map, arrays: Arrays) -> Map:
        """Returns a map after norm and ReLU."""
        return group_norm(g, x, arrays, bit.NORM_EPSILON).relu(g)

    def root(self, g: Graph, x: Map, arrays: Arrays) -> Map:
        """Returns images after the root."""
        x = self.conv(g, x, arrays["conv"], 2)
        if self.border == -np.inf:
            return max_pool(g, x, 1)
        padded = g.Pad(x.value, np.array([0, 0, 1, 1, 0, 0, 1, 1]), np.array(self.border, np.float32))
        return max_pool(g, Map(padded, x.channels, x.rows + 2, x.columns + 2), 0)

    def unit(self, g: Graph, x: Map, arrays: Arrays, stride: int) -> Map:
        """Returns a map after a unit."""
        residual = x
        x = self.norm(g, x, arrays["norm1"])
        if "conv_proj" in arrays:
            residual = self.conv(g, x, arrays["conv_proj"], stride)
        x = self.norm(g, self.conv(g, x, arrays["conv1"]), arrays["norm2"])
        x = self.norm(g, self.conv(g, x, arrays["conv2"], stride), arrays["norm3"])
        return add_residual(g, recalibrate(g, self.conv(g, x, arrays["conv3"]), arrays), residual)


def stages(g: Graph, form: PostActivation | PreActivation, arrays: Arrays, units: tuple[int, ...], x: Map) -> Map:
    """Returns images after the root and all stages."""
    x = form.root(g, x, arrays["root"])
    for stage, count in enumerate(units):
        for number in range(count):
            unit = arrays[f"stage{stage + 1}"][f"unit{number + 1}"]
            x = form.unit(g, x, unit, 2 if stage and not number else 1)
    return x


def resnet_stem(g: Graph, spec: ModelSpec, arrays: Arrays, images: Value) -> Value:
    """Returns the feature map [batch, rows, columns, channels] of a hybrid's stem."""
    form = PostActivation(*resnet.EPSILONS[spec.stem.epsilons])
    x = stages(g, form, arrays, spec.stem.stages, Map.of_images(g, images, spec.position.image_size))
    return g.Transpose(x.value, perm=[0, 2, 3, 1])


def bit_features(g: Graph, spec: BitSpec, arrays: Arrays, images: Value) -> Value:
    """Returns the pooled features [batch, width] of a BiT: the mean over the feature map."""
    x = Map.of_images(g, images, spec.image_size)
    if spec.unit == "post_activation":
        x = stages(g, PostActivation(*resnet.EPSILONS["released"]), arrays, spec.stages, x)
    else:
        form = PreActivation(bit.BORDERS[spec.border])
        x = form.norm(g, stages(g, form, arrays, spec.stages, x), arrays["norm"])
    return g.ReduceMean(x.value, np.array([2, 3]), keepdims=0)
