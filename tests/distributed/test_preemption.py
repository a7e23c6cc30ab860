"""Hosts that agree on the step at which they save or end; threads as hosts."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from tests.distributed.test_coordination import make_groups
from vit_jax.distributed.coordination import ProcessGroup
from vit_jax.distributed.preemption import StepAgreement

pytestmark = pytest.mark.flaky(reruns=1)  # these wait on the clock


class Hosts:
    """Four hosts that count at different speeds until they agree to end, and exchange messages meanwhile."""

    def __init__(self, fails=0):
        self.agreements = [StepAgreement(group) for group in make_groups(4, fails)]
        self.saves, self.ends, self.over = [[] for _ in self.agreements], [], threading.Event()
        self.threads = [threading.Thread(target=self.count, args=[host]) for host in range(4)]
        self.threads += [threading.Thread(target=self.exchange, args=[one], daemon=True) for one in self.agreements]
        for thread in self.threads:
            thread.start()

    def count(self, host):
        one = self.agreements[host]
        for _ in range(2000):
            if one.advance():
                return self.ends.append(one.count)
            if one.take_save():
                self.saves[host].append(one.count)
            time.sleep(0.001 * (1 + host))  # some are faster

    def exchange(self, one):
        while not self.over.wait(0.005):
            try:
                one.exchange()
            except jax.errors.JaxRuntimeError:
                continue

    def join(self):
        for thread in self.threads[:4]:
            thread.join(20)
        self.over.set()


def test_saves_and_the_end_come_at_the_same_counts_everywhere():
    hosts = Hosts()
    for _ in range(3):
        time.sleep(0.1)
        hosts.agreements[0].request("save")
    hosts.agreements[0].request("save")  # at the same moment as two hosts are told to end
    hosts.agreements[1].request("stop")
    hosts.agreements[3].request("stop")
    hosts.join()
    assert len(hosts.ends) == 4 and len(set(hosts.ends)) == 1 and hosts.ends[0] > 1
    assert 2 <= len(hosts.saves[0]) <= 4 and all(counts == hosts.saves[0] for counts in hosts.saves)


def test_a_store_that_fails_now_and_then_is_asked_again():
    hosts = Hosts(fails=3)
    hosts.agreements[2].request("stop")
    hosts.join()
    assert len(hosts.ends) == 4 and len(set(hosts.ends)) == 1


@pytest.mark.parametrize("count", [1, 4])
def test_a_stop_before_the_first_step_is_known_at_once(count):
    agreements = [StepAgreement(group) for group in (make_groups(4) if count > 1 else [ProcessGroup()])]
    agreements[-1].request("stop")
    for _ in range(4):
        for one in agreements:
            one.exchange()
    assert all(one.stopped_before_start for one in agreements)


def test_alone_a_stop_comes_with_the_next_count():
    one = StepAgreement(ProcessGroup())
    assert not one.advance()
    one.request("stop")
    one.request("save")
    one.exchange()
    assert not one.stopped_before_start and not one.take_save()
    assert one.advance() and one.take_save() and not one.take_save()


def test_a_host_that_cannot_go_on_has_all_stop_two_programs_later_at_most():
    agreements = [StepAgreement(group) for group in make_groups(4)]
    for number, one in enumerate(agreements):
        one.count = 5 if number == 2 else 6  # the others have begun what the third has not
    waiting = ThreadPoolExecutor(1).submit(agreements[2].stop)
    while not waiting.done():
        for one in agreements:
            one.exchange()
    assert waiting.result() and not agreements[2].stop()
    assert [agreements[2].advance() for _ in range(2)] == [False, True]
    assert [one.advance() for one in agreements] == [True] * 4
