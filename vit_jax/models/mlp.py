"""The MLP of a block, whose two dense layers have implementations with one signature."""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.initializers import xavier_uniform
from jaxtyping import Array, Float

from vit_jax.kernels import Packing, fused_mlp, gelu_tanh
from vit_jax.models.attention_choice import choose_division
from vit_jax.models.layers import (
    DenseParameters,
    NormArrays,
    Rows,
    add_bias,
    dense,
    dropout,
    narrowing_product,
    product,
)
from vit_jax.models.part_specs import Activation, MlpKind
from vit_jax.models.spec import ModelSpec
from vit_jax.sharding import constrain, local_size, per_device, sum_over, traced_device_kind

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
    "gelu_tanh": Widening(gelu_tanh),  # as published
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


# Blocks that do not allow the kernel of `fused` get both layers by the compiler.
MLPS: dict[MlpKind, Callable[[Widening], Layers]] = {
    "auto": by_compiler,
    "jit": by_compiler,
    "shard_map": by_device,
    "fused": by_compiler,
}


def _declare_layers(spec: ModelSpec, first: Widening) -> tuple[DenseParameters, DenseParameters]:
    """Returns the modules that hold the parameters of both dense layers, inside the module that calls this function."""
    width, mlp_dim, dtype = (spec.width,), (*first.parts, spec.mlp_dim), spec.kernel_dtype
    dense1 = DenseParameters(width, mlp_dim, dtype, first.kernel_init, bias_init, name=first.name)
    return dense1, DenseParameters(mlp_dim[-1:], width, dtype, xavier_uniform(), bias_init, name="dense2")


class Mlp(nn.Module):
    """Dense, activation, dense; dropout after both dense layers (section 3.1, appendix B.1)."""

    spec: ModelSpec
    packing: Packing  # of the rows

    @nn.compact
    def __call__(self, x: Rows) -> Rows:
        """Returns rows of the same width."""
        first = ACTIVATIONS[self.spec.block.activation]
        dense1, dense2 = _declare_layers(self.spec, first)
        widen, narrow = MLPS[self.spec.block.mlp](first)
        # Dropout is drawn for the whole batch, so that it does not depend on the devices.
        x = dropout(self, widen(x, *dense1()), self.packing)
        return dropout(self, narrow(x, *dense2()), self.packing)


def is_fused(spec: ModelSpec) -> bool:
    """Returns whether `FusedMlp` computes the MLPs of a model, on the mesh for which the model is traced."""
    whole = local_size("mlp", spec.mlp_dim) == spec.mlp_dim
    return spec.block.mlp == "fused" and spec.block.allows_fused_mlp and whole


class FusedMlp(nn.Module):
    """The MLP with the LayerNorm before it and the residual around it, in one TPU kernel. Its parameters are those of
    `Mlp`.
    """

    spec: ModelSpec
    packing: Packing  # of the rows

    @nn.compact
    def __call__(self, x: Rows, norm: NormArrays) -> Rows:
        """Returns x + MLP(LayerNorm(x)), given the parameters of the LayerNorm."""
        dense1, dense2 = _declare_layers(self.spec, ACTIVATIONS["gelu_tanh"])
        (kernel1, bias1), (kernel2, bias2) = dense1(), dense2()

        def run(x: Rows, vectors: Float[Array, "3 width"], kernel1: Array, bias1: Array, kernel2: Array) -> Rows:
            memory = choose_division(traced_device_kind()).memory
            y = fused_mlp(x, vectors[:2], kernel1, bias1, kernel2, vectors[2], self.spec.block.norm_epsilon, memory)
            return sum_over("mlp", y)  # one device has all hidden channels, see `is_fused`: the sum states it

        # Vectors of the width are passed like rows, so that they are not rounded where they are gathered.
        names = "dense1/kernel", "dense1/bias", "dense2/kernel"
        run = per_device(run, (ROWS, ("norms", "channels")), names, ROWS, self.packing.rows)
        return run(x, jnp.stack([*norm, bias2]), kernel1, bias1, kernel2)
