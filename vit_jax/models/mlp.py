"""The MLP of a block (section 3.1, appendix B.1)."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
from flax.linen.initializers import xavier_uniform
from jaxtyping import Array, Float

from vit_jax.models.layers import Dense, dropout, norm_of
from vit_jax.models.norms import Rows
from vit_jax.models.operations import DenseArrays, PlainOps
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


def quick_gelu(ops: PlainOps, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns x · sigmoid(1.702 x), the approximate GELU of OpenAI's CLIP (arXiv 1606.08415, section 2)."""
    return x * nn.sigmoid(1.702 * x)


ACTIVATIONS: dict[Activation, Widening] = {
    "gelu_tanh": Widening(lambda ops, x: ops.gelu(x)),  # as published
    "gelu": Widening(lambda ops, x: nn.gelu(x, approximate=False)),
    "quick_gelu": Widening(quick_gelu),
    "swiglu": Widening(swiglu, "dense1_gated", (2,)),
}


class Mlp(nn.Module):
    """Dense, activation, dense; dropout after both dense layers. With `mlp_norm`, a norm of the hidden channels
    precedes the second one (EVA-02, arXiv 2303.11331).
    """

    spec: ModelSpec
    ops: PlainOps

    def setup(self) -> None:
        """Declares the parameters of both layers."""
        spec, ops, first = self.spec, self.ops, ACTIVATIONS[self.spec.block.activation]
        hidden, bias_init = (*first.parts, spec.mlp_dim), nn.initializers.normal(1e-6)
        biased = None if spec.block.dense_bias else ()
        self.first = Dense(hidden, ops, first.kernel_init, bias_init, (spec.width,), biased, name=first.name)
        if spec.block.mlp_norm:
            self.hidden_norm = norm_of(spec.block, ops, "hidden_norm")
        self.second = Dense(spec.width, ops, xavier_uniform(), bias_init, (spec.mlp_dim,), biased, name="dense2")

    def arrays(self) -> tuple[DenseArrays, DenseArrays]:
        """Returns kernel and bias of each layer."""
        return self.first.arrays(), self.second.arrays()

    def __call__(self, x: Rows) -> Rows:
        """Returns rows of the same width."""
        ops, first = self.ops, ACTIVATIONS[self.spec.block.activation]
        (kernel1, bias1), (kernel2, bias2) = self.arrays()
        hidden = ops.widen(x, kernel1, bias1, first.name, functools.partial(first.activate, ops))
        hidden = dropout(self, hidden, ops)
        if self.spec.block.mlp_norm:
            hidden = self.hidden_norm(hidden)
        return dropout(self, ops.narrow(hidden, kernel2, bias2), ops)
