"""The MLP of a block: implementations with one signature."""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import flax.linen as nn
from jaxtyping import Array, Float

from vit_jax.kernels import Packing
from vit_jax.models.layers import Dense, Rows, add_bias, dropout, narrowing_product, product
from vit_jax.models.part_specs import Activation, MlpKind
from vit_jax.models.spec import ModelSpec
from vit_jax.sharding import constrain, per_device, sum_over

Hidden: TypeAlias = Float[Array, "rows mlp"]

bias_init = nn.initializers.normal(1e-6)

ROWS, HIDDEN = ("batch", "width"), ("batch", "mlp")  # names of the dimensions of the activations


class Widening(NamedTuple):
    """The first dense layer of an MLP and the activation of its result."""

    activate: Callable[[Float[Array, "..."]], Hidden]
    name: str = "dense1"  # of the layer
    parts: tuple[int, ...] = ()  # (projections,), an axis before the hidden channels; (): a single one, no axis

    @property
    def kernel_init(self) -> nn.initializers.Initializer:
        """The initializer of the kernel. It draws each projection with the fans of that projection."""
        return nn.initializers.xavier_uniform(0, -1, batch_axis=tuple(range(1, 1 + len(self.parts))))


def swiglu(x: Float[Array, "rows 2 mlp"]) -> Hidden:
    """Returns x₁ · sigmoid(x₁) · x₂ of two projections (arXiv 2002.05202, equation 6)."""
    return nn.silu(x[:, 0]) * x[:, 1]


ACTIVATIONS: dict[Activation, Widening] = {
    "gelu_tanh": Widening(functools.partial(nn.gelu, approximate=True)),  # as published
    "gelu": Widening(functools.partial(nn.gelu, approximate=False)),
    "swiglu": Widening(swiglu, "dense1_gated", (2,)),
}


class Mlp(nn.Module):
    """Dense, activation, dense; dropout after both dense layers (section 3.1, appendix B.1)."""

    spec: ModelSpec
    packing: Packing  # of the rows

    @nn.compact
    def __call__(self, x: Rows) -> Rows:
        """Returns rows of the same width."""
        spec, first = self.spec, ACTIVATIONS[self.spec.block.activation]
        inits = (first.kernel_init, bias_init)
        dense1 = Dense((*first.parts, spec.mlp_dim), spec.kernel_dtype, *inits, name=first.name)
        inits = (nn.initializers.xavier_uniform(), bias_init)
        dense2 = Dense(spec.width, spec.kernel_dtype, *inits, multiply=narrowing_product, name="dense2")
        hidden = constrain(first.activate(dense1(x)), HIDDEN)
        return dropout(self, dense2(dropout(self, hidden, self.packing)), self.packing)


class ShardMapMlp(nn.Module):
    """`Mlp` with explicit communication: the kernels are gathered, and the partial outputs summed."""

    spec: ModelSpec
    packing: Packing  # of the rows

    @nn.compact
    def __call__(self, x: Rows) -> Rows:
        """Returns rows of the same width."""
        spec, first = self.spec, ACTIVATIONS[self.spec.block.activation]
        shape, kernel_dtype = (spec.width, *first.parts, spec.mlp_dim), spec.kernel_dtype
        dense1 = DenseParameters(shape, kernel_dtype, first.kernel_init, name=first.name)()
        dense2 = DenseParameters((spec.mlp_dim, spec.width), kernel_dtype, name="dense2")()

        def widen_part(x: Rows, kernel: Float[Array, "..."], bias: Float[Array, "..."]) -> Hidden:
            return first.activate(add_bias(product(x, kernel), bias))

        widen = per_device(widen_part, (ROWS,), (f"{first.name}/kernel", f"{first.name}/bias"), HIDDEN)
        narrow = per_device(_narrow, (HIDDEN,), ("dense2/kernel", "dense2/bias"), ROWS)
        # Dropout is drawn for the whole batch, so that it does not depend on the devices.
        hidden = dropout(self, widen(x, *dense1), self.packing)
        return dropout(self, narrow(hidden, *dense2), self.packing)


class DenseParameters(nn.Module):
    """The parameters of a dense layer."""

    shape: tuple[int, ...]
    kernel_dtype: str  # of the gradient
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()
    bias_init: nn.initializers.Initializer = bias_init

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "inputs ..."], Float[Array, "..."]]:
        """Returns the kernel and the bias."""
        kernel = self.param("kernel", self.kernel_init, self.shape)
        bias = self.param("bias", self.bias_init, self.shape[1:])
        return kernel.astype(self.kernel_dtype), bias


def _narrow(hidden: Hidden, kernel: Float[Array, "mlp width"], bias: Float[Array, " width"]) -> Rows:
    return add_bias(sum_over("mlp", product(hidden, kernel)), bias)


MLPS: dict[MlpKind, type[nn.Module]] = {"jit": Mlp, "shard_map": ShardMapMlp}
