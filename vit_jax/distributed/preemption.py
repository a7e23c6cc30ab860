"""What ends or saves a run before its time: SIGTERM, a timer, and the agreement of all hosts on the step.

All hosts run the same programs on their devices in the same order, and count them. Host 0 opens a round of agreement
for each event (a stop or a save). In a round every host pauses before its next program and publishes its count. The
event then happens on all hosts at the largest count plus one.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Literal

from vit_jax.distributed.coordination import ProcessGroup

Event = Literal["stop", "save"]


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

    def __init__(self, clock: Callable[[], float] = time.monotonic):
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


class StepAgreement:
    """The count of one host, and the counts at which the hosts have agreed to end or save.

    Attributes:
        count: the number of programs that this host has begun on its devices.
        stopped_before_start: whether the hosts agreed to end before any of them had begun a program.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Starts the count at 0."""
        self._group = group
        self._changed = threading.Condition()  # notified when the hosts have agreed
        self._held = False  # whether a round is under way, in which no host may count on
        self._requested: set[Event] = set()  # the events requested on this host and not yet passed on
        self._stop: int | None = None  # the count at which all end
        self._saves: list[int] = []  # the counts at which all save
        self._round = 0
        self.count = 0
        self.stopped_before_start = False

    def advance(self) -> bool:
        """Waits for a round that is under way, counts one more program, and returns whether all hosts end now."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            self.count += 1
            return self._stop is not None and self.count >= self._stop

    def take_save(self) -> bool:
        """Returns whether all hosts save now. It returns True only once for each agreed save."""
        with self._changed:
            due = [count for count in self._saves if count <= self.count]
            self._saves = [count for count in self._saves if count > self.count]
        return bool(due)

    def request(self, event: Event) -> None:
        """Requests an event. Any host may request a stop, but only host 0 a save."""
        self._requested.add(event)

    def stop(self) -> bool:
        """Requests a stop and waits until the hosts have agreed on a count. Must be called in the main thread.

        The agreed count is at most the count of this host plus two, because the other hosts wait for its next program.

        Returns:
            False, without waiting, if the hosts had agreed on a stop before; else True.
        """
        with self._changed:
            if self._stop is not None:
                return False
            self.request("stop")
            self._changed.wait_for(lambda: self._stop is not None)
        return True

    def exchange(self) -> bool:
        """Advances the agreement on requested events by one step; must be called again and again.

        Returns:
            Whether an agreement is under way that waits for other hosts.

        Raises:
            JaxRuntimeError: the other hosts cannot be reached. The call may be repeated.
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
        """Sets an event for the count after the given one, and lets this host count on.

        Args:
            event: the event.
            count: the largest count of all hosts in the round.
        """
        with self._changed:
            if event == "save":
                self._saves.append(count + 1)
            elif self._stop is None:
                self._stop = count + 1
            self.stopped_before_start = self._stop == 1
            self._held = self.stopped_before_start  # then the main thread must not begin a program
            self._changed.notify_all()
