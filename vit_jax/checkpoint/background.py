"""Tasks for one background thread."""

import concurrent.futures
from collections.abc import Callable
from typing import Any


class BackgroundTasks:
    """Tasks that one thread does in their order; what goes wrong is raised later, in the main thread.

    Attributes:
        failed: something went wrong.
    """

    def __init__(self) -> None:
        """Starts no thread yet."""
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._begun: list[concurrent.futures.Future] = []
        self.failed = False

    def start(self, task: Callable[..., None], *args: Any) -> None:
        """Adds a task."""
        self._begun.append(self._thread.submit(task, *args))

    def poll(self) -> None:
        """Raises what went wrong with the tasks that are over. Costs nothing."""
        while self._begun and self._begun[0].done():
            self._take_result()

    def wait(self) -> None:
        """Waits for all tasks; raises what went wrong."""
        while self._begun:
            self._take_result()

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    def _take_result(self) -> None:
        first = self._begun.pop(0)
        self.failed |= first.exception() is not None
        first.result()
