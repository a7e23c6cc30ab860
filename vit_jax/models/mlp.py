"""The MLP of a block: implementations with one signature, and what they share with the other layers."""

from typing import TypeAlias

import flax.linen as nn
from jaxtyping import Array, Float

from vit_jax.models.layers import Dense, narrow
from vit_jax.models.spec import ModelSpec
from vit_jax.sharding import constrain, per_device, sum_over

Tokens: TypeAlias = Float[Array, "batch tokens width"]
Hidden: TypeAlias = Float[Array, "batch tokens mlp"]

kernel_init = nn.initializers.xavier_uniform
bias_init = nn.initializers.normal(1e-6)

# The dimensions of what the layers take and have.
TOKENS, HIDDEN = ("batch", "tokens", "width"), ("batch", "tokens", "mlp")
WIDENING, NARROWING = ("width", "mlp"), ("mlp", "width")


class Mlp(nn.Module):
    """Dense, GELU by tanh, dense; dropout after both (section 3.1, appendix B.1)."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Tokens) -> Tokens:
        """Returns tokens of the same width."""
        spec = self.spec
        inits = (kernel_init(), bias_init)
        dense1 = Dense(spec.mlp_dim, WIDENING, spec.dtype, *inits, name="dense1")
        dense2 = Dense(spec.width, NARROWING, spec.dtype, *inits, matmul=narrow, name="dense2")
        hidden = constrain(nn.gelu(dense1(x), approximate=True), HIDDEN)
        return dropout(self, dense2(dropout(self, hidden)))


class ShardMapMlp(nn.Module):
    """The same, its exchanges between devices written out: kernels are gathered, and the parts of the output summed."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: Tokens) -> Tokens:
        """Returns tokens of the same width."""
        spec = self.spec
        dense1 = Weights((spec.width, spec.mlp_dim), spec.dtype, name="dense1")()
        dense2 = Weights((spec.mlp_dim, spec.width), spec.dtype, name="dense2")()
        widened = per_device(_widened, (TOKENS,), (WIDENING, WIDENING[1:]), HIDDEN)
        narrowed = per_device(_narrowed, (HIDDEN,), (NARROWING, NARROWING[1:]), TOKENS)
        # Dropout is drawn for the whole batch, so that it does not depend on the devices.
        return dropout(self, narrowed(dropout(self, widened(x, *dense1)), *dense2))


class Weights(nn.Module):
    """The parameters of a dense layer."""

    shape: tuple[int, int]
    dtype: str

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "inputs features"], Float[Array, " features"]]:
        """Returns the kernel and the bias."""
        kernel = self.param("kernel", kernel_init(), self.shape)
        bias = self.param("bias", bias_init, self.shape[1:])
        return kernel.astype(self.dtype), bias.astype(self.dtype)


def _widened(x: Tokens, kernel: Float[Array, "width mlp"], bias: Float[Array, " mlp"]) -> Hidden:
    return nn.gelu(x @ kernel + bias, approximate=True)


def _narrowed(hidden: Hidden, kernel: Float[Array, "mlp width"], bias: Float[Array, " width"]) -> Tokens:
    return sum_over("mlp", hidden @ kernel) + bias


MLPS: dict[str, type[nn.Module]] = {"jit": Mlp, "shard_map": ShardMapMlp}


def dropout(module: nn.Module, x: Tokens) -> Tokens:
    """Returns `x` after dropout at the spec's rate, if the module has a `dropout` random stream."""
    return nn.Dropout(module.spec.dropout_rate, deterministic=not module.has_rng("dropout"))(x)
