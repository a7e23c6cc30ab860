"""The MLP of a block, whose two dense layers have implementations with one signature."""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import flax.linen as nn
from flax.linen.initializers import xavier_uniform
from jaxtyping import Array, Float

from vit_jax.kernels import Packing
from vit_jax.models.layers import DenseParameters, Rows, add_bias, dense, dropout, narrowing_product, product
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
        return xavier_uniform(0, -1, batch_axis=tuple(range(1, 1 + len(self.parts))))


def swiglu(x: Float[Array, "rows 2 mlp"]) -> Hidden:
    """Returns x₁ · sigmoid(x₁) · x₂ of two projections (arXiv 2002.05202, equation 6)."""
    return nn.silu(x[:, 0]) * x[:, 1]


ACTIVATIONS: dict[Activation, Widening] = {
    "gelu_tanh": Widening(functools.partial(nn.gelu, approximate=True)),  # as published
    "gelu": Widening(functools.partial(nn.gelu, approximate=False)),
    "swiglu": Widening(swiglu, "dense1_gated", (2,)),
}


Layers: TypeAlias = tuple[Callable[..., Hidden], Callable[..., Rows]]  # (x, kernel, bias) -> result, of both layers


def by_compiler(first: Widening) -> Layers:
    """Returns both dense layers, the first with its activation. The compiler chooses the communication."""

    def widen(x: Rows, kernel: Float[Array, "..."], bias: Float[Array, "..."]) -> Hidden:
        return constrain(first.activate(dense(x, kernel, bias, first.name)), HIDDEN)

    def narrow(hidden: Hidden, kernel: Float[Array, "mlp width"], bias: Float[Array, " width"]) -> Rows:
        return dense(hidden, kernel, bias, "dense2", narrowing_product)

    return widen, narrow


def by_device(first: Widening) -> Layers:
    """Returns both dense layers with explicit communication: the kernels are gathered, the partial outputs summed."""

    def widen(x: Rows, kernel: Float[Array, "..."], bias: Float[Array, "..."]) -> Hidden:
        return first.activate(add_bias(product(x, kernel), bias))

    def narrow(hidden: Hidden, kernel: Float[Array, "mlp width"], bias: Float[Array, " width"]) -> Rows:
        return add_bias(sum_over("mlp", product(hidden, kernel)), bias)

    return (
        per_device(widen, (ROWS,), (f"{first.name}/kernel", f"{first.name}/bias"), HIDDEN),
        per_device(narrow, (HIDDEN,), ("dense2/kernel", "dense2/bias"), ROWS),
    )


MLPS: dict[MlpKind, Callable[[Widening], Layers]] = {"jit": by_compiler, "shard_map": by_device}


class Mlp(nn.Module):
    """Dense, activation, dense; dropout after both dense layers (section 3.1, appendix B.1)."""

    spec: ModelSpec
    packing: Packing  # of the rows

    @nn.compact
    def __call__(self, x: Rows) -> Rows:
        """Returns rows of the same width."""
        spec, first = self.spec, ACTIVATIONS[self.spec.block.activation]
        width, mlp_dim, dtype = (spec.width,), (*first.parts, spec.mlp_dim), spec.kernel_dtype
        dense1 = DenseParameters(width, mlp_dim, dtype, first.kernel_init, bias_init, name=first.name)
        dense2 = DenseParameters(mlp_dim[-1:], width, dtype, xavier_uniform(), bias_init, name="dense2")
        widen, narrow = MLPS[spec.block.mlp](first)
        # Dropout is drawn for the whole batch, so that it does not depend on the devices.
        x = dropout(self, widen(x, *dense1()), self.packing)
        return dropout(self, narrow(x, *dense2()), self.packing)
