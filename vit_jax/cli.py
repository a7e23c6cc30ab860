"""The common part of all command lines: errors become exit codes, and compiled programs are cached."""

import argparse
import contextlib
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.backend import register_backend_factory

from vit_jax import (
    LostHosts,
    NonFiniteLoss,
    Preempted,
    UserError,
    WrongText,
    exit_code,
    ignore_closed_stdout,
    printable,
    reason,
    tell,
    without_queries,
)
from vit_jax.config import find_text
from vit_jax.distributed import Supervisor, join_cluster
from vit_jax.machine import has_gpu, has_tpu, keep_freed_memory, reset_settings
from vit_jax.monitoring import python_seconds
from vit_jax.storage import cache
from vit_jax.streams import escape_stdout, flush_stderr

RESUME_ADVICE = "the same command continues from the last checkpoint, if there is one."
TERMINATED = "terminated", signal.SIGTERM


class Terminated(BaseException):
    """Raised when SIGTERM arrives, so that files are closed and worker processes are ended on the way out."""


def terminate(number: int, frame: Any) -> None:
    """Handles SIGTERM: raises `Terminated`."""
    raise Terminated


def run_command(command: Callable[[list[str]], None], rerun_advice: str = "", is_report: bool = False) -> None:
    """Calls a command with this process's arguments and ends the process.

    `rerun_advice` is a sentence on what the same command does when it is run again after an interruption. If the
    command has added a note to the exception, that note is printed instead, because the command knows what is saved.
    With `is_report`, the command ends quietly when the reader of its stdout closes it.

    Exit codes: 0 done; 1 a non-finite loss, or an internal error with its traceback;
    2 wrong usage; 42 preempted, with the state saved; 130 Ctrl-C; 143 SIGTERM; 134 a lost or stuck host. Before every
    code but 0, a sentence is printed; an internal error of a single process prints only its traceback.
    """
    escape_stdout()
    quiet_libraries()
    skip_absent_tpu()
    reset_settings()
    if jax.config.jax_platforms == "cpu" or not (has_tpu() or has_gpu()):
        keep_freed_memory()
    signal.signal(signal.SIGTERM, terminate)
    try:
        with ignore_closed_stdout() if is_report else contextlib.nullcontext():
            command(sys.argv)
        flush_stderr()
        return
    except (UserError, NonFiniteLoss, Preempted, LostHosts) as error:
        sentence, code = find_place(error, sys.argv) + str(error), exit_code(error)
    except (KeyboardInterrupt, Terminated) as error:
        word, number = ("interrupted", signal.SIGINT) if isinstance(error, KeyboardInterrupt) else TERMINATED
        advice = next(iter(getattr(error, "__notes__", [])), rerun_advice)
        sentence, code = f"{word}; {advice}" if advice else f"{word}.", 128 + number
    except Exception:
        if absent := describe_absent_devices():
            sentence, code = absent, 2
        elif not jax.distributed.is_initialized():
            raise
        else:
            tell(traceback.format_exc().rstrip())  # an ordinary exit would first wait for the other hosts
            sentence, code = "internal error; see the traceback above.", 1
    exit_with_message(sentence, code)


def find_place(error: BaseException, argv: list[str]) -> str:
    """Returns `FILE, line N: ` if an error is due to a text in the recipe that a command line names; else nothing."""
    cause: BaseException | None = error
    while cause and not isinstance(cause, WrongText):
        cause = cause.__cause__
    place = find_text(argv, *cause.texts) if isinstance(cause, WrongText) else None
    return f"{place}: " if place else ""


def exit_with_message(sentence: str, code: int) -> None:
    """Prints a sentence and ends the process at once, so that no thread of a library prints anything after it."""
    tell(f"vit_jax: {sentence}")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


class PlainFormatter(logging.Formatter):
    """Formats messages `without_queries` of addresses."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the text of a message."""
        return without_queries(super().format(record))


