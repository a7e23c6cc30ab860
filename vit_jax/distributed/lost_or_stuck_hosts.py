"""Detects hosts that vanish or hang, including this one, from their heartbeats and a clock, and ends the run.

Two threads watch over a run. The first one looks only at the clock and at SIGTERM. The second one exchanges messages
with the other hosts. Only the second can hang if a host does not answer.
"""

import dataclasses
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from vit_jax import LostHosts, Preempted, exit_code, tell
from vit_jax.distributed.coordination import ProcessGroup
from vit_jax.distributed.host_shutdown import SHUTDOWN_SECONDS, HostShutdown
from vit_jax.distributed.preemption import SaveTimer, StepAgreement, TerminationSignal

LOST_AFTER_SECONDS = 60.0  # of silence, after which a host counts as lost
STALLED_AFTER_SECONDS = 1800.0  # without progress, after which a run counts as stuck; default of `stall_limit`
EXCHANGE_SECONDS = 1.0  # between two exchanges with the other hosts
HOSTS_AT_FULL_RATE = 128  # with more hosts than this, exchanges are less frequent
START_NOTICE_SECONDS = 15.0  # of waiting for the other hosts to start, after which a message says so
STUCK = exit_code(LostHosts())
OWN_FAULT = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")  # errors that no other host can have caused
STARTUP = "preempted before the first step of this start; nothing is lost. Run the same command again to continue."

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """The state that a host reports to the others.

    Attributes:
        number: the number of this heartbeat, from 1.
        progress: how often the main thread has entered a phase. All hosts enter the same phases in the same order.
        seconds: the seconds since the main thread entered its phase.
        phase: what the main thread is doing, in words.
    """

    number: int
    progress: int
    seconds: float
    phase: str


class Watchdog:
    """Keeps the last heartbeats of all hosts, and finds hosts that are lost or stuck.

    Attributes:
        stall_limit: seconds without progress on this host after which `find_fault` reports it.
        phase: what the main thread of this host is doing, in words.
    """

    def __init__(self, host: int = 0, hosts: int = 1, lost: float = LOST_AFTER_SECONDS, clock: Clock = time.monotonic):
        """Starts to watch.

        Args:
            host: the number of this host.
            hosts: the number of hosts.
            lost: seconds of silence after which another host counts as lost.
            clock: returns seconds.
        """
        self._host, self._hosts, self._lost, self._clock = host, hosts, lost, clock
        self.stall_limit = STALLED_AFTER_SECONDS
        self.phase, self.patient = "starting", False
        self._progress = self._beats = 0
        self._since = self._looked = clock()
        self._heard: dict[int, tuple[Heartbeat, float]] = {}  # host -> its last heartbeat, and when it was first seen

    def enter(self, phase: str, patient: bool = False) -> None:
        """Notes that the main thread begins a phase, which counts as progress.

        All hosts must enter the same phases in the same order.

        Args:
            phase: what it begins, in words.
            patient: whether the phase may take longer than `stall_limit`, as a download may. This holds only for a
                single host.
        """
        self.phase, self._since, self.patient = phase, self._clock(), patient
        self._progress += 1

    def seconds_in_phase(self) -> float:
        """Returns the seconds since the main thread entered its phase."""
        return self._clock() - self._since

    def heartbeat(self) -> dict[str, Any]:
        """Returns the next heartbeat of this host, the fields of `Heartbeat` as JSON."""
        self._beats += 1
        return dataclasses.asdict(Heartbeat(self._beats, self._progress, round(self.seconds_in_phase()), self.phase))

    def record_heartbeats(self, heartbeats: Mapping[str, Any], departed_hosts: Iterable[str] = ()) -> None:
        """Takes the last heartbeats of all hosts.

        Args:
            heartbeats: number of a host -> its last heartbeat, as JSON.
            departed_hosts: the numbers of the hosts that have left the run, which are no longer watched.
        """
        now = self._clock()
        for host, values in heartbeats.items():
            heartbeat = Heartbeat(**values)
            if int(host) != self._host and self._heard.get(int(host), (None,))[0] != heartbeat:
                self._heard[int(host)] = heartbeat, now
        for host in departed_hosts:
            self._heard.pop(int(host), None)

    def find_fault(self) -> str | None:
        """Returns a sentence on what is wrong, or None. Must be called every few seconds."""
        now, looked = self._clock(), self._looked
        self._looked = now
        if now - looked > self._lost / 2:  # this process itself was suspended and could not hear anything meanwhile
            self._since = now
            self._heard = {host: (heartbeat, now) for host, (heartbeat, _) in self._heard.items()}
        silent = [host for host, (_, since) in sorted(self._heard.items()) if now - since > self._lost]
        if silent:
            names = ", ".join(map(str, silent))
            return f"nothing was heard from host {names} for {self._lost:g} s{self._places(now)}"
        if now - self._since > self.stall_limit and not (self.patient and self._hosts == 1):
            advice = "--config.stall_limit allows more"
            return f"no progress for {self.stall_limit:g} s; {advice}{self._places(now)}"
        return None

    def _places(self, now: float) -> str:
        """Returns what each host is doing, as the end of a sentence. Hosts with the least progress come first."""
        hosts = {self._host: (self._progress, now - self._since, self.phase)}
        for host, (heartbeat, since) in self._heard.items():
            hosts[host] = heartbeat.progress, heartbeat.seconds + now - since, heartbeat.phase
        words = {host: f"host {host} in {phase!r} for {seconds:.0f} s" for host, (_, seconds, phase) in hosts.items()}
        least = min(progress for progress, _, _ in hosts.values())
        behind = [host for host, (progress, _, _) in sorted(hosts.items()) if progress == least]
        if len(behind) == len(hosts):
            return f"; now {', '.join(words[host] for host in sorted(words))}."
        last = ", ".join(words.pop(host) for host in behind)
        return f"; behind the others: {last}; now {', '.join(words[host] for host in sorted(words))}."


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
