"""How a host leaves a run: the others learn why, and none waits for it in vain."""

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

PARTING = 10.0  # seconds that the last exchange of a run may take


class HostDeparture:
    """The last exchange of one host with the others."""

    def __init__(self, group: ProcessGroup, parting: float = PARTING):
        """Prepares it.

        Args:
            group: the hosts.
            parting: seconds that it may take.
        """
        self._group, self._parting = group, parting

    def announce(self, sentence: str, code: int) -> None:
        """Has all hosts end with this sentence and exit code; the first announcement counts."""
        end = {"host": self._group.host, "code": code, "sentence": sentence}
        self._within_limit(lambda: self._group.put("end/end", end))

    def announcement(self) -> tuple[int, str, int] | None:
        """Returns the host, the sentence and the exit code that another host announced, if one did."""
        end = self._group.get("end").get("end")
        return (end["host"], end["sentence"], end["code"]) if end and end["host"] != self._group.host else None

    def departed(self) -> list[str]:
        """Returns the numbers of the hosts that have left."""
        return list(self._group.get("departed"))

    def depart(self) -> None:
        """Leaves; host 0, which runs the coordination service, after all others."""
        self._within_limit(self._depart)

    def end_process(self, sentence: str, code: int) -> NoReturn:
        """Ends this process from any thread: the main one may never come back."""
        tell(f"vit_jax: {sentence}")
        if self._group.hosts > 1:
            self.depart()
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(code)

    def abort(self, sentence: str, code: int) -> NoReturn:
        """Ends this process as a signal would, with the stacks of all threads."""
        tell(f"vit_jax: {sentence} The threads of host {self._group.host}:")
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        self.end_process("the run is ended; the same command resumes it from its last checkpoint.", code)

    def _depart(self) -> None:
        self._group.put(f"departed/{self._group.host}", True)
        while self._group.host == 0 and len(self.departed()) < self._group.hosts:
            time.sleep(0.05)

    def _within_limit(self, call: Callable[[], None]) -> None:
        """Calls what may not return while host 0 hangs, and waits `parting` seconds for it."""

        def run() -> None:
            try:
                call()
            except jax.errors.JaxRuntimeError as error:
                tell(f"vit_jax: cannot reach the other hosts: {error}")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._parting)