def quiet_libraries() -> None:
    """Keeps libraries' informational messages off the terminal; their warnings stay."""
    logging.basicConfig()
    for handler in logging.getLogger().handlers:  # a library that was imported before may have chosen another form
        if type(handler) is logging.StreamHandler:
            handler.setFormatter(PlainFormatter("%(levelname)s: %(message)s"))
    logging.getLogger("absl").setLevel(logging.WARNING)
    # Orbax logs tracebacks of what it raises too.
    logging.getLogger("absl").addFilter(lambda record: not (record.exc_info and "/orbax/" in record.pathname))
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # our own message says what failed
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # our own message says what failed
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    # Python's tracker removes the shared memory that worker processes leave, and would warn about it.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")


def skip_absent_tpu() -> None:
    """Keeps jax from starting libtpu on a machine without a TPU, where it would print errors at every start.

    On such a machine, libtpu is installed only to compile for TPUs of other machines. Nothing changes if a TPU seems to
    be present or JAX_PLATFORMS names it. The cluster detection of jax is never affected.
    """
    if has_tpu() or "tpu" in (jax.config.jax_platforms or ""):
        return
    register_backend_factory("tpu", no_tpu)


def no_tpu() -> None:
    """Replaces the start of libtpu.

    Raises:
        RuntimeError: always, like every backend that cannot start; jax then skips it.
    """
    raise RuntimeError("no TPU found on this machine; JAX_PLATFORMS=tpu lets libtpu look for one")


def describe_absent_devices() -> str:
    """Returns a sentence if JAX_PLATFORMS names devices that jax cannot start here; else nothing."""
    platforms = jax.config.jax_platforms
    if not platforms:
        return ""
    try:
        jax.devices()
    except Exception as error:
        why = f" ({reason(error).partition('. (set JAX_PLATFORMS')[0]})" if str(error) else ""
        advice = "unset it, or see what is missing with: python -m vit_jax.doctor"
        return f"JAX_PLATFORMS={platforms} names devices that do not start here{why}; {advice}"
    return ""


def use_compilation_cache() -> None:
    """Keeps compiled programs for the next run, in the cache of this user or where `jax_compilation_cache_dir` says.

    Raises:
        UserError: the cache cannot be written to.
    """
    if jax.config.jax_compilation_cache_dir is None:
        folder = cache.root() / "xla"
        with cache.write_errors():
            folder.mkdir(exist_ok=True, mode=0o700)
        jax.config.update("jax_compilation_cache_dir", str(folder))


def add_resolution(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds --resolution to a parser; `default` says what the resolution is without it."""
    words = f"pixels on a side, or HEIGHTxWIDTH, to which learned positions are resampled [{default}]"
    parser.add_argument("--resolution", type=parse_resolution, help=words)


def parse_resolution(text: str) -> int | tuple[int, ...]:
    """Returns a resolution in the form that `vit_jax.load` takes.

    Raises:
        UserError: it is not one or two numbers of pixels.
    """
    if not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5})?", text, re.ASCII):
        raise UserError(f"--resolution={printable(text, 40)} must be one size or HEIGHTxWIDTH, as in 384 or 384x512.")
    sides = tuple(map(int, text.split("x")))
    return sides[0] if len(sides) == 1 else sides


def join_hosts() -> None:
    """Joins the other hosts without supervising them, and keeps compiled programs.

    Raises:
        UserError: see `distributed.join_cluster`.
    """
    join_cluster()
    use_compilation_cache()


@contextlib.contextmanager
def supervised() -> Iterator[Supervisor]:
    """Joins the other hosts, supervises what is done inside, and keeps compiled programs. Yields the supervisor.

    Raises:
        UserError: see `distributed.join_cluster`.
    """
    with Supervisor(age=python_seconds()) as supervisor:
        supervisor.join()
        use_compilation_cache()
        yield supervisor
