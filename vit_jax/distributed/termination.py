"""SIGTERM, noticed by another thread than the main one."""

import os
import select
import signal
from typing import Any


class TerminationSignal:
    """Takes SIGTERM over in a `with`: the main thread, which may be compiling or waiting for other hosts, goes on."""

    def __enter__(self) -> "TerminationSignal":
        """Replaces the handler; in the main thread."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._handler_before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        return self

    def __exit__(self, *error: Any) -> None:
        """Puts the handler before back."""
        signal.signal(signal.SIGTERM, self._handler_before)
        signal.set_wakeup_fd(self._wakeup_before)

    def wait(self, seconds: float) -> bool:
        """Waits for some seconds, or for a signal if one comes; returns whether it was SIGTERM."""
        readable, _, _ = select.select([self._pipe[0]], [], [], seconds)
        return bool(readable) and signal.SIGTERM in os.read(self._pipe[0], 4096)
