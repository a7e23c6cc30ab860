"""Memory for batches, which threads or worker processes fill in place and which is used again.

Between a reader and the devices no image is copied and no memory is allocated: a batch is passed on in this memory.
"""

import collections
import math
import mmap
import os
import time
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax import UserError

PAGE = mmap.ALLOCATIONGRANULARITY
ALIGNMENT = 64  # bytes: JAX's CPU devices use an array that is aligned so without a copy
BLOCK_BITS = 16  # low bits of a table entry, the number of the block; the high bits are the number of the batch + 1
CLOSED = -1
PAUSE = 0.002  # seconds


class MemoryClosed(Exception):
    """The batches are no longer read."""


class BatchMemory:
    """Blocks of memory, each of which holds the arrays of one batch. Can be pickled, to send it to worker processes.

    A table that all processes share says in which block a batch lies. Only the batch that is taken next and the
    `prefetch` batches after it have a block. A thread or process that reads a later batch waits until that batch has
    one.
    """

    def __init__(self, row: Mapping[str, np.ndarray], rows: int, *, start: int, prefetch: int, shared: bool):
        """Provides memory for the first `prefetch + 1` batches; the kernel allocates it when it is first written.

        Args:
            row: name -> array with the shape and the type that the array of this name has in one row.
            rows: number of rows in a batch.
            start: number of the first batch.
            prefetch: number of batches that have memory in addition to the batch that is taken next.
            shared: whether worker processes fill the memory; False: threads of this process do.

        Raises:
            UserError: `shared` is True, and this system is not Linux.
        """
        self._fields = dict[str, tuple[tuple[int, ...], np.dtype, int]]()  # shape, type, place in a block
        size = 0
        for name, array in row.items():
            self._fields[name] = ((rows, *array.shape), array.dtype, size)
            size += math.ceil(rows * array.nbytes / ALIGNMENT) * ALIGNMENT
        self._table_size, self._block_size = (math.ceil(used / PAGE) * PAGE for used in (8 * (prefetch + 1), size))
        self._file = open_memory() if shared else -1
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._prefetch, self._blocks = prefetch, 0
        self._free = collections.deque[int]()
        self._grow(0)
        self._set_up()
        for number in range(start, start + prefetch + 1):
            self._provide(number)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a worker process needs to open the memory."""
        return {name: vars(self)[name] for name in ("_fields", "_table_size", "_block_size", "_path")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Opens the shared memory of the process that made the batches."""
        vars(self).update(state)
        self._file = os.open(self._path, os.O_RDWR)
        self._set_up()

    def _set_up(self) -> None:
        if self._file >= 0:
            weakref.finalize(self, os.close, self._file)
        self._table = np.frombuffer(self._map(0, self._table_size), np.int64)
        self._mapped = dict[int, mmap.mmap]()

    def _map(self, offset: int, size: int) -> mmap.mmap:
        return mmap.mmap(self._file, size, offset=offset if self._file >= 0 else 0)

    def _grow(self, blocks: int) -> None:
        if self._file >= 0:
            os.truncate(self._file, self._table_size + blocks * self._block_size)

    def _provide(self, number: int) -> None:
        """Gives a batch a free block, or a new block if none is free."""
        if self._free:
            block = self._free.pop()
        else:
            block, self._blocks = self._blocks, self._blocks + 1
            self._grow(self._blocks)
            self._bytes(block)  # mapped once, before several threads ask for it
        self._table[number % len(self._table)] = number + 1 << BLOCK_BITS | block  # one store: it is seen whole

    def _bytes(self, block: int) -> np.ndarray:
        """Returns the bytes of a block: a new array over the same memory each time."""
        if block not in self._mapped:
            self._mapped[block] = self._map(self._table_size + block * self._block_size, self._block_size)
        return np.frombuffer(self._mapped[block], np.uint8)

    def _entry(self, number: int) -> int:
        """Returns the block of a batch; waits until the batch has one. Raises MemoryClosed if the memory was closed."""
        while True:
            entry = int(self._table[number % len(self._table)])
            if entry == CLOSED:
                raise MemoryClosed
            if entry >> BLOCK_BITS == number + 1:
                return entry & (1 << BLOCK_BITS) - 1
            time.sleep(PAUSE)

    def _arrays(self, block: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.ndarray(shape, dtype, block, place) for name, (shape, dtype, place) in self._fields.items()}

    def get_arrays(self, number: int) -> dict[str, np.ndarray]:
        """Returns the arrays [rows, ...] of a batch, to be filled in place; waits until the batch has memory.

        Raises:
            MemoryClosed: the memory was closed.
        """
        return self._arrays(self._bytes(self._entry(number)))

    def take(self, number: int) -> dict[str, np.ndarray]:
        """Returns the arrays [rows, ...] of a batch that is filled, and provides memory for a later batch.

        The array `image` lies in the block itself. The block is used again for another batch once nothing refers to
        this array, nor to an array on a device that shares its memory. The other arrays are copies, which may be kept.
        """
        index = self._entry(number)
        block = self._bytes(index)
        weakref.finalize(block, self._free.append, index).atexit = False
        self._provide(number + self._prefetch + 1)
        return {name: array if name == "image" else array.copy() for name, array in self._arrays(block).items()}

    def close(self) -> None:
        """Ends every wait for a batch, present and future, with `MemoryClosed`; the memory itself stays."""
        self._table[:] = CLOSED


def open_memory() -> int:
    """Returns the descriptor of a new file that exists only in memory, until the last process that uses it ends.

    Raises:
        UserError: the system is not Linux.
    """
    if not hasattr(os, "memfd_create"):
        raise UserError("worker processes of the loader need Linux; set --config.data.workers=0 for threads")
    return os.memfd_create("vit_jax batches")
