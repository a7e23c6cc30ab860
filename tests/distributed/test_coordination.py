"""How hosts exchange values: in one process, threads as hosts, over a store like JAX's."""

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from vit_jax import LostHosts, UserError
from vit_jax.distributed import coordination, lost_or_stuck_hosts
from vit_jax.distributed.coordination import SINGLE_HOST, ProcessGroup, run_on_all

SLICES = {"MEGASCALE_COORDINATOR_ADDRESS": "host", "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}


class Store:
    """What JAX's coordination service does, for threads; every `fails`-th write fails."""

    def __init__(self, fails=0):
        self.values, self.lock, self.fails, self.writes = {}, threading.Condition(), fails, 0
        self.sent = 0  # characters of the values that were read

    def key_value_set(self, key, value, replace=False):
        with self.lock:
            self.writes += 1
            if self.fails and self.writes % self.fails == 0:
                raise jax.errors.JaxRuntimeError("UNAVAILABLE: once")
            if key in self.values and not replace:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS: key")
            self.values[key] = value
            self.lock.notify_all()

    def key_value_dir_get(self, folder):
        with self.lock:
            found = [(key, value) for key, value in self.values.items() if key.startswith(folder)]
            self.sent += sum(len(value) for _, value in found)
            return found

    def blocking_key_value_get(self, key, milliseconds):
        with self.lock:
            if not self.lock.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: none")
            self.sent += len(self.values[key])
            return self.values[key]


def make_groups(count, fails=0):
    """The hosts of one run."""
    store, calls = Store(fails), Counter()
    return [ProcessGroup(store, host, count, calls) for host in range(count)]


def everywhere(calls):
    """Returns what each host's call returns, all at once."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def groups():
    return make_groups(4)


def test_every_host_gets_every_value_in_order_and_again(groups):
    for turn in ("a", "b"):
        values = everywhere([lambda one=one, turn=turn: one.all_gather("name", [turn, one.host]) for one in groups])
        assert values == [[[turn, host] for host in range(4)]] * 4


def test_the_work_of_the_store_grows_as_the_hosts():
    """Only host 0 lists the values, which the others get from it, equal ones once."""
    hosts, value = 64, "x" * 1000
    groups = make_groups(hosts)
    store = groups[0]._store
    listed = []
    for one in groups[1:]:
        one.get = lambda folder, one=one: listed.append(one.host) or {}
    assert everywhere([lambda one=one: one.all_gather("facts", value) for one in groups]) == [[value] * hosts] * hosts
    assert listed == [] and len(store.values["vit_jax/gathered/facts/1"]) < 2 * len(value)


def test_who_does_not_come_is_named(groups):
    with pytest.raises(LostHosts, match=r"hosts did not reach 'restore' within 0.3 s: 1, 3; the log of each"):
        everywhere([lambda one=one: one.all_gather("restore", "x", 0.3) for one in groups if one.host in (0, 2)])


def test_host_0_is_named_where_it_does_not_come(groups, monkeypatch):
    monkeypatch.setattr(coordination, "GATHER_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(coordination, "GATHER_WAIT_SECONDS", 0.05)
    with pytest.raises(LostHosts, match=r"hosts did not reach 'restore' within 0.1 s: 0;"):
        groups[2].all_gather("restore", "x", 0.1)


def test_alone_there_is_nobody_to_wait_for():
    assert coordination.current_group().all_gather("anything", "x") == ["x"]


@pytest.mark.parametrize(("error", "kind"), [(UserError("no room"), UserError), (ValueError("a bug"), RuntimeError)])
def test_what_fails_on_one_host_fails_on_all(groups, error, kind):
    def work(host):
        if host == 2:
            raise error
        return {"host": host}

    def outcome(one):
        try:
            return run_on_all(one, "work", lambda: work(one.host))
        except Exception as raised:
            return type(raised), str(raised)

    outcomes = everywhere([lambda one=one: outcome(one) for one in groups])
    assert outcomes.pop(2) == (type(error), str(error))
    assert outcomes == [(kind, f"on host 2: {error}")] * 3
    assert run_on_all(SINGLE_HOST, "work", lambda: work(0)) == [{"host": 0}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MEGASCALE_SLICE_ID": None}, "set MEGASCALE_SLICE_ID, or unset all variables MEGASCALE"),
        ({"MEGASCALE_NUM_SLICES": None}, "set MEGASCALE_NUM_SLICES, or"),
        ({"MEGASCALE_SLICE_ID": "2"}, "set a slice ID below the number of slices, or"),
        ({"MEGASCALE_NUM_SLICES": "two"}, "are incomplete or wrong"),
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


def test_hosts_join_directly_and_are_told_who_is_lost_before_jax_ends_them(monkeypatch):
    given = {}

    def initialize(**arguments):
        given.update(arguments, proxies=[name for name in os.environ if "proxy" in name.lower()])

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for name, value in {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2", "HTTPS_PROXY": "http://proxy"}.items():
        monkeypatch.setenv(name, value)
    coordination.join_cluster()
    assert (given["num_processes"], given["process_id"]) == (4, 2)
    # JAX's beats are up to half of it apart.
    assert given["heartbeat_timeout_seconds"] >= 2 * lost_or_stuck_hosts.LOST_AFTER_SECONDS
    assert not {"HTTPS_PROXY", "https_proxy", "http_proxy"} & set(given["proxies"])
    assert os.environ["HTTPS_PROXY"] == "http://proxy"


def test_a_value_that_is_there_already_is_never_gathered():
    store = Store()
    for host in (0, 1):
        store.key_value_set(f"vit_jax/gather/preflight/1/{host}", '"stale"')
    with pytest.raises(jax.errors.JaxRuntimeError, match="ALREADY_EXISTS"):
        ProcessGroup(store, 0, 2, Counter()).all_gather("preflight", "new")
