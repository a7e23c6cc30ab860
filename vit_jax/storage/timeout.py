"""A time limit for calls to servers that may never answer."""

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any

from fsspec.callbacks import Callback

from vit_jax import NoAnswer

TIMEOUT = 60.0  # seconds without an answer or progress


class Progress(Callback):
    """Receives fsspec's report of each part that was copied: a call that makes progress may take longer."""

    def __init__(self):
        super().__init__()
        self.last = time.monotonic()

    def call(self, *args: Any, **kwargs: Any) -> None:
        """Records that progress was made."""
        self.last = time.monotonic()


def call_with_timeout(what: str, call: Callable[[Progress], Any], seconds: float | None = None) -> Any:
    """Returns what a call returns, or raises what it raises.

    The call runs in a thread of its own, which is abandoned at the limit: some libraries neither give up nor can be
    stopped.

    Args:
        what: the name of the file or server in the error message.
        call: takes a callback to which it may report progress.
        seconds: the limit; `TIMEOUT` if None.

    Raises:
        NoAnswer: there was neither an answer nor progress for that long.
    """
    seconds = TIMEOUT if seconds is None else seconds
    answer: concurrent.futures.Future = concurrent.futures.Future()
    progress = Progress()

    def run() -> None:
        try:
            answer.set_result(call(progress))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not answer.done():
        left = progress.last + seconds - time.monotonic()
        if left <= 0:
            raise NoAnswer(f"{what} did not answer within {seconds:g} s; is it reachable from here?")
        concurrent.futures.wait([answer], timeout=left)
    return answer.result()
