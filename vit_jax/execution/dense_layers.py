"""Dense layers on devices: their kernels gathered over the mesh, their results placed on it."""

from collections.abc import Callable
from typing import TypeAlias

from jaxtyping import Array, Float

from vit_jax.execution.norms_and_products import add_bias, as_matrix, narrowing_product, product
from vit_jax.models import MlpKind, Rows
from vit_jax.sharding import constrain, gather, per_device, sum_over

Hidden: TypeAlias = Float[Array, "rows mlp"]
Activate: TypeAlias = Callable[[Float[Array, "..."]], Hidden]
Widen: TypeAlias = Callable[[Rows, Array, Array, str, Activate], Hidden]
Narrow: TypeAlias = Callable[[Hidden, Array, Array], Rows]

ROWS, HIDDEN = ("batch", "width"), ("batch", "mlp")  # names of the dimensions of the activations


def dense(x: Array, kernel: Array, bias: Array, name: str) -> Array:
    """Returns `x @ kernel + bias`, see `PlainOps.dense`; a kernel with several dimensions of inputs has one output."""
    kernel = gather(kernel, f"{name}/kernel", x.dtype)
    if kernel.ndim - bias.ndim > 1:
        kernel = as_matrix(kernel, bias.size)
    return add_bias(product(x, kernel), bias)


def widen(x: Rows, kernel: Array, bias: Array, name: str, activate: Activate) -> Hidden:
    """Returns the hidden channels of an MLP. The compiler chooses the communication."""
    return constrain(activate(dense(x, kernel, bias, name)), HIDDEN)


def narrow(hidden: Hidden, kernel: Float[Array, "mlp width"], bias: Float[Array, " width"]) -> Rows:
    """Returns the result of the second layer of an MLP. The compiler chooses the communication."""
    return add_bias(narrowing_product(hidden, gather(kernel, "dense2/kernel", hidden.dtype)), bias)


def widen_per_device(x: Rows, kernel: Array, bias: Array, name: str, activate: Activate) -> Hidden:
    """Returns the hidden channels of an MLP. The communication is explicit: the kernel is gathered."""

    def local(x: Rows, kernel: Array, bias: Array) -> Hidden:
        return activate(add_bias(product(x, kernel), bias))

    return per_device(local, (ROWS,), (f"{name}/kernel", f"{name}/bias"), HIDDEN)(x, kernel, bias)


def narrow_per_device(hidden: Hidden, kernel: Float[Array, "mlp width"], bias: Float[Array, " width"]) -> Rows:
    """Returns the result of the second layer of an MLP. The communication is explicit: partial results are summed."""

    def local(hidden: Hidden, kernel: Array, bias: Array) -> Rows:
        return add_bias(sum_over("mlp", product(hidden, kernel)), bias)

    return per_device(local, (HIDDEN,), ("dense2/kernel", "dense2/bias"), ROWS)(hidden, kernel, bias)


# Blocks that do not allow the TPU kernel of `fused` get both layers by the compiler.
MLPS: dict[MlpKind, tuple[Widen, Narrow]] = {
    "auto": (widen, narrow),
    "jit": (widen, narrow),
    "shard_map": (widen_per_device, narrow_per_device),
    "fused": (widen, narrow),
}
