"""The two threads that watch over a run.

The first thread looks only at the clock and at SIGTERM. The second one exchanges messages with the other hosts. Only
the second can hang if a host does not answer.
"""

import dataclasses
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

import jax

from vit_jax import LostHosts, Preempted, exit_code, tell
from vit_jax.distributed.coordination import ProcessGroup
from vit_jax.distributed.host_shutdown import SHUTDOWN_SECONDS, HostShutdown
from vit_jax.distributed.lost_or_stuck_hosts import LOST_AFTER_SECONDS, STALLED_AFTER_SECONDS, Clock, Watchdog
from vit_jax.distributed.preemption import StepAgreement

EXCHANGE_SECONDS = 1.0  # between two exchanges with the other hosts
HOSTS_AT_FULL_RATE = 128  # with more hosts than this, exchanges are less frequent
START_NOTICE_SECONDS = 15.0  # of waiting for the other hosts to start, after which a message says so
STUCK = exit_code(LostHosts())
OWN_FAULT = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")  # errors that no other host can have caused
STARTUP = "preempted before the first step of this start; nothing is lost. Run the same command again to continue."


class TerminationSignal:
    """Reacts to SIGTERM in a thread of its own, because the main thread may be compiling or waiting for other hosts."""

    def take_over(self) -> None:
        """Replaces the handler of SIGTERM. Must be called in the main thread."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._handler_before = signal.signal(signal.SIGTERM, lambda number, frame: None)

    def give_back(self) -> None:
        """Restores the previous handler. Must be called in the main thread."""
        signal.signal(signal.SIGTERM, self._handler_before)
        signal.set_wakeup_fd(self._wakeup_before)

    def wait(self, seconds: float) -> bool:
        """Waits until a signal comes, at most some seconds, and returns whether it was SIGTERM."""
        readable, _, _ = select.select([self._pipe[0]], [], [], seconds)
        return bool(readable) and signal.SIGTERM in os.read(self._pipe[0], 4096)


class SaveTimer:
    """Tells when the next save is due.

    Attributes:
        interval: seconds between two saves; None: no save is ever due.
    """

    def __init__(self, clock: Clock = time.monotonic):
        """Starts to count. `clock` returns seconds."""
        self._clock = clock
        self.interval: float | None = None
        self.restart()

    def restart(self) -> None:
        """Starts to count the time until the next save anew."""
        self._since = self._clock()

    def is_over(self) -> bool:
        """Returns whether a save is due."""
        return self.interval is not None and self._clock() - self._since > self.interval


@dataclasses.dataclass(frozen=True)
class HostGroup:
    """A group of hosts, with the objects that watch it.

    Attributes:
        group: the hosts.
        watchdog: keeps what each host is doing.
        agreement: agrees with the other hosts on the step at which all end or save.
        shutdown: lets this host leave the group.
    """

    group: ProcessGroup
    watchdog: Watchdog
    agreement: StepAgreement
    shutdown: HostShutdown


def make_host_group(
    group: ProcessGroup, clock: Clock = time.monotonic, stall_limit: float = STALLED_AFTER_SECONDS
) -> HostGroup:
    """Returns new objects that watch a group. `clock` and `stall_limit` are those of the `Watchdog`, in seconds."""
    watchdog = Watchdog(group.host, group.hosts, LOST_AFTER_SECONDS, clock)
    watchdog.stall_limit = stall_limit
    return HostGroup(group, watchdog, StepAgreement(group), HostShutdown(group, SHUTDOWN_SECONDS))


class HostMonitor:
    """Starts, runs and ends the two threads.

    Attributes:
        group_state: the hosts that are watched; replaced when this host has joined the others.
        joining: whether this host is waiting for the others to start.
        timer: tells when a save is due.
    """

    def __init__(self, group_state: HostGroup, timer: SaveTimer):
        """Takes the group to watch first, and the timer; starts no thread yet."""
        self.group_state, self.timer = group_state, timer
        self.joining, self._terminated = False, False
        self._over, self._termination = threading.Event(), TerminationSignal()

    def start(self) -> None:
        """Starts the thread that looks at the clock and at SIGTERM. Must be called in the main thread."""
        faulthandler.enable(sys.__stderr__ or 2)  # if JAX itself aborts the process, its stacks are printed
        self._termination.take_over()
        threading.Thread(target=self._watch_clock, daemon=True).start()

    def join(self, group_state: HostGroup) -> None:
        """Watches another group from now on, and starts the thread that exchanges messages with its hosts, if any."""
        self.group_state, self.joining = group_state, False
        if self._terminated:
            group_state.agreement.request("stop")
        if group_state.group.hosts > 1:
            threading.Thread(target=self._exchange_messages, daemon=True).start()

    def stop(self) -> None:
        """Tells both threads to end, and restores the handler of SIGTERM."""
        self._over.set()
        self._termination.give_back()

    def leave_group(self, error: BaseException | None, all_gather: Callable[[str], object]) -> None:
        """Leaves the run, together with the other hosts or, after an error, after telling them the reason.

        Args:
            error: the exception that ended the run on this host, if any. `Preempted` counts as a normal end.
            all_gather: waits for all hosts.
        """
        shutdown, preempted = self.group_state.shutdown, isinstance(error, Preempted)
        if error is None or preempted:
            all_gather("the end")
        elif isinstance(error, jax.errors.JaxRuntimeError) and not any(word in str(error) for word in OWN_FAULT):
            # This may be the effect of a lost host. In that case the watching thread ends this process.
            tell(f"vit_jax: {str(error).splitlines()[0]}; is a host lost?")
            time.sleep(LOST_AFTER_SECONDS + 3 * SHUTDOWN_SECONDS)
        if error is not None and not preempted:
            code, text = exit_code(error), str(error)
            ours = code != 1 or type(error).__module__.startswith("vit_jax")
            shutdown.announce(text if ours else f"{type(error).__name__}: {text}", code)
        self._over.set()
        shutdown.leave_group()

    def _watch_clock(self) -> None:
        announced = False
        while not self._over.is_set():
            if self._termination.wait(EXCHANGE_SECONDS / 2):
                self._terminated = True
                self.group_state.agreement.request("stop")
            if not self.joining:
                self._check_group()
                continue
            waited = self.group_state.watchdog.seconds_in_phase()
            if not announced and waited > START_NOTICE_SECONDS:
                tell("vit_jax: waiting for the other hosts; was this started on all?")
                announced = True
            if self._terminated and waited > START_NOTICE_SECONDS:
                self.group_state.shutdown.end_process(STARTUP, exit_code(Preempted()))

    def _check_group(self) -> None:
        """Requests a save if one is due, and ends this process if the run is stuck or stopped before its start."""
        state = self.group_state
        group, agreement, shutdown = state.group, state.agreement, state.shutdown
        if group.host == 0 and agreement.count and self.timer.is_over():
            self.timer.restart()
            agreement.request("save")
        if group.hosts == 1:
            agreement.exchange()
        if agreement.stopped_before_start:
            shutdown.end_process(STARTUP, exit_code(Preempted()))
        fault = state.watchdog.find_fault()
        if fault and not self._over.is_set():
            if group.hosts > 1:
                shutdown.announce(fault, STUCK)
            shutdown.abort(fault, STUCK)

    def _exchange_messages(self) -> None:
        """Exchanges messages with the other hosts until `stop`. A failed exchange is tried again."""
        period, waiting = EXCHANGE_SECONDS * max(1.0, self.group_state.group.hosts / HOSTS_AT_FULL_RATE), False
        while not self._over.wait(period / 10 if waiting else period):
            try:
                self._exchange_heartbeats()
                waiting = self.group_state.agreement.exchange()
            except jax.errors.JaxRuntimeError:  # JAX ends the process itself when host 0 is gone
                continue

    def _exchange_heartbeats(self) -> None:
        """Sends the heartbeat of this host, reads those of the others, and ends this process if one ended the run."""
        group, watchdog, shutdown = self.group_state.group, self.group_state.watchdog, self.group_state.shutdown
        group.put(f"alive/{group.host}", watchdog.heartbeat(), replace=True)
        watchdog.record_heartbeats(group.get("alive"), shutdown.departed_hosts())
        end = shutdown.announcement()
        if not end or self._over.is_set():
            return
        host, sentence, code = end
        if code == STUCK:
            shutdown.abort(sentence, STUCK)
        shutdown.end_process(f"host {host} ended the run: {sentence}", code)
