"""Where the seconds of this process go: each belongs to one category. `run_ledger` adds up all processes of a run."""

import contextlib
import enum
import queue
import threading
import time
from collections.abc import Callable

import jax

from vit_jax import PYTHON_STARTED
from vit_jax.tree import ArrayTree

# For the results that are still computed at the end; Python must not end while they are awaited.
RESULTS_TIMEOUT_SECONDS = 10.0


class Category(enum.StrEnum):
    """The activities among which the seconds of a run are divided. Only the seconds of the first host count."""

    STEP = "step"  # training, each step once: what the run is for
    DATA = "waiting for data"  # the devices have nothing to do, as the next batch is not read yet
    COMPILING = "compiling"  # the evaluation step, which is also tried once, and the training step
    EVALUATING = "evaluating"  # with what evaluations read and compile
    SAVING = "saving"  # the part of saves that training waits for, and the export at the end
    RESTORING = "restoring"  # a checkpoint is read and compared with its fingerprints
    STARTING = "starting"  # from the start of Python to the first batch, without the other categories
    REDONE = "steps done again"  # steps that an earlier start had made and not saved
    IDLE = "idle between starts"  # from the last write of a start to the beginning of the next start
    UNKNOWN = "unknown"  # none of these: a report, the end after a failure


class DeviceIdleTimer:
    """Waits in a thread for what was dispatched to the devices, so that the main thread knows when they fell idle."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Starts with idle devices; `clock` gives seconds."""
        self._clock = clock
        self._dispatched, self._finished = 0, (0, clock())  # how many were finished, and when the last was
        self._results: queue.SimpleQueue[ArrayTree | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, daemon=True)

    def dispatch(self, results: ArrayTree) -> None:
        """Notes that `results` were dispatched to the devices. They must not be donated to a later step."""
        if not self._dispatched:
            self._thread.start()
        self._dispatched += 1
        self._results.put(results)

    def idle_seconds(self) -> float:
        """Returns the seconds since the devices finished all that was dispatched; 0.0 while they compute."""
        count, since = self._finished
        return self._clock() - since if count == self._dispatched else 0.0

    def close(self) -> None:
        """Ends the thread once all that was dispatched is computed, or after `RESULTS_TIMEOUT_SECONDS`."""
        self._results.put(None)
        if self._thread.is_alive():
            self._thread.join(RESULTS_TIMEOUT_SECONDS)

    def _wait(self) -> None:
        while (results := self._results.get()) is not None:
            with contextlib.suppress(Exception):  # the main thread meets it when it fetches them
                jax.block_until_ready(results)
            self._finished = self._finished[0] + 1, self._clock()


class Ledger:
    """Adds up the seconds of a run in this process by category. Entering a category leaves the one before.

    Seconds in which the main thread waits for data while the devices compute a step belong to the step.

    Attributes:
        began: when the first second began that is counted, in seconds since 1970.
        category: the category of this moment; see `enter`.
    """

    def __init__(self, age: float = 0.0, clock: Callable[[], float] = time.monotonic):
        """Begins `age` seconds ago, with `Category.STARTING`; `clock` gives seconds."""
        self._clock, self._devices = clock, DeviceIdleTimer(clock)
        self.began = time.time() - age
        self._spent = dict.fromkeys(Category, 0.0)
        self.category, self._since = Category.STARTING, clock() - age
        self._step = Category.STEP  # of what the devices compute

    @property
    def seconds(self) -> dict[Category, float]:
        """The seconds of each category until now. Their sum is the time since `began`."""
        self.enter(self.category)
        return dict(self._spent)

    def enter(self, category: Category) -> None:
        """Makes the seconds from now on belong to a category."""
        now = self._clock()
        spent = now - self._since
        if self.category is Category.DATA:
            idle = min(spent, self._devices.idle_seconds())
            self._spent[self._step] += spent - idle
            spent = idle
        self._spent[self.category] += spent
        self.category, self._since = category, now

    def dispatch(self, results: ArrayTree, category: Category) -> None:
        """Enters the category of a step that was dispatched to the devices.

        Args:
            results: what the devices compute from now on. They must not be donated to a later step.
            category: the category of the step.
        """
        self.enter(category)
        self._step = category
        self._devices.dispatch(results)

    def close(self) -> None:
        """Ends the thread that waits for results."""
        self._devices.close()


def python_seconds() -> float:
    """Returns the seconds since Python started in this process, before it imported anything."""
    return time.monotonic() - PYTHON_STARTED
