"""Supervises a run for its main thread: SIGTERM, hosts that fail, vanish or hang, the time to save, agreements."""

import contextlib
import time
from collections.abc import Callable, Iterator

from vit_jax import Preempted
from vit_jax.distributed.coordination import Json, ProcessGroup, current_group, join_cluster
from vit_jax.distributed.monitor import HostMonitor, SaveTimer, watch_group
from vit_jax.monitoring import Category, Ledger

PREEMPTED = "preempted; there was nothing new to save. Run the same command again to continue."


class Supervisor:
    """Watches while it is entered; outside of a `with` it only counts. A `Coordinator`.

    Attributes:
        ledger: where the seconds of the run go.
    """

    def __init__(
        self, group: ProcessGroup | None = None, clock: Callable[[], float] = time.monotonic, age: float = 0.0
    ) -> None:
        """Supervises the processes of `group`, or else of those that JAX knows of.

        Args:
            group: of processes.
            clock: gives seconds.
            age: seconds that the first run has taken already.
        """
        self._clock, self._timer = clock, SaveTimer(clock)
        self.ledger, self._runs = Ledger(age, clock), 0
        self._monitor = HostMonitor(watch_group(group or current_group(), clock), self._timer)
        self._entered = False
        self._error: Exception | None = None

    @property
    def host(self) -> int:
        """Number of this host."""
        return self._monitor.watch.group.host

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return self._monitor.watch.group.hosts

    def __enter__(self) -> "Supervisor":
        """Begins to watch; in the main thread."""
        self._monitor.start()
        self._entered = True
        return self

    def join(self) -> None:
        """Connects to the other hosts.

        Raises:
            UserError: see `coordination.join_cluster`.
        """
        self._monitor.joining = True
        self.enter_phase("waiting for every host to start")
        limit = self._monitor.watch.watchdog.stall_limit
        self._monitor.join(watch_group(join_cluster(), self._clock, limit))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Ends, and lets the other hosts know how."""
        try:
            if self.hosts > 1:
                self._monitor.depart(error, self.all_gather)
        finally:
            self._entered = False
            self._monitor.stop()

    def begin_run(self, stall_limit: float) -> None:
        """Begins the ledger of a run, if it is not the first, and sets the seconds without progress that end it."""
        self._monitor.watch.watchdog.stall_limit = stall_limit
        if self._runs:
            self.ledger = Ledger(clock=self._clock)
        self._runs += 1

    def set_save_interval(self, seconds: float) -> None:
        """Sets the seconds between two saves, 0 for none by the clock, and starts to count them."""
        self._timer.interval = seconds or None
        self.note_save()

    def enter_phase(self, phase: str, category: Category | None = None, patient: bool = False) -> None:
        """Notes what the main thread begins; see `Watchdog.enter`.

        Args:
            phase: in words.
            category: what its seconds belong to; None: to that of the phase before.
            patient: see `Watchdog.enter`.
        """
        self._monitor.watch.watchdog.enter(phase, patient)
        if category is not None:
            self.ledger.enter(category)

    @contextlib.contextmanager
    def phase(self, name: str, category: Category | None = None, patient: bool = False) -> Iterator[None]:
        """Enters a phase, and afterwards the phase before again."""
        before = self._monitor.watch.watchdog.phase, self.ledger.category
        self.enter_phase(name, category, patient)
        yield
        self.enter_phase(*before)

    def count_step(self) -> None:
        """Counts a program that all hosts have begun on their devices.

        Raises:
            Preempted: the hosts have agreed to end here.
        """
        ends = self._monitor.watch.agreement.advance()
        self.enter_phase(self._monitor.watch.watchdog.phase)
        if ends:
            raise Preempted(PREEMPTED)

    def stop_all(self) -> bool:
        """Has all hosts end after one or two programs more, which `count_step` will say; see `StepAgreement.stop`.

        Returns whether they end for that, and not for what they agreed on before or because they cannot agree.
        """
        return self._entered and self._monitor.watch.agreement.stop()

    def save_due(self) -> bool:
        """Returns whether it is time to save, on all hosts; True once for each time."""
        late = not self._entered and self.hosts == 1 and self._timer.is_over()
        return self._monitor.watch.agreement.take_save() or late

    def note_save(self) -> None:
        """Lets the time until the next save count from here."""
        self._timer.restart()

    def all_gather(self, topic: str, value: Json = None) -> list[Json]:
        """Returns every host's value, in the hosts' order.

        Raises:
            LostHosts: see `ProcessGroup.all_gather`.
        """
        watch = self._monitor.watch
        self.enter_phase(f"waiting for the other hosts at {topic!r}")
        # The watching thread, which shows where all hosts are, comes first.
        values = watch.group.all_gather(topic, value, 2 * watch.watchdog.stall_limit)
        self.enter_phase(f"after {topic!r}")
        return values

    def raise_later(self, error: Exception) -> None:
        """Has the main thread raise an error that another thread has found; see `raise_pending`."""
        self._error = error

    def raise_pending(self) -> None:
        """Raises what another thread has handed to `raise_later`."""
        error, self._error = self._error, None
        if error:
            raise error
