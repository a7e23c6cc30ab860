"""Agreement on the step at which all hosts end, or save: they run the same programs in the same order, and count them.

Host 0 opens a round for each event. Every host then stops counting and puts its count, and the event happens on all of
them at the largest count plus one.
"""

import threading
from typing import Literal

from vit_jax.distributed.coordination import ProcessGroup

Event = Literal["stop", "save"]


class StepAgreement:
    """The count of one host, and what was agreed on.

    Attributes:
        count: programs that this host has begun on its devices.
        stopped_before_start: the hosts agreed to end before any of them had begun one.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Counts from 0."""
        self._group = group
        self._changed = threading.Condition()  # of the count, and of what is agreed
        self._held = False  # no host goes on counting while they agree
        self._requested: set[Event] = set()  # on this host, not yet passed on
        self._stop: int | None = None  # the count at which all end
        self._saves: list[int] = []  # the counts at which all save
        self._round = 0
        self.count = 0
        self.stopped_before_start = False

    def advance(self) -> bool:
        """Counts one more program, as soon as no agreement is under way; returns whether all hosts end here."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            self.count += 1
            return self._stop is not None and self.count >= self._stop

    def take_save(self) -> bool:
        """Returns whether all hosts save here; once for each agreement."""
        with self._changed:
            due = [count for count in self._saves if count <= self.count]
            self._saves = [count for count in self._saves if count > self.count]
        return bool(due)

    def request(self, event: Event) -> None:
        """Asks for an event: a stop on any host, a save on host 0."""
        self._requested.add(event)

    def stop(self) -> bool:
        """Has all hosts end; returns True once they agree on a count, False if they had before. For the main thread.

        The agreed count is at most this host's plus two, because the others wait for its next program.
        """
        with self._changed:
            if self._stop is not None:
                return False
            self.request("stop")
            self._changed.wait_for(lambda: self._stop is not None)
        return True

    def exchange(self) -> bool:
        """Takes a step towards what was requested; returns whether it waits for other hosts.

        Raises:
            JaxRuntimeError: the other hosts cannot be reached; call again.
        """
        group = self._group
        if group.hosts == 1:
            for event in list(self._requested):
                self._requested.discard(event)
                self._settle(event, self.count)
            return False
        if "stop" in self._requested:
            group.put("request/stop", group.host)
            self._requested.discard("stop")
        rounds = group.get("round")
        if str(self._round) not in rounds:
            events: list[Event] = ["stop"] if "stop" in group.get("request") and "stop" not in rounds.values() else []
            events += ["save"] if "save" in self._requested else []
            if group.host == 0 and events:
                group.put(f"round/{self._round}", events[0])
                self._requested.discard(events[0])
            return bool(events)
        with self._changed:
            self._held = True
        group.put(f"count/{self._round}/{group.host}", self.count)
        counts = group.get(f"count/{self._round}")
        if len(counts) < group.hosts:
            return True
        self._round += 1
        self._settle(rounds[str(self._round - 1)], max(counts.values()))
        return False

    def _settle(self, event: Event, count: int) -> None:
        """Lets an event happen on all hosts when they have counted one more than any has."""
        with self._changed:
            if event == "save":
                self._saves.append(count + 1)
            elif self._stop is None:
                self._stop = count + 1
            self.stopped_before_start = self._stop == 1
            self._held = self.stopped_before_start  # then the main thread is not to begin anything
            self._changed.notify_all()
