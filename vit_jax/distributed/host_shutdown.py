"""How a host leaves a run: it tells the other hosts that it leaves and, after an error, why."""

import faulthandler
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import jax

from vit_jax import tell
from vit_jax.distributed.coordination import ProcessGroup

SHUTDOWN_SECONDS = 10.0  # that the last exchange of a host with the others may take


class HostShutdown:
    """Lets one host leave the run, by a last exchange with the other hosts."""

    def __init__(self, group: ProcessGroup, shutdown_seconds: float = SHUTDOWN_SECONDS):
        """Sends nothing yet.

        Args:
            group: the hosts of the run.
            shutdown_seconds: seconds that an exchange may take before this host stops waiting for it.
        """
        self._group, self._shutdown_seconds = group, shutdown_seconds

    def announce(self, sentence: str, code: int) -> None:
        """Makes all hosts end with this sentence and exit code. Only the first announcement in a run counts."""
        end = {"host": self._group.host, "code": code, "sentence": sentence}
        self._within_limit(lambda: self._group.put("end/end", end))

    def announcement(self) -> tuple[int, str, int] | None:
        """Returns (host, sentence, exit code) of another host's announcement, or None if there is none."""
        end = self._group.get("end").get("end")
        return (end["host"], end["sentence"], end["code"]) if end and end["host"] != self._group.host else None

    def departed_hosts(self) -> list[str]:
        """Returns the numbers of the hosts that have left."""
        return list(self._group.get("departed"))

    def leave_group(self) -> None:
        """Notes that this host has left the run. Host 0, which runs the coordination service, waits for all others."""
        self._within_limit(self._leave_group)

    def end_process(self, sentence: str, code: int) -> NoReturn:
        """Prints the sentence and ends this process and its children, from any thread; the main thread may hang."""
        tell(f"vit_jax: {sentence}")
        if self._group.hosts > 1:
            self.leave_group()
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(code)

    def abort(self, sentence: str, code: int) -> NoReturn:
        """Prints the sentence and the stacks of all threads, then ends this process as `end_process` does."""
        tell(f"vit_jax: {sentence} The threads of host {self._group.host}:")
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        self.end_process("the run is ended; the same command resumes it from its last checkpoint.", code)

    def _leave_group(self) -> None:
        self._group.put(f"departed/{self._group.host}", True)
        while self._group.host == 0 and len(self.departed_hosts()) < self._group.hosts:
            time.sleep(0.05)

    def _within_limit(self, call: Callable[[], None]) -> None:
        """Runs a call in a thread and waits for it at most `shutdown_seconds`, as it may hang if host 0 does."""

        def run() -> None:
            try:
                call()
            except jax.errors.JaxRuntimeError as error:
                tell(f"vit_jax: cannot reach the other hosts: {error}")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._shutdown_seconds)
