"""Where the seconds of a process go: each belongs to one category."""

import enum
import os
import time
from collections.abc import Callable
from pathlib import Path

from vit_jax.monitoring.device_watch import DeviceWatch
from vit_jax.tree import ArrayTree


class Category(enum.StrEnum):
    """What a second of a run is spent on; all are on the first host."""

    STEP = "step"  # training, each step once: what the run is for
    DATA = "waiting for data"  # the devices have nothing to do, as the next batch is not read yet
    COMPILING = "compiling"  # of the evaluation step and the training step, with a try of the former
    EVALUATING = "evaluating"  # with what evaluations read and compile
    SAVING = "saving"  # the part of saves that training waits for, and the export at the end
    RESTORING = "restoring"  # a checkpoint is read and compared with its fingerprints
    STARTING = "starting"  # from the start of the process to the first batch, without the rest
    REDONE = "steps done again"  # steps that an earlier start had made and not saved
    IDLE = "idle between starts"  # from the last that is known of a start to the next
    UNKNOWN = "unknown"  # none of these: a report, the end after a failure


class Ledger:
    """Adds up the seconds of a run in this process by category; entering one leaves the one before.

    While the devices compute a step, nothing waits for data: what the main thread waits meanwhile belongs to the step.

    Attributes:
        began: when it begins, in seconds since 1970.
    """

    def __init__(self, age: float = 0.0, clock: Callable[[], float] = time.monotonic):
        """Begins `age` seconds ago, with `Category.STARTING`; `clock` gives seconds."""
        self._clock, self._devices = clock, DeviceWatch(clock)
        self.began = time.time() - age
        self._spent = dict.fromkeys(Category, 0.0)
        self._category, self._since = Category.STARTING, clock() - age
        self._step = Category.STEP  # of what the devices compute

    @property
    def category(self) -> Category:
        """That of this moment."""
        return self._category

    @property
    def seconds(self) -> dict[Category, float]:
        """Those of each category until now; they add up to the time since the beginning."""
        self.enter(self._category)
        return dict(self._spent)

    def enter(self, category: Category) -> None:
        """Lets the seconds from now on belong to a category."""
        now = self._clock()
        spent = now - self._since
        if self._category is Category.DATA:
            idle = min(spent, self._devices.idle_seconds())
            self._spent[self._step] += spent - idle
            spent = idle
        self._spent[self._category] += spent
        self._category, self._since = category, now

    def dispatch(self, results: ArrayTree, category: Category) -> None:
        """Enters the category of a step, whose results the devices compute from now on; they must not be donated."""
        self.enter(category)
        self._step = category
        self._devices.dispatch(results)

    def close(self) -> None:
        """Ends the thread that waits for results."""
        self._devices.close()


def process_age() -> float:
    """Returns the seconds since this process began, before it imported anything; 0.0 where Linux does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # proc_pid_stat(5): starttime
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
