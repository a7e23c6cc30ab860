"""A time limit for calls to servers, which may never answer."""

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any

from fsspec.callbacks import Callback

from vit_jax import NoAnswer

TIMEOUT = 60.0


class Progress(Callback):
    """What fsspec tells of each part copied; a call that makes progress may take its time."""

    def __init__(self):
        super().__init__()
        self.last = time.monotonic()

    def call(self, *args: Any, **kwargs: Any) -> None:
        """Notes that something has happened."""
        self.last = time.monotonic()


def call_with_timeout(what: str, call: Callable[[Progress], Any], seconds: float | None = None) -> Any:
    """Returns what a call returns, or raises what it raises.

    It runs in a thread that nobody waits for afterwards: not every library gives up by itself, nor can it be stopped.

    Args:
        what: it is about, for the error message.
        call: takes a callback that it may tell its progress.
        seconds: the limit; None: `SECONDS`.

    Raises:
        NoAnswer: there was neither an answer nor progress for so long.
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
