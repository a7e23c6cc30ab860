"""Tasks for one background thread."""

import concurrent.futures
from collections.abc import Callable
from typing import Any


class BackgroundTasks:
    """Tasks that one thread runs in the order in which they were started. `poll` and `wait` raise their errors.

    Attributes:
        failed: whether `poll` or `wait` has raised an error. The owner of the tasks may set it earlier.
    """

    def __init__(self) -> None:
        """Starts no thread yet."""
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._begun: list[concurrent.futures.Future] = []
        self.failed = False

    def start(self, task: Callable[..., None], *args: Any) -> None:
        """Adds a task: the call `task(*args)`."""
        self._begun.append(self._thread.submit(task, *args))

    def poll(self) -> None:
        """Raises the error of a task that is over, if it failed. Does not wait."""
        while self._begun and self._begun[0].done():
            self._take_result()

    def wait(self) -> None:
        """Waits for the tasks in their order. Raises the error of the first that failed, before later ones are over."""
        while self._begun:
            self._take_result()

    def close(self) -> None:
        """Waits for all tasks and ends the thread. Raises no errors of tasks."""
        self._thread.shutdown()

    def _take_result(self) -> None:
        first = self._begun.pop(0)
        self.failed |= first.exception() is not None
        first.result()
