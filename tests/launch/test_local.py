"""Several processes on this machine, as `launch/local.py` starts them."""

import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.flaky(reruns=1)  # these wait on the clock


def launcher(*words, code):
    command = [sys.executable, "launch/local.py", *words, "--", sys.executable, "-c", code]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_the_launcher_says_who_failed_first_and_ends_the_others():
    code = "import os, sys, time; n = os.environ['JAX_PROCESS_ID']; print('I am', n, flush=True)\n"
    code += "if n == '1': time.sleep(0.5); sys.exit(3)\ntime.sleep(60)"
    process = launcher("-n", "3", "--grace=0.5", code=code)
    text = process.communicate(timeout=30)[1]
    assert process.returncode == 3
    assert "process 1 ended first, with exit code 3\n" in text and "killed after 0.5 s: process 0, 2\n" in text
    assert all(f"[{number}] I am {number}\n" in text for number in range(3))


def test_the_launcher_passes_sigterm_on_and_ends_as_its_processes():
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(42)); print('up', flush=True)\n"
    process = launcher("-n", "2", code=f"{code}time.sleep(60)")
    assert {process.stderr.readline(), process.stderr.readline()} == {"[0] up\n", "[1] up\n"}
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=30)[1]
    assert process.returncode == 42 and "with exit code 42" in text
    process = launcher("-n", "2", code="import os; os.kill(os.getpid(), 9)")
    assert "with signal SIGKILL" in process.communicate(timeout=30)[1] and process.returncode == 137
