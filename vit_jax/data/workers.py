"""The worker processes of the loader: how they treat signals, and the message if a signal has ended one of them."""

import contextlib
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker

from vit_jax import UserError
from vit_jax.machine import keep_freed_memory

FEW_CORES = 7  # on at most so many, threads read as fast as processes: docs/data.md, "What a host can feed"
STOPS = (signal.SIGINT, signal.SIGTERM)  # answered by the main process; terminals and schedulers send them to all


def choose_workers(asked: int | str, cores: int) -> int:
    """Returns the number of worker processes; 0: threads.

    Args:
        asked: the setting `data.workers`. With `auto`, there are two workers fewer than cores, which leaves two cores
            to this process, or threads if there are at most `FEW_CORES` cores.
        cores: number of cores that this process may use.
    """
    if asked == "auto":
        return 0 if cores <= FEW_CORES else cores - 2
    return int(asked)


def start_without_signals(call: Callable[[], None]) -> threading.Thread:
    """Starts a thread that calls `call` with SIGINT and SIGTERM blocked, and returns it.

    The process does not wait for its end. Processes that the thread starts have these signals blocked, too. Otherwise a
    signal to the whole job could end them before they reach `set_up_worker`.
    """

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        call()

    resource_tracker.ensure_running()  # its start unblocks the signals of the thread that starts it
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def set_up_worker() -> None:
    """Sets up this process if it is a worker process; does nothing in the main process.

    A worker ignores SIGINT and SIGTERM, which are sent to all processes of a job, and ends with the main process. It
    keeps the memory that one image has used for the next image.
    """
    if not multiprocessing.current_process().daemon:
        return
    keep_freed_memory()
    with contextlib.suppress(ValueError):  # not in the main thread
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def worker_exit_errors(workers: int) -> Iterator[None]:
    """Explains that a signal has ended one of the `workers` worker processes.

    Raises:
        UserError: in place of grain's error; it names the signal and says what to do.
    """
    try:
        yield
    except RuntimeError as error:
        match = re.match(r"Worker process was terminated unexpectedly with exit code -(\d+)", str(error))
        if not match:
            raise
        number = signal.Signals(int(match[1]))
        cause = ", as the kernel's out-of-memory killer does (see `dmesg`)" if number == signal.SIGKILL else ""
        fewer = f"less than {workers}, or to 0" if workers > 1 else "0"
        raise UserError(
            f"a worker process of the loader was ended by {number.name}{cause}; set --config.data.workers to {fewer} "
            "for threads instead of processes."
        ) from error
