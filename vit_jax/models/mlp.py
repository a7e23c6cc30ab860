"""The MLP of a block (section 3.1, appendix B.1)."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
from flax.linen.initializers import xavier_uniform
from jaxtyping import Array, Float

from vit_jax.models.layers import DenseParameters, dropout
from vit_jax.models.operations import PlainOps, Rows
from vit_jax.models.spec import Activation, ModelSpec


class Widening(NamedTuple):
    """The first dense layer of an MLP and the activation of its result."""

    activate: Callable[[PlainOps, Float[Array, "..."]], Float[Array, "..."]]
    name: str = "dense1"  # of the layer
    parts: tuple[int, ...] = ()  # (projections,), an axis before the hidden channels; (): a single one, no axis

    @property
    def kernel_init(self) -> nn.initializers.Initializer:
        """The initializer of the kernel. It draws each projection with the fans of that projection."""
        return xavier_uniform(0, -1, batch_axis=tuple(range(1, 1 + len(self.parts))))


def swiglu(ops: PlainOps, x: Float[Array, "*rows 2 mlp"]) -> Float[Array, "*rows mlp"]:
    """Returns x₁ · sigmoid(x₁) · x₂ of two projections (arXiv 2002.05202, equation 6)."""
    return nn.silu(x[..., 0, :]) * x[..., 1, :]


ACTIVATIONS: dict[Activation, Widening] = {
    "gelu_tanh": Widening(lambda ops, x: ops.gelu(x)),  # as published
    "gelu": Widening(lambda ops, x: nn.gelu(x, approximate=False)),
    "swiglu": Widening(swiglu, "dense1_gated", (2,)),
}


class Mlp(nn.Module):
    """Dense, activation, dense; dropout after both dense layers."""

    spec: ModelSpec
    ops: PlainOps

    def setup(self) -> None:
        """Declares the parameters of both layers."""
        spec, first, bias_init = self.spec, ACTIVATIONS[self.spec.block.activation], nn.initializers.normal(1e-6)
        hidden = (*first.parts, spec.mlp_dim)
        self.first = DenseParameters((spec.width,), hidden, first.kernel_init, bias_init, name=first.name)
        self.second = DenseParameters((spec.mlp_dim,), (spec.width,), xavier_uniform(), bias_init, name="dense2")

    def __call__(self, x: Rows) -> Rows:
        """Returns rows of the same width."""
        ops, first = self.ops, ACTIVATIONS[self.spec.block.activation]
        kernel, bias = self.first()
        hidden = ops.widen(x, kernel, bias, first.name, functools.partial(first.activate, ops))
        hidden = dropout(self, hidden, ops)
        kernel, bias = self.second()
        return dropout(self, ops.narrow(hidden, kernel, bias), ops)
