"""How hosts speak with each other: in one process, threads as hosts, over a store like JAX's."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from tests.conftest import ROOT
from vit_jax import LostHosts, Preempted, UserError, guard, pod

SLICES = {"MEGASCALE_COORDINATOR_ADDRESS": "host", "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}


class Store:
    """What JAX's coordination service does, for threads."""

    def __init__(self):
        self.values, self.lock = {}, threading.Lock()

    def key_value_set(self, key, value, replace=False):
        with self.lock:
            if key in self.values and not replace:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS: key")
            self.values[key] = value

    def key_value_dir_get(self, folder):
        with self.lock:
            return [(key, value) for key, value in self.values.items() if key.startswith(folder)]


def make_pods(count):
    store, pods = Store(), [pod.Pod() for _ in range(count)]
    for host, one in enumerate(pods):
        one._client, one.host, one.hosts = store, host, count
    return pods


def everywhere(calls):
    """Returns what each host's call returns, all at once."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def pods():
    return make_pods(4)


def test_every_host_gets_every_value_in_order_and_again(pods):
    for turn in ("a", "b"):
        values = everywhere([lambda one=one, turn=turn: one.share("name", f"{turn}{one.host}") for one in pods])
        assert values == [[f"{turn}{host}" for host in range(4)]] * 4


def test_who_does_not_come_is_named(pods):
    for one in pods:
        one.limit = 0.3
    with pytest.raises(LostHosts, match=r"waited 0.3 s at 'restore' for host 1, 3; its log says where it is"):
        everywhere([lambda one=one: one.share("restore", "x") for one in pods if one.host in (0, 2)])


def test_alone_there_is_nobody_to_wait_for():
    assert pod.Pod().share("anything", "x") == ["x"]


@pytest.mark.parametrize("count", [1, 4])
def test_a_stop_comes_at_the_same_count_everywhere(count):
    guards = [guard.Guard() for _ in range(count)]
    for one, its_pod in zip(guards, make_pods(count), strict=True):
        one.pod = its_pod
    reached = []

    def steps(one):
        for _ in range(500):
            try:
                one.tick()
            except Preempted:
                reached.append(one._ticks)
                return
            time.sleep(0.001 * (1 + one.pod.host))  # some are faster

    threads = [threading.Thread(target=steps, args=[one]) for one in guards]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    everywhere([lambda one=one: one._agree("stop") for one in guards])
    for thread in threads:
        thread.join()
    assert len(reached) == count and len(set(reached)) == 1 and reached[0] > 1


def test_a_save_that_is_due_is_told_once_and_at_the_same_count():
    one = guard.Guard()
    one.tick()
    one._agree("save 1")
    assert not one.save_due()
    one.tick()
    assert one.save_due() and not one.save_due()
    one._agree("save 2")
    one.tick()
    assert one.save_due()


def test_what_another_thread_found_is_raised_in_the_main_one():
    one = guard.Guard()
    one.tick()
    one.fail(UserError("somebody else writes here"))
    with pytest.raises(UserError, match="somebody else"):
        one.tick()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MEGASCALE_SLICE_ID": None}, "set MEGASCALE_SLICE_ID too, or unset them all"),
        ({"MEGASCALE_NUM_SLICES": None}, "set MEGASCALE_NUM_SLICES too"),
        ({"MEGASCALE_SLICE_ID": "2"}, "set a slice's number below that of slices too"),
        ({"MEGASCALE_NUM_SLICES": "two"}, "half declared"),
    ],
)
def test_slices_that_are_half_declared(monkeypatch, change, words):
    for name, value in (SLICES | change).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        pod.join()


def test_half_a_cluster_is_not_taken_for_none(monkeypatch):
    def initialize(**arguments):
        raise ValueError("Number of processes must be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(UserError, match="cannot join the other processes: Number of processes"):
        pod.join()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "four")
    with pytest.raises(UserError, match=r"cannot join the other processes: .*'four'"):
        pod.join()


def test_hosts_do_not_speak_through_a_proxy(monkeypatch):
    given = {}

    def initialize(**arguments):
        given.update(arguments, proxies=[name for name in os.environ if "proxy" in name.lower()])

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for name, value in {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2", "HTTPS_PROXY": "http://proxy"}.items():
        monkeypatch.setenv(name, value)
    pod.join()
    assert (given["num_processes"], given["process_id"]) == (4, 2)
    assert not {"HTTPS_PROXY", "https_proxy", "http_proxy"} & set(given["proxies"])
    assert os.environ["HTTPS_PROXY"] == "http://proxy"


HANGS = """
import time
from vit_jax.guard import Guard
with Guard() as guard:
    guard.limit = 1.0
    guard.at("data of step 3")
    time.sleep(60)
"""


def start(code):
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_a_hang_ends_the_process_with_every_stack_and_where_it_was():
    began = time.monotonic()
    process = start(HANGS)
    _, text = process.communicate(timeout=50)
    assert process.returncode == 128 + signal.SIGABRT and time.monotonic() - began < 40
    assert "no progress for 1 s; --config.stall_limit allows more; at host 0 'data of step 3'" in text
    assert 'File "<string>", line 7 in <module>' in text and "_watch" in text


def test_sigterm_before_the_first_step_ends_at_once_even_while_the_main_thread_is_not_in_python():
    # A sort of many numbers stands for a compiler: Python's own handlers would wait for its end.
    code = "import numpy as np\nfrom vit_jax.guard import Guard\nwith Guard() as guard:\n    print(flush=True)\n"
    code += "    np.random.default_rng(0).random(6 * 10**7).sort()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    time.sleep(1.0)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=50)
    assert process.returncode == 42 and time.monotonic() - began < 3
    assert text == f"vit_jax: {guard.STARTUP}\n"
