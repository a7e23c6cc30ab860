"""Watches over a run while its main thread works: SIGTERM, hosts that fail, vanish or hang, and the time to save.

Two threads watch: one looks at the clock and at signals only, the other exchanges messages with the other hosts, so
that nothing hangs with a host that does not answer.
"""

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from vit_jax import LostHosts, Preempted, exit_code
from vit_jax.distributed.agreement import Json
from vit_jax.distributed.coordination import ProcessGroup, current_group, join_cluster
from vit_jax.distributed.departure import PARTING, HostDeparture
from vit_jax.distributed.preemption import StepAgreement
from vit_jax.distributed.watchdog import LOST, STALL, Clock, Watchdog

PERIOD = 1.0  # seconds between two exchanges with the other hosts
MANY = 128  # hosts; more of them exchange less often
SOON = 15.0  # seconds of waiting for the other hosts to start after which a message says so
STUCK = exit_code(LostHosts())
STARTUP = "preempted before the first step of this start; nothing is lost: the same command goes on."
PREEMPTED = "preempted; nothing was left to be saved: the same command goes on."
OWN_FAULT = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")  # of a program, whatever happened elsewhere


class Supervisor:
    """Watches while it is entered; outside of a `with` it only counts. A `Coordinator`.

    Attributes:
        host: number of this one.
        hosts: how many there are.
    """

    def __init__(self, group: ProcessGroup | None = None, clock: Clock = time.monotonic) -> None:
        """Supervises the processes of `group`, or else of those that JAX knows of; `clock` gives seconds."""
        self._clock, self._over = clock, threading.Event()
        self._entered, self._joined, self._terminated = False, True, False
        self._error: Exception | None = None
        self._save_every: float | None = None
        self._saved_at = clock()
        self._supervise(group or current_group())

    def _supervise(self, group: ProcessGroup, phase: str = "starting", stall_limit: float = STALL) -> None:
        self._group, self.host, self.hosts = group, group.host, group.hosts
        self._watchdog = Watchdog(group.host, group.hosts, LOST, self._clock)
        self._watchdog.stall_limit = stall_limit
        self._watchdog.enter(phase)
        self._departure = HostDeparture(group, PARTING)
        self._agreement = StepAgreement(group)
        if self._terminated:
            self._agreement.request("stop")

    def __enter__(self) -> "Supervisor":
        """Begins to watch; in the main thread."""
        faulthandler.enable(sys.__stderr__ or 2)  # what JAX itself aborts, for a lost host, shows where it was
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        # A thread answers the signal: the main one may be compiling, or waiting for other hosts.
        self._handler_before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        self._entered = True
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def join(self) -> None:
        """Connects to the other hosts.

        Raises:
            UserError: see `coordination.join_cluster`.
        """
        self._joined = False
        self.enter_phase("waiting for every host to start")
        self._supervise(join_cluster(), stall_limit=self._watchdog.stall_limit)
        self._joined = True
        if self.hosts > 1:
            threading.Thread(target=self._listen, daemon=True).start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Ends, and lets the other hosts know how."""
        try:
            if self.hosts > 1:
                self._depart(error)
        finally:
            self._entered = False
            self._over.set()
            signal.signal(signal.SIGTERM, self._handler_before)
            signal.set_wakeup_fd(self._wakeup_before)

    def set_limits(self, stall: float, save_every: float | None) -> None:
        """Sets the seconds without progress after which the run is ended, and those between two saves, if any."""
        self._watchdog.stall_limit, self._save_every = stall, save_every or None
        self.note_save()

    def enter_phase(self, phase: str, patient: bool = False) -> None:
        """Notes what the main thread begins; see `Watchdog.enter`."""
        self._watchdog.enter(phase, patient)

    @contextlib.contextmanager
    def phase(self, name: str, patient: bool = False) -> Iterator[None]:
        """Enters a phase, and afterwards the phase before again."""
        before = self._watchdog.phase
        self.enter_phase(name, patient)
        yield
        self.enter_phase(before)

    def count_step(self) -> None:
        """Counts a program that all hosts have begun on their devices.

        Raises:
            Preempted: the hosts have agreed to end here.
        """
        ends = self._agreement.advance()
        self.enter_phase(self._watchdog.phase)
        if ends:
            raise Preempted(PREEMPTED)

    def raise_pending(self) -> None:
        """Raises what another thread has handed to `raise_later`."""
        error, self._error = self._error, None
        if error:
            raise error

    def save_due(self) -> bool:
        """Returns whether it is time to save, on all hosts; True once for each time."""
        return self._agreement.take_save() or (not self._entered and self.hosts == 1 and self._is_late())

    def note_save(self) -> None:
        """Lets the time until the next save count from here."""
        self._saved_at = self._clock()

    def all_gather(self, topic: str, value: Json = None) -> list[Json]:
        """Returns every host's value, in the hosts' order.

        Raises:
            LostHosts: see `ProcessGroup.all_gather`.
        """
        self.enter_phase(f"waiting for the other hosts at {topic!r}")
        # The watching thread, which shows where all hosts are, comes first.
        values = self._group.all_gather(topic, value, 2 * self._watchdog.stall_limit)
        self.enter_phase(f"after {topic!r}")
        return values

    def raise_later(self, error: Exception) -> None:
        """Has the main thread raise an error that another thread has found; see `raise_pending`."""
        self._error = error

    def _is_late(self) -> bool:
        return self._save_every is not None and self._clock() - self._saved_at > self._save_every

    def _watch(self) -> None:
        """Looks at the clock and at signals; exchanges nothing with other hosts."""
        announced = False
        while not self._over.is_set():
            readable, _, _ = select.select([self._pipe[0]], [], [], PERIOD / 2)
            if readable and signal.SIGTERM in os.read(self._pipe[0], 4096):
                self._terminated = True
                self._agreement.request("stop")
            if self._joined:
                self._look()
                continue
            waited = self._watchdog.seconds_in_phase()
            if not announced and waited > SOON:
                print("vit_jax: waiting for the other hosts; was this started on all?", file=sys.stderr, flush=True)
                announced = True
            if self._terminated and waited > SOON:
                self._departure.end_process(STARTUP, exit_code(Preempted()))

    def _look(self) -> None:
        """Asks for a save when it is time, and ends this process if it has to end at once."""
        if self.host == 0 and self._agreement.count and self._is_late():
            self.note_save()
            self._agreement.request("save")
        if self.hosts == 1:
            self._agreement.exchange()
        if self._agreement.stopped_before_start:
            self._departure.end_process(STARTUP, exit_code(Preempted()))
        fault = self._watchdog.look()
        if fault and not self._over.is_set():
            if self.hosts > 1:
                self._departure.announce(fault, STUCK)
            self._departure.abort(fault, STUCK)

    def _listen(self) -> None:
        """Exchanges messages with the other hosts; what fails is tried again."""
        period, waiting = PERIOD * max(1.0, self.hosts / MANY), False
        while not self._over.wait(period / 10 if waiting else period):
            try:
                self._exchange_heartbeats()
                waiting = self._agreement.exchange()
            except jax.errors.JaxRuntimeError:  # JAX ends the process itself when host 0 is gone
                continue

    def _exchange_heartbeats(self) -> None:
        """Tells the other hosts that this one lives, hears which of them do, and whether one has ended the run."""
        self._group.put(f"alive/{self.host}", self._watchdog.heartbeat(), replace=True)
        self._watchdog.hear(self._group.get("alive"), self._departure.departed())
        end = self._departure.announcement()
        if not end or self._over.is_set():
            return
        host, sentence, code = end
        if code == STUCK:
            self._departure.abort(sentence, STUCK)
        self._departure.end_process(f"host {host} ended the run: {sentence}", code)

    def _depart(self, error: BaseException | None) -> None:
        """Leaves together with the other hosts, or tells them why this one ends."""
        preempted = isinstance(error, Preempted)
        if error is None or preempted:
            self.all_gather("the end")
        elif isinstance(error, jax.errors.JaxRuntimeError) and not any(word in str(error) for word in OWN_FAULT):
            # This is how a lost host looks like: then the watching thread ends this process.
            print(f"vit_jax: {str(error).splitlines()[0]}; is a host lost?", file=sys.stderr, flush=True)
            time.sleep(LOST + 3 * PARTING)
        if error is not None and not preempted:
            code, text = exit_code(error), str(error)
            ours = code != 1 or type(error).__module__.startswith("vit_jax")
            self._departure.announce(text if ours else f"{type(error).__name__}: {text}", code)
        self._over.set()
        self._departure.depart()
