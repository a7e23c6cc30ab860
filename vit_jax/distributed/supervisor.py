"""Supervises a run for its main thread: SIGTERM, hosts that fail, vanish or hang, and the time of saves."""

import contextlib
import time
from collections.abc import Callable, Iterator

from vit_jax import Preempted
from vit_jax.distributed.coordination import Json, ProcessGroup, current_group, join_cluster
from vit_jax.distributed.lost_or_stuck_hosts import HostMonitor, make_host_group
from vit_jax.distributed.preemption import SaveTimer
from vit_jax.monitoring import Category, Ledger

PREEMPTED = "preempted; there was nothing new to save. Run the same command again to continue."


class Supervisor:
    """Watches over a run as a context manager. Outside of its block it only counts steps and seconds. A `Coordinator`.

    Attributes:
        ledger: counts the seconds that the run spends in each category.
    """

    def __init__(
        self, group: ProcessGroup | None = None, clock: Callable[[], float] = time.monotonic, age: float = 0.0
    ) -> None:
        """Supervises the processes of `group`, or else of those that JAX knows of.

        Args:
            group: the group of processes; None: `current_group()`.
            clock: returns seconds.
            age: seconds that the first run has already taken.
        """
        self._clock, self._timer = clock, SaveTimer(clock)
        self.ledger, self._runs = Ledger(age, clock), 0
        self._monitor = HostMonitor(make_host_group(group or current_group(), clock), self._timer)
        self._entered = False
        self._block = ""  # the phase of the innermost block of `phase`
        self._error: Exception | None = None

    @property
    def host(self) -> int:
        """The number of this host, from 0."""
        return self._monitor.group_state.group.host

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self._monitor.group_state.group.hosts

    def __enter__(self) -> "Supervisor":
        """Begins to supervise. Must be called in the main thread."""
        self._monitor.start()
        self._entered = True
        return self

    def join(self) -> None:
        """Connects to the other hosts, which takes until all of them have started.

        Raises:
            UserError: see `coordination.join_cluster`.
        """
        self._monitor.joining = True
        self.enter_phase("waiting for every host to start")
        limit = self._monitor.group_state.watchdog.stall_limit
        self._monitor.join(make_host_group(join_cluster(), self._clock, limit))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Ends the supervision. If there are other hosts, this one leaves as `HostMonitor.leave_group` describes."""
        try:
            if self.hosts > 1:
                self._monitor.leave_group(error, self.all_gather)
        finally:
            self._entered = False
            self._monitor.stop()

    def begin_run(self, stall_limit: float) -> None:
        """Prepares for the next run: sets its stall limit, in seconds, and if it is not the first, its ledger."""
        self._monitor.group_state.watchdog.stall_limit = stall_limit
        self._block = ""
        if self._runs:
            self.ledger = Ledger(clock=self._clock)
        self._runs += 1

    def set_save_interval(self, seconds: float) -> None:
        """Sets the seconds between two saves, and starts to count them. With 0, no save is due by the clock."""
        self._timer.interval = seconds or None
        self.note_save()

    def enter_phase(self, phase: str, category: Category | None = None, patient: bool = False) -> None:
        """Notes that the main thread begins a phase; see `Watchdog.enter`.

        Args:
            phase: what it begins, in words.
            category: the category that its seconds count for; None: the category of the phase before.
            patient: see `Watchdog.enter`.
        """
        self._monitor.group_state.watchdog.enter(phase, patient)
        if category is not None:
            self.ledger.enter(category)

    @contextlib.contextmanager
    def phase(self, name: str, category: Category | None = None, patient: bool = False) -> Iterator[None]:
        """Enters a phase for the block, and after it the previous phase and category again, unless the block raises."""
        watchdog = self._monitor.group_state.watchdog
        before, block = (watchdog.phase, self.ledger.category, watchdog.patient), self._block
        self._block = name
        self.enter_phase(name, category, patient)
        yield
        self._block = block
        self.enter_phase(*before)

    def count_step(self) -> None:
        """Counts one program that every host begins on its devices. It waits while the hosts agree on a stop or a save.

        Raises:
            Preempted: the hosts have agreed to end here.
        """
        ends = self._monitor.group_state.agreement.advance()
        watchdog = self._monitor.group_state.watchdog
        self.enter_phase(watchdog.phase, patient=watchdog.patient)
        if ends:
            raise Preempted(PREEMPTED)

    def stop_all(self) -> bool:
        """Makes all hosts end after one or two more programs, by a `Preempted` from `count_step`.

        See `StepAgreement.stop`. Must be called in the main thread.

        Returns:
            Whether this call made them end. False if they had agreed on a stop before, or if nothing is watched.
        """
        return self._entered and self._monitor.group_state.agreement.stop()

    def save_due(self) -> bool:
        """Returns whether a save is due by the clock, at the same step on all hosts.

        With several hosts or inside the block, it returns True only once for each save.
        """
        late = not self._entered and self.hosts == 1 and self._timer.is_over()
        return self._monitor.group_state.agreement.take_save() or late

    def note_save(self) -> None:
        """Starts to count the time until the next save anew."""
        self._timer.restart()

    def all_gather(self, topic: str, value: Json = None) -> list[Json]:
        """Waits until all hosts have called this with the same topic, and returns their values in the hosts' order.

        Raises:
            LostHosts: see `ProcessGroup.all_gather`.
        """
        state = self._monitor.group_state
        patient = state.watchdog.patient
        self.enter_phase(f"waiting for the other hosts at {topic!r}", patient=patient)
        # The watching thread ends the run earlier than this limit, and shows what all hosts are doing.
        values = state.group.all_gather(topic, value, 2 * state.watchdog.stall_limit)
        self.enter_phase(self._block or f"after {topic!r}", patient=patient)
        return values

    def raise_later(self, error: Exception) -> None:
        """Stores an error that another thread has found, for `raise_pending`. A later error replaces it."""
        self._error = error

    def raise_pending(self) -> None:
        """Raises the error of `raise_later`, if there is one. To be called in the main thread."""
        error, self._error = self._error, None
        if error:
            raise error
