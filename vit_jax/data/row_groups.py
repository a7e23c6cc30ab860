"""The rows that a process reads of each batch, in groups. One thread or worker process reads a group at a time."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import cv2
import grain
import numpy as np
from jaxtyping import Int64

from vit_jax.data.batch_memory import BatchMemory, MemoryClosed
from vit_jax.data.workers import set_up_worker

Rows: TypeAlias = Int64[np.ndarray, " rows"]  # sorted numbers of rows of a global batch
ROWS_PER_GROUP = 8  # rows
MAX_BATCHES = 2**40  # batches


class RowGroups:
    """A data source for grain: element k is the k-th group of local rows, batch after batch.

    An element is read into the memory of its batch; its value is only k.
    """

    def __init__(
        self,
        examples: grain.MapDataset,
        batch: int,
        rows: Rows,
        memory: BatchMemory,
        on_batch: Callable[[int], None] | None = None,
    ):
        """Divides the rows of a process into groups of at most ROWS_PER_GROUP rows.

        Args:
            examples: position in the run -> the row there.
            batch: rows of a global batch.
            rows: the rows of a global batch that this process reads.
            memory: where the rows are written.
            on_batch: called with the number of a batch whenever a group of it is going to be read.
        """
        self.examples, self.batch, self.rows = examples, batch, rows
        self.memory, self.on_batch = memory, on_batch
        self.groups = np.array_split(np.arange(len(rows)), count_groups(len(rows)))  # places among the rows
        self.batches = min(len(examples) // batch, MAX_BATCHES)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Sets up the worker process that receives this object."""
        vars(self).update(state)
        use_one_opencv_thread()
        set_up_worker()

    def __len__(self) -> int:
        """Returns the number of groups in all batches."""
        return self.batches * len(self.groups)

    def __getitem__(self, index: int) -> int:
        """Reads group `index` into the memory of its batch, unless that is closed, and returns `index`."""
        number, group = divmod(index, len(self.groups))
        try:
            arrays = self.memory.get_arrays(number)
        except MemoryClosed:  # raised on, its traceback would hold what the loader has opened
            return index
        if self.on_batch:
            self.on_batch(number)
        for position in self.groups[group].tolist():
            row = self.examples[number * self.batch + int(self.rows[position])]
            for name, value in row.items():
                arrays[name][position] = value
        return index


def count_groups(rows: int) -> int:
    """Returns the number of groups into which `rows` rows of a batch are divided."""
    return math.ceil(rows / ROWS_PER_GROUP)


def use_one_opencv_thread() -> None:
    """Turns off OpenCV's own threads: the threads or worker processes of the loader already keep every core busy."""
    cv2.setNumThreads(0)
