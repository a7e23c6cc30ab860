"""Output to stdout and stderr, which may be closed before a command ends: by `head`, by a terminal that is closed."""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import TextIO

from vit_jax.errors import without_queries

CLOSED = (errno.EPIPE, errno.EIO)  # of a pipe, of a terminal; what else fails may work later


def escape_stdout() -> None:
    """Makes stdout escape characters that its encoding lacks, as stderr does, so that printing a name cannot fail."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # in a notebook it is not
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def ignore_closed_stderr() -> Iterator[None]:
    """Suppresses the error if the code inside cannot print to stderr.

    If stderr is closed, it is redirected to the null device: later prints are discarded without an error.
    """
    try:
        yield
    except OSError as error:
        if error.errno in CLOSED:
            silence(sys.stderr)


@ignore_closed_stderr()
def tell(text: str) -> None:
    """Prints a line to stderr, without the queries of URLs (`without_queries`); does nothing if stderr is closed."""
    print(without_queries(text), file=sys.stderr, flush=True)


def flush_stderr() -> None:
    """Flushes stderr before the process ends. Python would change the exit code if it could not write what is left."""
    try:
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


@contextlib.contextmanager
def ignore_closed_stdout() -> Iterator[None]:
    """Suppresses the error if the code inside prints to a stdout whose reader has closed it, as `head` does.

    Raises:
        BrokenPipeError: another pipe or connection is closed.
    """
    try:
        yield
    except BrokenPipeError:
        if not stdout_is_closed():
            raise
    finally:
        try:
            print(end="", flush=True)
        except BrokenPipeError:
            silence(sys.stdout)


def silence(stream: TextIO) -> None:
    """Redirects a stream to the null device, so that Python does not complain that it cannot write what is left."""
    with contextlib.suppress(OSError):  # it has no descriptor, as that of a notebook
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def stdout_is_closed() -> bool:
    """Returns whether stdout is a pipe that nothing reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are always reported
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
