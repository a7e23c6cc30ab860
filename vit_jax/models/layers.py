"""The dense layer, and a matmul with a weight gradient that suits the platform it is compiled for."""

from collections.abc import Callable
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.sharding import gather

Wide: TypeAlias = Float[Array, "batch tokens wide"]
Narrow: TypeAlias = Float[Array, "batch tokens narrow"]
Kernel: TypeAlias = Float[Array, "wide narrow"]


class Dense(nn.Module):
    """A dense layer whose kernel has named dimensions."""

    features: int
    dimensions: tuple[str, str]  # of the kernel
    dtype: str = "float32"  # in which it is computed
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros
    matmul: Callable[[Array, Array], Array] = jnp.matmul

    @nn.compact
    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows features"]:
        """Returns `x @ kernel + bias`."""
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape).astype(self.dtype)
        bias = self.param("bias", self.bias_init, shape[1:]).astype(self.dtype)
        return self.matmul(x, gather(kernel, self.dimensions)) + bias


@jax.custom_vjp
def narrow(x: Wide, kernel: Kernel) -> Narrow:
    """Returns `x @ kernel`. Differentiable in reverse only."""
    return x @ kernel


def _forward(x: Wide, kernel: Kernel) -> tuple[Narrow, tuple[Wide, Kernel]]:
    return x @ kernel, (x, kernel)


def _backward(residuals: tuple[Wide, Kernel], grad: Narrow) -> tuple[Wide, Kernel]:
    x, kernel = residuals
    return grad @ kernel.T, jax.lax.platform_dependent(x, grad, cpu=_transposed, default=_plain)


def _plain(x: Wide, grad: Narrow) -> Kernel:
    return jnp.einsum("btm,btw->mw", x, grad)


def _transposed(x: Wide, grad: Narrow) -> Kernel:
    # XLA's CPU matmul takes a third less time to make the transposed gradient, unless the compiler turns it back.
    return jax.lax.optimization_barrier(jnp.einsum("btw,btm->wm", grad, x)).T


narrow.defvjp(_forward, _backward)
