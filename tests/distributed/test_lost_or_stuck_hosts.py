"""Hosts that fall silent or stop moving on, seen by a clock that the tests set."""

import re

import pytest

from vit_jax.distributed.lost_or_stuck_hosts import Watchdog


class Clock:
    seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def hosts(clock):
    return [Watchdog(host, 4, lost=60.0, clock=clock) for host in range(4)]


def pass_time(clock, seconds, hosts, left=()):
    """Lets time pass, in which some hosts exchange heartbeats every second; returns what each notices, once."""
    found = {}
    for _ in range(seconds):
        clock.seconds += 1
        beats = {str(number): one.heartbeat() for number, one in hosts.items()}
        for number, one in hosts.items():
            one.record_heartbeats(beats, left)
            found.setdefault(number, set()).add(one.find_fault())
    return found


def test_hosts_that_beat_are_well(hosts, clock):
    found = pass_time(clock, 300, dict(enumerate(hosts)))
    assert found == {host: {None} for host in range(4)}


def test_a_host_that_fell_silent_is_named_and_one_that_left_is_not(hosts, clock):
    pass_time(clock, 5, dict(enumerate(hosts)))
    for host in (0, 3):
        hosts[host].enter("step 7")
    found = pass_time(clock, 62, {0: hosts[0], 3: hosts[3]}, left=["1"])
    sentence = min(found[0] - {None})  # the first
    words = r"nothing was heard from host 2 for 60 s; behind the others: host 2 in 'starting' for 6\d s; "
    assert re.fullmatch(rf"{words}now host 0 in 'step 7' for 6\d s, host 3 in 'step 7' for 6\d s\.", sentence)
    assert found[3] - {None}


def test_no_progress_is_a_fault_after_the_limit_and_says_where(clock):
    one = Watchdog(clock=clock)
    one.stall_limit = 30.0
    one.enter("data of step 3")
    clock.seconds += 20
    assert one.find_fault() is None
    one.enter("step 3")
    clock.seconds += 20
    assert one.find_fault() is None
    clock.seconds += 11
    assert (
        one.find_fault() == "no progress for 30 s; --config.stall_limit allows more; now host 0 in 'step 3' for 31 s."
    )


def test_alone_a_download_may_take_longer(clock):
    alone, one_of_two = Watchdog(clock=clock), Watchdog(0, 2, clock=clock)
    for one in (alone, one_of_two):
        one.stall_limit = 10.0
        one.enter("opening the data", patient=True)
    clock.seconds += 20
    assert alone.find_fault() is None and "no progress" in one_of_two.find_fault()


def test_a_process_that_stood_still_blames_nobody(hosts, clock):
    pass_time(clock, 5, dict(enumerate(hosts)))
    clock.seconds += 1000  # a laptop that slept
    assert hosts[0].find_fault() is None
    clock.seconds += 29
    assert hosts[0].find_fault() is None
