"""Detects hosts that vanish or hang, including this one, from their heartbeats and a clock."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

LOST_AFTER_SECONDS = 60.0  # of silence, after which a host counts as lost
STALLED_AFTER_SECONDS = 1800.0  # without progress, after which a run counts as stuck; default of `stall_limit`

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
