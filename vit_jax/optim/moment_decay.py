"""Decays of moments and averages that a compiled step takes as arguments."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decay:
    """A decay d between 0 and 1 whose value is not known when a step is compiled.

    It takes the place of a Python float in optax's transformations. These compute 1 - d, of a float in float64; in
    float32, the result would have four digits less if d is 0.999.

    Attributes:
        value: d.
        complement: 1 - d.
    """

    value: jax.Array
    complement: jax.Array

    def __rsub__(self, one: float) -> jax.Array:
        """Returns 1 - d; it is subtracted from nothing else."""
        assert one == 1
        return self.complement

    def __mul__(self, factor: jax.Array) -> jax.Array:
        """Returns d times an array."""
        return self.value * factor

    __rmul__ = __mul__

    def __rtruediv__(self, array: jax.Array) -> jax.Array:
        """Returns an array divided by d."""
        return array / self.value

    def __pow__(self, exponent: jax.Array) -> jax.Array:
        """Returns d to a power."""
        return self.value**exponent
