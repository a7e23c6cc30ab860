"""A trace of some steps, for TensorBoard's profiler or Perfetto."""

from pathlib import Path
from typing import Any

import jax


class Trace:
    """Traces `steps` steps from the third of the run on, when compiling is over, into a folder."""

    def __init__(self, folder: Path, start: int, steps: int):
        self._folder = folder
        self._first, self._last = start + 3, start + 2 + steps
        self._on = False

    def before(self, step: int) -> None:
        """Starts when the first step to trace is about to be dispatched."""
        if self._first == step <= self._last:
            jax.profiler.start_trace(self._folder)
            self._on = True

    def after(self, step: int, result: Any) -> None:
        """Stops when the last step to trace is done, given what it returns."""
        if self._on and step == self._last:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Stops a trace that is still on."""
        if self._on:
            jax.profiler.stop_trace()
            self._on = False
