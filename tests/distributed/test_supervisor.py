"""A supervisor alone, in this process and in others, and how hosts leave a run."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.distributed.test_coordination import everywhere, make_groups
from vit_jax import UserError
from vit_jax.distributed import lost_or_stuck_hosts
from vit_jax.distributed.host_shutdown import HostShutdown
from vit_jax.distributed.supervisor import Supervisor

pytestmark = pytest.mark.flaky(reruns=1)  # these wait on the clock


def test_the_host_that_coordinates_leaves_last():
    left = []

    def leave(group):
        time.sleep(0.2 * group.host)  # what a host closes may take long
        HostShutdown(group).leave_group()
        left.append((time.monotonic(), group.host))

    began = time.monotonic()
    everywhere([lambda group=group: leave(group) for group in make_groups(4)])
    assert {host: when - began >= 0.6 for when, host in left} == {0: True, 1: False, 2: False, 3: True}


def test_a_host_that_cannot_reach_the_others_leaves_all_the_same(capsys):
    began = time.monotonic()
    HostShutdown(make_groups(2)[0], shutdown_seconds=0.2).leave_group()  # host 1 never leaves
    assert 0.2 <= time.monotonic() - began < 2
    HostShutdown(make_groups(2, fails=1)[1]).announce("a reason", 1)
    assert "cannot reach the other hosts: UNAVAILABLE" in capsys.readouterr().err


def test_the_first_announcement_counts_and_is_the_others():
    groups = make_groups(3)
    first, second, third = map(HostShutdown, groups)
    assert third.announcement() is None
    first.announce("the disk is full.", 2)
    second.announce("something else.", 1)
    assert first.announcement() is None
    assert second.announcement() == third.announcement() == (0, "the disk is full.", 2)


def test_one_of_two_hosts_tells_the_other_why_it_leaves_and_that_it_has_left(monkeypatch):
    """Host 0 waits for all that have not left."""
    first, second = make_groups(2)
    with pytest.raises(UserError), Supervisor(second):
        raise UserError("the disk is full.")
    assert HostShutdown(first).announcement() == (1, "the disk is full.", 2)
    assert HostShutdown(first).departed_hosts() == ["1"]
    first, second = make_groups(2)
    monkeypatch.setattr(multiprocessing, "active_children", list)  # those of other tests go on
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="42"):
        HostShutdown(second).end_process("preempted.", 42)
    assert HostShutdown(first).departed_hosts() == ["1"]


@pytest.mark.parametrize("entered", [False, True])
def test_alone_it_saves_by_its_own_clock(entered):
    one = Supervisor()
    one.set_save_interval(0.2)
    with one if entered else contextlib.nullcontext():
        one.count_step()
        assert not one.save_due()
        time.sleep(1.0)
        one.count_step()
        one.count_step()
        assert one.save_due()
        one.note_save()
        assert not one.save_due()


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


def test_a_download_may_take_longer_after_an_exchange_of_the_hosts_too():
    clock = Clock()
    one = Supervisor(clock=clock)
    watchdog = one._monitor.group_state.watchdog
    watchdog.stall_limit = 10.0
    with one.phase("opening the data", patient=True):
        one.all_gather("fields")
        clock.seconds += 20
        assert watchdog.find_fault() is None
        with one.phase("opening a teacher"):
            one.count_step()
        clock.seconds += 20
        assert watchdog.find_fault() is None
    clock.seconds += 20
    assert "no progress" in watchdog.find_fault()


def test_after_an_exchange_the_phase_goes_on_that_a_report_of_a_stuck_host_names():
    one = Supervisor()
    watchdog = one._monitor.group_state.watchdog
    with one.phase("opening the workdir"):
        with one.phase("restoring"):
            one.all_gather("manifest 3")
            assert watchdog.phase == "restoring"
        one.all_gather("the workdir")
        assert watchdog.phase == "opening the workdir"
    one.all_gather("facts")
    assert watchdog.phase == "after 'facts'"


def test_without_an_interval_it_never_saves_by_the_clock():
    clock = Clock()
    one = Supervisor(clock=clock)
    one.set_save_interval(0)
    clock.seconds = 1e6
    one.count_step()
    assert not one.save_due()


def test_what_another_thread_found_is_raised_in_the_main_one():
    one = Supervisor()
    one.raise_pending()
    one.raise_later(UserError("somebody else writes here"))
    one.count_step()
    with pytest.raises(UserError, match="somebody else"):
        one.raise_pending()
    one.raise_pending()


HANGS = """
import time
from vit_jax.distributed import Supervisor
with Supervisor() as supervisor:
    supervisor.begin_run(1.0)
    supervisor.enter_phase("data of step 3")
    time.sleep(60)
"""


def start(code):
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_hang_ends_the_process_with_every_stack_and_where_it_was():
    began = time.monotonic()
    process = start(HANGS)
    _, text = process.communicate(timeout=50)
    assert process.returncode == 128 + signal.SIGABRT and time.monotonic() - began < 40
    assert "no progress for 1 s; --config.stall_limit allows more; now host 0 in 'data of step 3'" in text
    assert 'File "<string>", line 7 in <module>' in text and "_watch" in text


def test_sigterm_before_the_first_step_ends_at_once_even_while_the_main_thread_is_not_in_python():
    # A sort of many numbers stands for a compiler: Python's own handlers would wait for its end.
    code = "import numpy as np\nfrom vit_jax.distributed import Supervisor\n"
    code += "with Supervisor() as supervisor:\n    print(flush=True)\n"
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
    assert text == f"vit_jax: {lost_or_stuck_hosts.STARTUP}\n"
