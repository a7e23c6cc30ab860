"""Notices hosts that vanish or hang, this one included, from their heartbeats and a clock."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

LOST = 60.0  # seconds of silence after which a host counts as lost
STALL = 1800.0  # seconds without progress after which a run counts as stuck, unless the configuration says otherwise

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """What a host says of itself.

    Attributes:
        number: of this heartbeat.
        progress: how often its main thread has moved on; all hosts move on in the same order.
        seconds: since it moved on last.
        phase: what it is doing.
    """

    number: int
    progress: int
    seconds: float
    phase: str


class Watchdog:
    """Keeps what this host and the others said last, and when.

    Attributes:
        stall_limit: seconds without progress on this host after which `fault` says so.
        phase: what the main thread is doing.
    """

    def __init__(self, host: int = 0, hosts: int = 1, lost: float = LOST, clock: Clock = time.monotonic):
        """Starts to watch.

        Args:
            host: number of this one.
            hosts: how many there are.
            lost: seconds of silence after which another host counts as lost.
            clock: gives seconds.
        """
        self._host, self._hosts, self._lost, self._clock = host, hosts, lost, clock
        self.stall_limit = STALL
        self.phase, self._patient = "starting", False
        self._progress = self._beats = 0
        self._since = self._looked = clock()
        self._heard: dict[int, tuple[Heartbeat, float]] = {}  # host -> its last heartbeat, and when it was first seen

    def enter(self, phase: str, patient: bool = False) -> None:
        """Notes what the main thread begins: progress. All hosts enter the same phases in the same order.

        Args:
            phase: in words.
            patient: it may take longer than `stall_limit` where no other host waits: a download, for example.
        """
        self.phase, self._since, self._patient = phase, self._clock(), patient
        self._progress += 1

    def seconds_in_phase(self) -> float:
        """Returns the seconds since the main thread moved on."""
        return self._clock() - self._since

    def heartbeat(self) -> dict[str, Any]:
        """Returns the next heartbeat of this host, as JSON."""
        self._beats += 1
        return dataclasses.asdict(Heartbeat(self._beats, self._progress, round(self.seconds_in_phase()), self.phase))

    def hear(self, heartbeats: Mapping[str, Any], left: Iterable[str] = ()) -> None:
        """Takes the last heartbeats of all hosts, as JSON by host, and the numbers of those that have left the run."""
        now = self._clock()
        for host, values in heartbeats.items():
            heartbeat = Heartbeat(**values)
            if int(host) != self._host and self._heard.get(int(host), (None,))[0] != heartbeat:
                self._heard[int(host)] = heartbeat, now
        for host in left:
            self._heard.pop(int(host), None)

    def look(self) -> str | None:
        """Returns what is wrong, in words, or None. To be called every few seconds."""
        now, looked = self._clock(), self._looked
        self._looked = now
        if now - looked > self._lost / 2:  # this process itself stood still and has heard nothing meanwhile
            self._since = now
            self._heard = {host: (heartbeat, now) for host, (heartbeat, _) in self._heard.items()}
        silent = [host for host, (_, since) in sorted(self._heard.items()) if now - since > self._lost]
        if silent:
            names = ", ".join(map(str, silent))
            return f"nothing was heard from host {names} for {self._lost:g} s{self._places(now)}"
        if now - self._since > self.stall_limit and not (self._patient and self._hosts == 1):
            advice = "--config.stall_limit allows more"
            return f"no progress for {self.stall_limit:g} s; {advice}{self._places(now)}"
        return None

    def _places(self, now: float) -> str:
        """Returns, as the end of a sentence, what each host is doing, those behind the others first."""
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
