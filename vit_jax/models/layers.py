"""The layers that the modules share: their parameters, and dropout."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.norms import NORMS, NormParameters, Rows
from vit_jax.models.operations import DenseArrays, PlainOps
from vit_jax.models.spec import BlockSpec, NormKind


class Dense(nn.Module):
    """A dense layer. Its name tells which dimensions the kernel has; see `sharding/axis_rules.py`.

    Another module may take its `arrays` alone, for an operation that computes more than this layer.
    """

    features: int | tuple[int, ...]
    ops: PlainOps
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros
    # The input dimensions of the kernel, whose product is the last dimension of `x`; (): that dimension itself.
    inputs: tuple[int, ...] = ()
    # Which indices of the first dimension of the features have a bias; None: all.
    biased: tuple[int, ...] | None = None

    @nn.compact
    def arrays(self, inputs: tuple[int, ...] = ()) -> DenseArrays:
        """Returns the kernel [*inputs, *features] and the bias [*features], which is 0 where there is none.

        The field `inputs`, if it is given, replaces the argument.
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


class Norm(nn.Module):
    """A norm over the last dimension. Another module may take its `parameters` alone, as the arrays of `Dense`."""

    kind: NormKind
    epsilon: float
    ops: PlainOps

    @nn.compact
    def parameters(self, channels: int) -> NormParameters:
        """Returns what the norm is made of."""
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,)) if NORMS[self.kind].has_bias else None
        return NormParameters(self.kind, scale, bias, self.epsilon)

    def __call__(self, x: Rows) -> Rows:
        """Returns the normalised rows in the dtype of `x`."""
        return self.ops.norm(x, self.parameters(x.shape[-1]))


def norm_of(block: BlockSpec, ops: PlainOps, name: str) -> Norm:
    """Returns a norm of a model, the submodule `name` of the calling module."""
    return Norm(block.norm, block.norm_epsilon, ops, name=name)


def dropout(module: nn.Module, x: Rows, ops: PlainOps) -> Rows:
    """Returns `x` after dropout at the rate of the module's spec, if the module has a `dropout` random stream.

    The mask is drawn for the tokens of all images, so that it depends neither on the devices nor on the rows.
    """
    keep = 1.0 - module.spec.block.dropout_rate
    if keep == 1.0 or not module.has_rng("dropout"):
        return x
    kept = ops.per_token(x, lambda shape: jax.random.bernoulli(module.make_rng("dropout"), keep, shape))
    return jnp.where(kept, x / keep, jnp.zeros_like(x))
