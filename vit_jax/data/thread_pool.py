"""Threads that read and decode."""

import contextlib
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool


@contextlib.contextmanager
def open_thread_pool(workers: int) -> Iterator[ThreadPool]:
    """Yields so many threads; none is left when this ends, after an error too: an ending interpreter would abort."""
    pool = ThreadPool(workers)
    try:
        yield pool
    finally:
        pool.terminate()
        pool.join()
