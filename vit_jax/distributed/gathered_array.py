"""An array that lies on many devices, as one array of this host."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P


class GatheredArray:
    """An array on the devices, whole in this host's memory only while NumPy looks at it.

    Attributes:
        shape: of the array.
        dtype: of the array.
    """

    def __init__(self, array: jax.Array):
        """Takes the array, however it is sharded."""
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Gathers it; every process must do so, in the same order."""
        sharding = self._array.sharding
        if self._array.is_fully_addressable:  # then to one device, not to all
            first = min(sharding.device_set, key=lambda device: device.id)
            whole = jax.device_put(self._array, SingleDeviceSharding(first))
        else:
            whole = jax.jit(lambda array: array, out_shardings=NamedSharding(sharding.mesh, P()))(self._array)
        return np.asarray(whole, dtype)  # its memory is freed together with the result
