"""A time limit for calls to servers that may never answer."""

import concurrent.futures.thread  # its own end is registered before that of this module
import contextlib
import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any

from fsspec.callbacks import Callback

from vit_jax import NoAnswer

TIMEOUT = 60.0  # seconds without an answer or progress


class Progress(Callback):
    """Receives fsspec's report of each part that was copied. The time limit of a call counts from its last progress.

    Attributes:
        last: the time of `time.monotonic` at which the call began or last made progress.
        fault: the reason of the last repetition; empty if nothing was repeated.
        requests: the requests for contents that the call has sent.
        abandoned: set when nobody waits for the call any longer. The call then ends at its next part.
    """

    def __init__(self):
        super().__init__()
        self.last, self.fault = time.monotonic(), ""
        self.requests: set[object] = set()
        self.abandoned = threading.Event()
        self._furthest = 0

    def set_size(self, size: int | None) -> None:
        """Records that a copy begins, perhaps anew. Parts that came in an earlier attempt already are no progress."""
        self.value = 0
        super().set_size(size)

    def call(self, *args: Any, **kwargs: Any) -> None:
        """Records progress if more bytes of the copy have arrived than in any earlier attempt. fsspec calls this.

        Raises:
            CancelledError: the call was abandoned.
        """
        if self.abandoned.is_set():
            raise concurrent.futures.CancelledError
        if self.value > self._furthest:
            self.last, self._furthest = time.monotonic(), self.value


_waiting: set[concurrent.futures.Future] = set()
_ended = threading.Event()
current_progress: contextvars.ContextVar[Progress | None] = contextvars.ContextVar("current_progress", default=None)


def call_with_timeout(what: str, call: Callable[[Progress], Any], seconds: float | None = None) -> Any:
    """Returns what a call returns, or raises what it raises.

    The call runs in a thread of its own, which is abandoned at the limit: some libraries neither give up nor can be
    stopped. In this thread, and in the tasks that it starts, `current_progress` is the `Progress` of the call.

    Args:
        what: the name of the file or server in the error message.
        call: takes the `Progress` to which it may report parts.
        seconds: the time limit; `TIMEOUT` if None.

    Raises:
        NoAnswer: there was neither an answer nor progress for that long.
        CancelledError: the process ends.
    """
    seconds = TIMEOUT if seconds is None else seconds
    answer: concurrent.futures.Future = concurrent.futures.Future()
    progress = Progress()

    def run() -> None:
        current_progress.set(progress)
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # the process ends
            try:
                answer.set_result(call(progress))
            except BaseException as error:
                answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    _waiting.add(answer)
    try:
        if _ended.is_set():
            _end_calls()
        while not answer.done():
            left = progress.last + seconds - time.monotonic()
            if left <= 0:
                fault = f" ({progress.fault})" if progress.fault else ""
                raise NoAnswer(f"{what} did not answer within {seconds:g} s{fault}; is it reachable from here?")
            concurrent.futures.wait([answer], timeout=left)
        return answer.result()
    finally:
        _waiting.discard(answer)
        progress.abandoned.set()


def _end_calls() -> None:
    """Ends the waiting for all calls of this process, present and future ones, with `CancelledError`."""
    _ended.set()
    for answer in list(_waiting):
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            answer.set_exception(concurrent.futures.CancelledError())


# Python's end waits for the threads of pools, such as those that copy shards ahead of their use; `atexit` comes later.
threading._register_atexit(_end_calls)  # type: ignore[attr-defined]
