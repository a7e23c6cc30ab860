"""Products of matrices in the kernels: summed in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def dot(a: Array, b: Array) -> Array:
    """Returns a b."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def dot_transposed(a: Array, b: Array) -> Array:
    """Returns a bᵀ."""
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def transposed_dot(a: Array, b: Array) -> Array:
    """Returns aᵀ b."""
    return jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
