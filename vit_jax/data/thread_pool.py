"""Threads that read and decode."""

import contextlib
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool


@contextlib.contextmanager
def open_thread_pool(workers: int) -> Iterator[ThreadPool]:
    """Yields a pool of `workers` threads.

    When this ends, also after an error, all threads have ended. The interpreter would abort if it ended before them.
    """
    pool = ThreadPool(workers)
    try:
        yield pool
    finally:
        pool.terminate()
        pool.join()
