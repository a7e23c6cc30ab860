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
    """Makes stdout escape what its encoding does not have, as stderr does: no command ends for a name in a line."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # in a notebook it is not
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def ignore_closed_stderr() -> Iterator[None]:
    """Ends the code inside, which prints to stderr, quietly if printing fails.

    If stderr is closed, what is printed to it later is discarded without an error.
    """
    try:
        yield
    except OSError as error:
        if error.errno in CLOSED:
            silence(sys.stderr)


@ignore_closed_stderr()
def tell(text: str) -> None:
    """Prints to stderr, `without_queries`, if anything reads it: no run ends for a line that nobody sees."""
    print(without_queries(text), file=sys.stderr, flush=True)


def flush_stderr() -> None:
    """Flushes stderr before the process ends. Python would change the exit code if it could not write what is left."""
    try:
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


@contextlib.contextmanager
def ignore_closed_stdout() -> Iterator[None]:
    """Ends what is inside quietly when the program that reads stdout has closed it, as `head` does.

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
