"""Lets a thread other than the main thread wait for SIGTERM."""

import os
import select
import signal


class TerminationSignal:
    """Reacts to SIGTERM in a thread of its own, because the main thread may be compiling or waiting for other hosts."""

    def take_over(self) -> None:
        """Replaces the handler of SIGTERM. Must be called in the main thread."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._handler_before = signal.signal(signal.SIGTERM, lambda number, frame: None)

    def give_back(self) -> None:
        """Restores the previous handler. Must be called in the main thread."""
        signal.signal(signal.SIGTERM, self._handler_before)
        signal.set_wakeup_fd(self._wakeup_before)

    def wait(self, seconds: float) -> bool:
        """Waits until a signal comes, at most some seconds, and returns whether it was SIGTERM."""
        readable, _, _ = select.select([self._pipe[0]], [], [], seconds)
        return bool(readable) and signal.SIGTERM in os.read(self._pipe[0], 4096)
