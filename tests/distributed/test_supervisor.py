"""How hosts speak with each other: in one process, threads as hosts, over a store like JAX's."""

import contextlib
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
from vit_jax import LostHosts, Preempted, UserError
from vit_jax.distributed import coordination, supervisor

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
    store, pods = Store(), [coordination.ProcessGroup() for _ in range(count)]
    coordination.ProcessGroup._topics.clear()
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
    assert coordination.ProcessGroup().share("anything", "x") == ["x"]


@pytest.fixture
def guards(monkeypatch):
    """Four guards that speak with each other ten times as often, not entered."""
    monkeypatch.setattr(supervisor, "PERIOD", 0.05)
    made = [supervisor.Guard() for _ in range(4)]
    for one, its_pod in zip(made, make_pods(4), strict=True):
        one.pod = its_pod
        threading.Thread(target=one._listen, daemon=True).start()
    yield made
    for one in made:
        one._over.set()


def steps(one, saves, stops):
    """Counts until the hosts agree to end; notes at which counts they agreed to save."""
    for _ in range(2000):
        try:
            one.tick()
        except Preempted:
            stops.append(one._ticks)
            return
        if one.save_due():
            saves.append(one._ticks)
        time.sleep(0.001 * (1 + one.pod.host))  # some are faster


def test_saves_and_the_end_come_at_the_same_counts_everywhere(guards):
    saves, stops = [[] for _ in guards], []
    threads = [threading.Thread(target=steps, args=[one, saves[one.pod.host], stops]) for one in guards]
    for thread in threads:
        thread.start()
    for _ in range(3):
        time.sleep(0.1)
        guards[0]._wishes.add("save")
    guards[0]._wishes.add("save")  # at the same moment as two hosts are told to end
    guards[1]._wishes.add("stop")
    guards[3]._wishes.add("stop")
    for thread in threads:
        thread.join(20)
    assert len(stops) == 4 and len(set(stops)) == 1 and stops[0] > 1
    assert 2 <= len(saves[0]) <= 4 and all(counts == saves[0] for counts in saves)


def test_a_store_that_fails_now_and_then_is_asked_again(guards):
    store = guards[0].pod._client
    right, calls = store.key_value_set, [0]

    def sometimes(*args):
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: once")
        right(*args)

    store.key_value_set = sometimes
    stops = []
    threads = [threading.Thread(target=steps, args=[one, [], stops]) for one in guards]
    for thread in threads:
        thread.start()
    guards[2]._wishes.add("stop")
    for thread in threads:
        thread.join(20)
    assert len(stops) == 4 and len(set(stops)) == 1


@pytest.mark.parametrize("error", [None, Preempted("saved")])
def test_the_host_that_coordinates_leaves_last(guards, monkeypatch, error):
    monkeypatch.setattr(supervisor, "PARTING", 0.1)
    left = []

    def leave(one):
        time.sleep(0.5 * one.pod.host)  # what a host closes may take longer than its last words
        one._tell_end(error)
        left.append((time.monotonic(), one.pod.host))

    began = time.monotonic()
    everywhere([lambda one=one: leave(one) for one in guards])
    assert all(when - began >= 1.5 for when, _ in left)


def test_a_host_that_fell_silent_is_named_and_one_that_left_is_not(guards, monkeypatch):
    ended = {}

    def abort(self, sentence):
        ended[self.pod.host] = sentence
        self._over.set()
        raise jax.errors.JaxRuntimeError("the process ends here")

    monkeypatch.setattr(supervisor, "LOST", 0.5)
    monkeypatch.setattr(supervisor.Guard, "_abort", abort)
    one = guards[0]
    guards[1].pod.tell("bye/1", "")
    for host in (0, 3):
        guards[host].at("step 7")
    one._pipe = os.pipe()
    time.sleep(0.3)
    guards[1]._over.set()
    guards[2]._over.set()
    with pytest.raises(jax.errors.JaxRuntimeError):
        one._watch()
    words = "host 2 has not been heard of for 0.5 s; behind the others: host 2 'starting' for "
    assert ended[0].startswith(words) and "; at host 0 'step 7' for 1 s, host 3 'step 7' for " in ended[0]
    time.sleep(0.2)
    assert ended == {0: ended[0], 3: ended[0]}  # who is left is told, and ends as well


@pytest.mark.parametrize("entered", [False, True])
def test_alone_it_saves_and_ends_by_its_own_clock(entered):
    one = supervisor.Guard()
    one.save_every = 0.2
    with one if entered else contextlib.nullcontext():
        one.tick()
        assert not one.save_due()
        time.sleep(1.0)
        one.tick()
        one.tick()
        assert one.save_due()
        one.saved()
        assert not one.save_due()


def test_what_another_thread_found_is_raised_in_the_main_one():
    one = supervisor.Guard()
    one.tick()
    one.fail(UserError("somebody else writes here"))
    with pytest.raises(UserError, match="somebody else"):
        one.tick()
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
        coordination.join_cluster()


def test_half_a_cluster_is_not_taken_for_none(monkeypatch):
    def initialize(**arguments):
        raise ValueError("Number of processes must be defined.")

    def lone(**arguments):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(UserError, match="cannot join the other processes: Number of processes"):
        coordination.join_cluster()
    monkeypatch.setattr(jax.distributed, "initialize", lone)
    monkeypatch.setenv("JAX_PROCESS_ID", "2")
    with pytest.raises(UserError, match="cannot join the other processes: coordinator_address"):
        coordination.join_cluster()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "four")
    with pytest.raises(UserError, match=r"cannot join the other processes: .*'four'"):
        coordination.join_cluster()


def test_hosts_do_not_speak_through_a_proxy(monkeypatch):
    given = {}

    def initialize(**arguments):
        given.update(arguments, proxies=[name for name in os.environ if "proxy" in name.lower()])

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for name, value in {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2", "HTTPS_PROXY": "http://proxy"}.items():
        monkeypatch.setenv(name, value)
    coordination.join_cluster()
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
    code = "import numpy as np\nfrom vit_jax.distributed.supervisor import Guard\n"
    code += "with Guard() as guard:\n    print(flush=True)\n"
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
    assert text == f"vit_jax: {supervisor.STARTUP}\n"
