"""The layers that the modules share: their parameters, and dropout."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.attention_extras import NormArrays
from vit_jax.models.operations import DenseArrays, PlainOps, Rows
from vit_jax.models.spec import BlockSpec, NormKind


class Dense(nn.Module):
    """A dense layer. Its name tells which dimensions the kernel has; see `sharding/tables.py`.

    Another module may take its `arrays` alone, for an operation that computes more than this layer.
    """

    features: int | tuple[int, ...]
    ops: PlainOps
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros
    inputs: tuple[int, ...] = ()  # of the kernel; (): the last dimension of `x`, otherwise perhaps several for it
    biased: tuple[int, ...] | None = None  # which of the first dimension of the features have a bias; None: all

    @nn.compact
    def arrays(self, inputs: tuple[int, ...] = ()) -> DenseArrays:
        """Returns the kernel [*inputs, *features] and the bias [*features]; `self.inputs`, if given, counts instead.

        The bias is 0 where there is none.
        """
        outputs = self.features if isinstance(self.features, tuple) else (self.features,)
        kernel = self.param("kernel", self.kernel_init, (*(self.inputs or inputs), *outputs))
        if self.biased is None:
            return kernel, self.param("bias", self.bias_init, outputs)
        bias = jnp.zeros(outputs)
        if self.biased:
            given = self.param("bias", self.bias_init, (len(self.biased), *outputs[1:]))
            bias = bias.at[jnp.array(self.biased)].set(given)
        return kernel, bias

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "..."]:
        """Returns `x @ kernel + bias`, [*rows, *features], in the dtype of `x`."""
        kernel, bias = self.arrays(x.shape[-1:])
        return self.ops.dense(x, kernel, bias, self.name)


def classifier(num_classes: int, std: float, bias: float, name: str, ops: PlainOps) -> Dense:
    """Returns the last layer of a model, in float32.

    Args:
        num_classes: the number of logits.
        std: the standard deviation of the initial kernel; 0: the kernel starts at zero.
        bias: the initial value of the bias.
        name: the name of the layer.
        ops: the operations.
    """
    kernel_init = nn.initializers.normal(std) if std else nn.initializers.zeros
    return Dense(num_classes, ops, kernel_init, nn.initializers.constant(bias), name=name)


class LayerNorm(nn.Module):
    """LayerNorm over the last dimension. Another module may take its `arrays` alone, as those of `Dense`."""

    epsilon: float
    ops: PlainOps

    @nn.compact
    def arrays(self, channels: int) -> NormArrays:
        """Returns scale and bias."""
        scale = self.param("scale", nn.initializers.ones, (channels,))
        return scale, self.param("bias", nn.initializers.zeros, (channels,))

    def __call__(self, x: Rows) -> Rows:
        """Returns the normalised, scaled and shifted rows in the dtype of `x`."""
        scale, bias = self.arrays(x.shape[-1])
        return self.ops.norm(x, scale, bias, self.epsilon)


class RmsNorm(LayerNorm):
    """A norm without mean and bias over the last dimension, see `operations.rms_norm`."""

    @nn.compact
    def arrays(self, channels: int) -> NormArrays:
        """Returns the scale, and None for the bias."""
        return self.param("scale", nn.initializers.ones, (channels,)), None


NORMS: dict[NormKind, type[LayerNorm]] = {"layer": LayerNorm, "rms": RmsNorm}


def norm_of(block: BlockSpec, ops: PlainOps, name: str) -> LayerNorm:
    """Returns a norm of a model, the submodule `name` of the calling module."""
    return NORMS[block.norm](block.norm_epsilon, ops, name=name)


def dropout(module: nn.Module, x: Rows, ops: PlainOps) -> Rows:
    """Returns `x` after dropout at the rate of the module's spec, if the module has a `dropout` random stream.

    The mask is drawn for the tokens of all images, so that it depends neither on the devices nor on the rows.
    """
    keep = 1.0 - module.spec.block.dropout_rate
    if keep == 1.0 or not module.has_rng("dropout"):
        return x
    kept = ops.per_token(x, lambda shape: jax.random.bernoulli(module.make_rng("dropout"), keep, shape))
    return jnp.where(kept, x / keep, jnp.zeros_like(x))
