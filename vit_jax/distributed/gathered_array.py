"""An array on many devices that NumPy can read as one array on this host."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P


class GatheredArray:
    """A sharded array that is gathered when it is converted to NumPy, and not kept afterwards.

    Attributes:
        shape: the shape of the whole array.
        dtype: the dtype of the array.
    """

    def __init__(self, array: jax.Array):
        """Takes an array with any sharding."""
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Gathers the array. All processes must convert the same arrays in the same order."""
        sharding = self._array.sharding
        if self._array.is_fully_addressable:  # then one device suffices
            first = min(sharding.device_set, key=lambda device: device.id)
            whole = jax.device_put(self._array, SingleDeviceSharding(first))
        else:
            whole = jax.jit(lambda array: array, out_shardings=NamedSharding(sharding.mesh, P()))(self._array)
        return np.asarray(whole, dtype)  # the gathered copy is freed together with the result
