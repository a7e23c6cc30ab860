"""The MLP of a block: implementations with one signature."""

from typing import TypeAlias

import flax.linen as nn
from jaxtyping import Array, Float

from vit_jax.kernels import Packing
from vit_jax.models.layers import Dense, Rows, add_bias, dropout, narrowing_product, product
from vit_jax.models.spec import MlpKind, ModelSpec
from vit_jax.sharding import constrain, per_device, sum_over

Hidden: TypeAlias = Float[Array, "rows mlp"]

kernel_init = nn.initializers.xavier_uniform()
bias_init = nn.initializers.normal(1e-6)

# Names of the dimensions of the activations and of the kernels.
ROWS, HIDDEN = ("batch", "width"), ("batch", "mlp")
WIDENING, NARROWING = ("width", "mlp"), ("mlp", "width")


class Mlp(nn.Module):
    """Dense, GELU by tanh, dense; dropout after both dense layers (section 3.1, appendix B.1)."""

    spec: ModelSpec
    packing: Packing  # of the rows

    @nn.compact
    def __call__(self, x: Rows) -> Rows:
        """Returns rows of the same width."""
        spec = self.spec
        inits = (kernel_init, bias_init)
        dense1 = Dense(spec.mlp_dim, WIDENING, spec.kernel_dtype, *inits, name="dense1")
        dense2 = Dense(spec.width, NARROWING, spec.kernel_dtype, *inits, multiply=narrowing_product, name="dense2")
        hidden = constrain(nn.gelu(dense1(x), approximate=True), HIDDEN)
        return dropout(self, dense2(dropout(self, hidden, self.packing)), self.packing)


class ShardMapMlp(nn.Module):
    """The same with explicit communication: the kernels are gathered, and the partial outputs summed."""

    spec: ModelSpec
    packing: Packing  # of the rows

    @nn.compact
    def __call__(self, x: Rows) -> Rows:
        """Returns rows of the same width."""
        spec = self.spec
        dense1 = DenseParameters((spec.width, spec.mlp_dim), spec.kernel_dtype, name="dense1")()
        dense2 = DenseParameters((spec.mlp_dim, spec.width), spec.kernel_dtype, name="dense2")()
        widen = per_device(_widen, (ROWS,), (WIDENING, WIDENING[1:]), HIDDEN)
        narrow = per_device(_narrow, (HIDDEN,), (NARROWING, NARROWING[1:]), ROWS)
        # Dropout is drawn for the whole batch, so that it does not depend on the devices.
        hidden = dropout(self, widen(x, *dense1), self.packing)
        return dropout(self, narrow(hidden, *dense2), self.packing)


class DenseParameters(nn.Module):
    """The parameters of a dense layer."""

    shape: tuple[int, int]
    kernel_dtype: str  # of the gradient

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "inputs features"], Float[Array, " features"]]:
        """Returns the kernel and the bias."""
        kernel = self.param("kernel", kernel_init, self.shape)
        bias = self.param("bias", bias_init, self.shape[1:])
        return kernel.astype(self.kernel_dtype), bias


def _widen(x: Rows, kernel: Float[Array, "width mlp"], bias: Float[Array, " mlp"]) -> Hidden:
    return nn.gelu(add_bias(product(x, kernel), bias), approximate=True)


def _narrow(hidden: Hidden, kernel: Float[Array, "mlp width"], bias: Float[Array, " width"]) -> Rows:
    return add_bias(sum_over("mlp", product(hidden, kernel)), bias)


MLPS: dict[MlpKind, type[nn.Module]] = {"jit": Mlp, "shard_map": ShardMapMlp}
