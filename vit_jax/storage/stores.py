"""Opens fsspec's file systems with time limits, and notes the errors after which their libraries repeat requests."""

import asyncio
import functools
import os
from typing import Any

import fsspec

from vit_jax import reason
from vit_jax.storage import retry, timeout

# Protocol -> the extra that opens its paths.
EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3", "hf": "hub"}
SOCKET_TIMEOUT_SECONDS = 20.0  # without a byte, after which a connection is given up for another
MAX_RETRY_AFTER_SECONDS = 30.0  # the longest wait in seconds for which a store may ask


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
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", f"{timeout.TIMEOUT:.0f}")
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
        progress = timeout.current_progress.get()
        if progress and request.url.query.get("alt") == "media":  # gcsfs repeats a request for contents that broke off
            key = (request.url, request.headers.get("Range"))
            if key in progress.requests and not progress.fault:
                progress.fault = "the connection broke off"
            progress.requests.add(key)

    async def end(session: Any, context: Any, request: Any) -> None:
        answer, progress = request.response, timeout.current_progress.get()
        if progress and retry.is_busy(answer.status):
            progress.fault = f"{answer.status} {answer.reason}"
            await _wait_as_asked(answer.headers.get("Retry-After", ""))

    async def fail(session: Any, context: Any, request: Any) -> None:
        progress = timeout.current_progress.get()
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
