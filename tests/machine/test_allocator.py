"""The allocator keeps freed memory, unless the environment or the C library says otherwise."""

import os
import platform
import subprocess
import sys

import pytest

from vit_jax.machine import host

# A thread takes, writes and frees 100 MB twice, and prints how many pages the second time maps.
AGAIN = """
import ctypes, resource, threading
from vit_jax.machine import keep_freed_memory
{call}
library, size = ctypes.CDLL(None), 100 << 20
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def use():
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = library.malloc(ctypes.c_size_t(size))
        ctypes.memset(block, 1, size)
        library.free(block)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=use)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize(("call", "kept"), [("", False), ("assert keep_freed_memory()", True)])
def test_freed_memory_is_not_mapped_again(call, kept):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", AGAIN.format(call=call)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (int(result.stdout) < 20) is kept


def test_another_library_and_the_environment_are_left_alone(monkeypatch):
    monkeypatch.setattr(host.ctypes, "CDLL", None)  # would fail
    monkeypatch.setattr(host.platform, "libc_ver", lambda: ("", ""))
    assert not host.keep_freed_memory()
    monkeypatch.setattr(host.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "8")
    assert not host.keep_freed_memory()
