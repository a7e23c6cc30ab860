"""For how long the devices have had nothing to do."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable

import jax

from vit_jax.tree import ArrayTree

PARTING = 10.0  # seconds for the results that are still computed at the end; Python must not end while they are awaited


class DeviceWatch:
    """Waits in a thread for what was dispatched to the devices, so that the main thread knows when they fell idle."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Starts with idle devices; `clock` gives seconds."""
        self._clock = clock
        self._dispatched, self._finished = 0, (0, clock())  # how many were finished, and when the last was
        self._results: queue.SimpleQueue[ArrayTree | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, daemon=True)

    def dispatch(self, results: ArrayTree) -> None:
        """Notes what was dispatched; the results must not be donated."""
        if not self._dispatched:
            self._thread.start()
        self._dispatched += 1
        self._results.put(results)

    def idle_seconds(self) -> float:
        """Returns the seconds since the devices finished all that was dispatched; 0.0 while they compute."""
        count, since = self._finished
        return self._clock() - since if count == self._dispatched else 0.0

    def close(self) -> None:
        """Ends the thread after what was dispatched, unless that takes for ever."""
        self._results.put(None)
        if self._thread.is_alive():
            self._thread.join(PARTING)

    def _wait(self) -> None:
        while (results := self._results.get()) is not None:
            with contextlib.suppress(Exception):  # the main thread meets it when it fetches them
                jax.block_until_ready(results)
            self._finished = self._finished[0] + 1, self._clock()
