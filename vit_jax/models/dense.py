"""The matmul that narrows tokens, with a weight gradient that suits the platform it is compiled for."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Wide: TypeAlias = Float[Array, "batch tokens wide"]
Narrow: TypeAlias = Float[Array, "batch tokens narrow"]
Kernel: TypeAlias = Float[Array, "wide narrow"]


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
