"""The arrays of an open file of weights, in whichever format. The file may come from a stranger."""

import abc
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax import BUGS, user_errors

# Far above what a model's file contains: arrays, dimensions, elements along one dimension.
MAX_ARRAYS, MAX_DIMENSIONS, MAX_LENGTH = 10_000, 8, 2**40
DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")}
DTYPES["bfloat16"] = np.dtype(jax.dtypes.bfloat16)


class Header(NamedTuple):
    """The declaration of an array in a file: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def is_weights(self) -> bool:
        """Tells whether the dtype is one in which weights are stored."""
        return self.dtype in DTYPES.values()


class Archive(Mapping[str, Header]):
    """The arrays of an open file: a mapping from names to headers. `read_array` reads the values.

    Attributes:
        notes: key -> text, for the notes that the file contains beside the arrays.
    """

    _headers: dict[str, Header]
    notes: Mapping[str, str] = MappingProxyType({})

    def __getitem__(self, name: str) -> Header:
        return self._headers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)

    @abc.abstractmethod
    def read_array(self, name: str, into: np.ndarray) -> None:
        """Reads an array of the file into `into`, which must have as many elements.

        The dtype, the strides and dimensions of 1 may differ. Several threads may read at once.

        Raises:
            UserError: the file is damaged.
        """


def check_header(name: str, header: Header) -> None:
    """Raises ValueError for a shape that no array of a model has."""
    shape = header.shape
    if len(shape) > MAX_DIMENSIONS or not all(0 <= side <= MAX_LENGTH for side in shape):
        raise ValueError(f"{name} has a shape that no array of a model has")


def check_count(count: int) -> None:
    """Raises ValueError for more arrays than any model has."""
    if count > MAX_ARRAYS:
        raise ValueError(f"it contains {count:,} arrays, more than any model has")


def copy_values(values: np.ndarray, into: np.ndarray) -> None:
    """Copies the values of a file into the array `into`, which must have as many elements.

    Raises:
        FloatingPointError: a value is beyond the range of the dtype of `into`.
    """
    with np.errstate(over="raise"):
        np.copyto(into, values.reshape(into.shape), casting="same_kind")


def convert_values(array: Any, dtype: np.dtype) -> np.ndarray:
    """Returns an array, or whatever NumPy converts to one, in a dtype and in C order.

    Raises:
        FloatingPointError: a value is beyond the range of the dtype.
    """
    with np.errstate(over="raise"):
        return np.asarray(array).astype(dtype, order="C", copy=False)


def read_errors(kind: str) -> AbstractContextManager[None]:
    """Turns all errors into UserErrors: a damaged file may cause any error in a format's library and in NumPy.

    Args:
        kind: the kind of file, with its article: `an .npz file`.
    """
    return user_errors(f"cannot be read as {kind}", Exception, *BUGS)
