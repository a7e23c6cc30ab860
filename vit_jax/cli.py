"""What the command lines have in common: errors to exit codes, the compilation cache."""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.backend import register_backend_factory

from vit_jax import LostHosts, NonFiniteLoss, Preempted, UserError, exit_code
from vit_jax.machine import has_tpu
from vit_jax.storage import cache

AGAIN = "the same command goes on from what was saved last, if anything was."
TERMINATED = "terminated", signal.SIGTERM


class Terminated(BaseException):
    """SIGTERM came: files are closed and worker processes ended on the way out."""


def terminate(number: int, frame: Any) -> None:
    """Handles SIGTERM."""
    raise Terminated


def run(command: Callable[[list[str]], None], again: str = "") -> None:
    """Calls a command with this process's arguments and ends the process.

    `again` is a sentence on what the same command does when it is given again after an interruption; a note that the
    command adds to the interruption is told instead: it knows what is saved.

    Exit codes: 0 done; 1 a non-finite loss, told in a sentence, or a bug, with its traceback; 2 wrong usage, told in a
    sentence; 42 preempted, what was learnt is saved; 130 Ctrl-C; 143 SIGTERM; 134 a lost or stuck host.
    """
    quiet_libraries()
    skip_absent_tpu()
    signal.signal(signal.SIGTERM, terminate)
    try:
        return command(sys.argv)
    except (UserError, NonFiniteLoss, Preempted, LostHosts) as error:
        sentence, code = str(error), exit_code(error)
    except (KeyboardInterrupt, Terminated) as error:
        word, number = ("interrupted", signal.SIGINT) if isinstance(error, KeyboardInterrupt) else TERMINATED
        told = next(iter(getattr(error, "__notes__", [])), again)
        sentence, code = f"{word}; {told}" if told else f"{word}.", 128 + number
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()  # the usual end would first wait for the other hosts
        sentence, code = "a bug, told above.", 1
    leave(sentence, code)


def leave(sentence: str, code: int) -> None:
    """Ends the process with a sentence as its last words: what libraries' threads would still say or do is cut off."""
    print(f"vit_jax: {sentence}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def quiet_libraries() -> None:
    """Keeps libraries' remarks on their own workings off the terminal; their warnings stay."""
    logging.getLogger("absl").setLevel(logging.WARNING)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # what it fails at is told in a sentence
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # likewise
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    # Python's tracker removes the shared memory of worker processes that ends with this one, and would tell of it.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")


def skip_absent_tpu() -> None:
    """Keeps jax from asking libtpu for TPUs where there is none: it would print errors at every start.

    libtpu is there to compile for TPUs that are elsewhere. Where a TPU seems to be, by our signs or by jax's, or where
    JAX_PLATFORMS names it, nothing is changed; neither is what jax knows of clusters.
    """
    if has_tpu() or "tpu" in (jax.config.jax_platforms or ""):
        return
    register_backend_factory("tpu", no_tpu)


def no_tpu() -> None:
    """Answers jax in libtpu's place.

    Raises:
        RuntimeError: as backends that do not start do, which jax passes over.
    """
    raise RuntimeError("no TPU seems to be here; JAX_PLATFORMS=tpu lets libtpu look for one")


def use_compilation_cache() -> None:
    """Keeps compiled programs for the next run, in a folder that only this user can write."""
    if jax.config.jax_compilation_cache_dir is None:
        folder = cache.root() / "xla"
        with cache.write_errors():
            folder.mkdir(exist_ok=True, mode=0o700)
        jax.config.update("jax_compilation_cache_dir", str(folder))
