"""Calls to stores that fsspec opens: how long one may take, which are repeated, and what their libraries repeat.

The libraries repeat requests themselves: gcsfs sends a request up to 6 times (408, 429, 5xx, resets, silence; 35
seconds of waits), botocore and s3fs up to 5 times each, fsspec's HTTP once. A call on which a library gives up is
repeated here until there was no progress for `TIMEOUT` seconds. Only reads and listings are repeated here: an upload
that is sent anew might arrive after a newer one.
"""

import asyncio
import concurrent.futures.thread  # its own end is registered before that of this module
import contextlib
import contextvars
import functools
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
from fsspec.callbacks import Callback

from vit_jax import NoAnswer, reason

TIMEOUT = 60.0  # seconds without an answer or progress
FIRST_WAIT, MAX_WAIT = 0.5, 16.0  # seconds; each wait is up to half shorter
BUSY = {408, 429}  # the answers below 500 after which the same request may succeed
# Errors of aiohttp, botocore, requests and google.auth, by name: a library is not imported before its store is used.
TRANSIENT = {
    *("ClientConnectionError", "ClientPayloadError"),
    *("HTTPClientError", "IncompleteRead", "ResponseParserError", "ResponseStreamingError"),
    *("ConnectionError", "Timeout", "ChunkedEncodingError", "TransportError"),
    *("TimeoutError", "ChecksumError"),
}
# Protocol -> the extra that opens its paths.
EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3", "hf": "hub"}
SOCKET_TIMEOUT_SECONDS = 20.0  # without a byte, after which a connection is given up for another
MAX_RETRY_AFTER_SECONDS = 30.0  # the longest wait in seconds for which a store may ask


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


def retry_transient(call: Callable[[Progress], Any], progress: Progress) -> Any:
    """Returns what a call returns; repeats the call while it fails in a transient way.

    Returns None if the call was abandoned (`Progress.abandoned`).

    Raises:
        OSError: the call has failed in transient ways, without progress, for `TIMEOUT` seconds. The message is
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
            if time.monotonic() + wait > progress.last + TIMEOUT:
                raise OSError(f"{progress.fault} (for {time.monotonic() - began:.0f} s)") from error
        if progress.abandoned.wait(wait):
            break
    return None  # nobody reads it


def log_recovery(what: str, progress: Progress, seconds: float) -> None:
    """Logs that a call has succeeded after a fault, if there was one."""
    if progress.fault:
        logging.getLogger(__name__).warning(
            "%s failed at first (%s); the request was repeated and answered after %.1f s",
            what,
            progress.fault,
            seconds,
        )


@functools.cache
def open_store(server: str, process: int) -> Any:
    """Returns fsspec's file system of a server, such as "gs://bucket".

    All threads of a process share the file system and its connections. A forked process cannot use them, so `process`,
    the process id, is part of the key under which a file system is kept.
    """
    _configure()
    protocol = server.partition("://")[0]
    if protocol in ("gs", "gcs"):
        _configure_google()
    elif protocol in ("http", "https"):
        _options(protocol)["client_kwargs"] = {"timeout": _http_limits(), "trace_configs": [_trace()]}
    return fsspec.core.url_to_fs(server)[0]


def _options(protocol: str) -> dict[str, Any]:
    return fsspec.config.conf.setdefault(protocol, {})


def _configure() -> None:
    """Sets fsspec's defaults for gs:// and s3://, for the file systems that this package and Orbax open from now on."""
    for protocol in ("gs", "gcs", "s3", "s3a"):
        _options(protocol)["use_listings_cache"] = False  # other processes, and Orbax's own writer, add files
    for protocol in ("s3", "s3a"):
        _options(protocol)["max_concurrency"] = 1  # parts of a file: files are read as streams, many at once
        _options(protocol)["config_kwargs"] = {
            "connect_timeout": SOCKET_TIMEOUT_SECONDS,
            "read_timeout": SOCKET_TIMEOUT_SECONDS,
        }


def _configure_google() -> None:
    """Limits how long gcsfs and TensorStore (Orbax uses it) wait for a silent server: by default they wait forever."""
    for protocol in ("gs", "gcs"):
        _options(protocol)["requests_timeout"] = _http_limits()
        _options(protocol)["session_kwargs"] = {"trace_configs": [_trace()]}
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", f"{TIMEOUT:.0f}")
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")


def _http_limits() -> Any:
    import aiohttp  # a dependency of gcsfs, and of fsspec's HTTP

    return aiohttp.ClientTimeout(sock_connect=SOCKET_TIMEOUT_SECONDS, sock_read=SOCKET_TIMEOUT_SECONDS)


def _trace() -> Any:
    """Returns an aiohttp trace for the requests of a library that repeats them silently.

    The trace notes the reason of a repetition in the current `Progress`, and waits as long as a store asks.
    """
    import aiohttp

    async def begin(session: Any, context: Any, request: Any) -> None:
        progress = current_progress.get()
        if progress and request.url.query.get("alt") == "media":  # gcsfs repeats a request for contents that broke off
            key = (request.url, request.headers.get("Range"))
            if key in progress.requests and not progress.fault:
                progress.fault = "the connection broke off"
            progress.requests.add(key)

    async def end(session: Any, context: Any, request: Any) -> None:
        answer, progress = request.response, current_progress.get()
        if progress and is_busy(answer.status):
            progress.fault = f"{answer.status} {answer.reason}"
            await _wait_as_asked(answer.headers.get("Retry-After", ""))

    async def fail(session: Any, context: Any, request: Any) -> None:
        progress = current_progress.get()
        if progress and isinstance(request.exception, Exception):  # not the cancellation of one of several requests
            progress.fault = reason(request.exception)

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begin)
    trace.on_request_end.append(end)
    trace.on_request_exception.append(fail)
    return trace


async def _wait_as_asked(retry_after: str) -> None:
    """Waits the seconds that a Retry-After header states, at most `MAX_RETRY_AFTER_SECONDS`.

    Does not wait if the header states a date or is missing: the usual waits between requests suffice.
    """

    if retry_after.isdecimal():
        await asyncio.sleep(min(float(retry_after), MAX_RETRY_AFTER_SECONDS))
