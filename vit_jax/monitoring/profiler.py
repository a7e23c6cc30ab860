"""A trace of a few steps, for TensorBoard's profiler or Perfetto."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import jax

from vit_jax import reason
from vit_jax.tree import ArrayTree


class Trace:
    """Traces `steps` steps into a folder, from the third step of this process on, when compilation is over."""

    def __init__(self, folder: Path, start: int, steps: int):
        """Prepares to trace; `start` steps were done before."""
        self._folder = folder
        self._first, self._last = start + 3, start + 2 + steps
        self._running = False

    def before(self, step: int) -> None:
        """Starts the trace if `step`, which is about to be dispatched, is the first to be traced."""
        if self._first == step <= self._last:
            with profiler_errors():
                jax.profiler.start_trace(self._folder)
                self._running = True

    def after(self, step: int, result: ArrayTree) -> None:
        """Waits for `result` and stops the trace if `step` is the last to be traced; does nothing otherwise."""
        if self._running and step == self._last:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Stops a trace that is still running."""
        if self._running:
            self._running = False
            with profiler_errors():
                jax.profiler.stop_trace()


@contextlib.contextmanager
def profiler_errors() -> Iterator[None]:
    """Turns an error of the profiler, such as a full disk or another trace in this process, into a warning."""
    try:
        yield
    except Exception as error:  # of several libraries; a trace is not worth a run
        logging.getLogger(__name__).warning("profile_steps were not traced (%s); training goes on", reason(error))
