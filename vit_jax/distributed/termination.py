"""SIGTERM, noticed by another thread than the main one."""

import os
import select
import signal


class TerminationSignal:
    """SIGTERM, taken over from the main thread, which may be compiling or waiting for other hosts."""

    def take_over(self) -> None:
        """Replaces the handler; in the main thread."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._handler_before = signal.signal(signal.SIGTERM, lambda number, frame: None)

    def give_back(self) -> None:
        """Puts the handler before back; in the main thread."""
        signal.signal(signal.SIGTERM, self._handler_before)
        signal.set_wakeup_fd(self._wakeup_before)

    def wait(self, seconds: float) -> bool:
        """Waits for some seconds, or for a signal if one comes; returns whether it was SIGTERM."""
        readable, _, _ = select.select([self._pipe[0]], [], [], seconds)
        return bool(readable) and signal.SIGTERM in os.read(self._pipe[0], 4096)
