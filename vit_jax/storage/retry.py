"""Which calls to a store are repeated after a transient error, and how long the waits between them are.

The libraries repeat requests themselves: gcsfs sends a request up to 6 times (408, 429, 5xx, resets, silence; 35
seconds of waits), botocore and s3fs up to 5 times each, fsspec's HTTP once. A call on which a library gives up is
repeated here until there was no progress for `timeout.TIMEOUT` seconds. Only reads and listings are repeated here: an
upload that is sent anew might arrive after a newer one.
"""

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from vit_jax import reason
from vit_jax.storage import timeout

FIRST_WAIT, MAX_WAIT = 0.5, 16.0  # seconds; each wait is up to half shorter
BUSY = {408, 429}  # the answers below 500 after which the same request may succeed
# Errors of aiohttp, botocore, requests and google.auth, by name: a library is not imported before its store is used.
TRANSIENT = {
    *("ClientConnectionError", "ClientPayloadError"),
    *("HTTPClientError", "IncompleteRead", "ResponseParserError", "ResponseStreamingError"),
    *("ConnectionError", "Timeout", "ChunkedEncodingError", "TransportError"),
    *("TimeoutError", "ChecksumError"),
}


class ShortRead(ConnectionError):
    """A store has sent another number of bytes than it states for the file."""


def is_busy(status: object) -> bool:
    """Returns whether an HTTP status, a number or its text, says that the same request may succeed later."""
    return str(status).isdecimal() and (int(str(status)) in BUSY or 500 <= int(str(status)) < 600)


def is_transient(error: BaseException) -> bool:
    """Returns whether a store's error says nothing about the file: the same call may succeed later."""
    response = getattr(error.__cause__, "response", None)  # s3fs states botocore's error as the cause of its own
    answered = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    hub = getattr(getattr(error, "response", None), "status_code", None)  # of huggingface_hub
    status = answered or hub or getattr(error, "status", None) or getattr(error, "code", None)
    if status:
        return is_busy(status)
    return not TRANSIENT.isdisjoint(kind.__name__ for kind in type(error).__mro__)


def backoff_seconds() -> Iterator[float]:
    """Yields the seconds to wait before each repetition, without end.

    The waits double up to `MAX_WAIT`. A random factor keeps many processes from repeating at the same moment.
    """
    for number in itertools.count():
        yield random.uniform(0.5, 1) * min(FIRST_WAIT * 2**number, MAX_WAIT)


def retry_transient(call: Callable[[timeout.Progress], Any], progress: timeout.Progress) -> Any:
    """Returns what a call returns; repeats the call while it fails in a transient way.

    Returns None if the call was abandoned (`Progress.abandoned`).

    Raises:
        OSError: the call has failed in transient ways, without progress, for `timeout.TIMEOUT` seconds. The message is
            the reason of the last failure.
        Exception: an error of the call that is not transient, unchanged.
    """
    began = time.monotonic()
    for wait in backoff_seconds():
        try:
            return call(progress)
        except Exception as error:
            if not is_transient(error):
                raise
            progress.fault = reason(error)
            if time.monotonic() + wait > progress.last + timeout.TIMEOUT:
                raise OSError(f"{progress.fault} (for {time.monotonic() - began:.0f} s)") from error
        if progress.abandoned.wait(wait):
            break
    return None  # nobody reads it


def log_recovery(what: str, progress: timeout.Progress, seconds: float) -> None:
    """Logs that a call has succeeded after a fault, if there was one."""
    if progress.fault:
        logging.getLogger(__name__).warning(
            "%s failed at first (%s); the request was repeated and answered after %.1f s",
            what,
            progress.fault,
            seconds,
        )
