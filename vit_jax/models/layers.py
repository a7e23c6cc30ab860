"""The layers that the modules share: their parameters, and dropout."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.attention_extras import NormArrays
from vit_jax.models.operations import DenseArrays, PlainOps, Rows


class DenseParameters(nn.Module):
    """The parameters of a dense layer."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros

    @nn.compact
    def __call__(self) -> DenseArrays:
        """Returns the kernel [*inputs, *outputs] and the bias [*outputs]."""
        kernel = self.param("kernel", self.kernel_init, (*self.inputs, *self.outputs))
        return kernel, self.param("bias", self.bias_init, self.outputs)


class Dense(nn.Module):
    """A dense layer. Its name tells which dimensions the kernel has; see `sharding/tables.py`."""

    features: int | tuple[int, ...]
    ops: PlainOps
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros
    inputs: tuple[int, ...] = ()  # of the kernel, if it has several dimensions for the last one of `x`

    @nn.compact
    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "..."]:
        """Returns `x @ kernel + bias`, [*rows, *features], in the dtype of `x`."""
        outputs = self.features if isinstance(self.features, tuple) else (self.features,)
        kernel = self.param("kernel", self.kernel_init, (*(self.inputs or x.shape[-1:]), *outputs))
        return self.ops.dense(x, kernel, self.param("bias", self.bias_init, outputs), self.name)


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


class NormParameters(nn.Module):
    """The parameters of a LayerNorm."""

    channels: int

    @nn.compact
    def __call__(self) -> NormArrays:
        """Returns scale and bias."""
        scale = self.param("scale", nn.initializers.ones, (self.channels,))
        return scale, self.param("bias", nn.initializers.zeros, (self.channels,))


class LayerNorm(nn.Module):
    """LayerNorm over the width."""

    epsilon: float
    ops: PlainOps

    @nn.compact
    def __call__(self, x: Rows) -> Rows:
        """Returns the normalised, scaled and shifted rows in the dtype of `x`."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        return self.ops.norm(x, scale, self.param("bias", nn.initializers.zeros, x.shape[-1:]), self.epsilon)


def dropout(module: nn.Module, x: Rows, ops: PlainOps) -> Rows:
    """Returns `x` after dropout at the rate of the module's spec, if the module has a `dropout` random stream.

    The mask is drawn for the tokens of all images, so that it depends neither on the devices nor on the rows.
    """
    keep = 1.0 - module.spec.block.dropout_rate
    if keep == 1.0 or not module.has_rng("dropout"):
        return x
    kept = ops.per_token(x, lambda shape: jax.random.bernoulli(module.make_rng("dropout"), keep, shape))
    return jnp.where(kept, x / keep, jnp.zeros_like(x))
