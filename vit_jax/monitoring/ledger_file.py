"""The ledger of a run over all its starts: `ledger.json` in its folder, a row for each."""

import contextlib
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from vit_jax.json_text import to_json
from vit_jax.monitoring.ledger import Category, Ledger
from vit_jax.storage import atomic_write
from vit_jax.text_tables import align
from vit_jax.tree import ArrayTree

LEDGER = "ledger.json"
CLOCK_SET = 1.6e9  # in 2020: an earlier time is that of a machine whose clock was not set yet
INTERVAL = 5.0  # seconds between two writes: a start that is killed has less unwritten


@dataclasses.dataclass(frozen=True)
class Start:
    """A process that trained the run, as it was written last.

    Attributes:
        first: steps done before the process.
        last: the last step that the process dispatched, saved or not. A killed process may not have logged its metrics.
        began: when the process began, in seconds since 1970.
        seconds: category -> seconds spent on it; categories of 0 seconds are absent.
        saves: the number of saves that the process began.
        complete: whether the process has finished the run.
    """

    first: int
    last: int
    began: float
    seconds: dict[str, float]
    saves: int = 0
    complete: bool = False

    @property
    def end(self) -> float:
        """The time at which it was written last, in seconds since 1970.

        Since it is counted from `began` by a monotonic clock, it does not depend on later changes of the system clock.
        """
        return self.began + sum(self.seconds.values())


def read_ledger(text: bytes) -> list[Start]:
    """Returns the starts of a run from the text of its file. Damaged rows are left out: no run depends on them."""
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        return []
    starts = []
    for row in rows if isinstance(rows, list) else ():
        with contextlib.suppress(ValueError, TypeError, AttributeError, OverflowError):
            starts.append(_start_from_json(row))
    return starts


def _start_from_json(row: dict[str, Any]) -> Start:
    start = Start(**row)
    seconds = {str(Category(name)): float(spent) for name, spent in start.seconds.items()}
    counts = start.first, start.last, start.saves
    whole = all(isinstance(count, int) and 0 <= count < 2**31 for count in counts)
    if not (
        whole and start.first <= start.last and math.isfinite(start.end) and min(seconds.values(), default=0.0) >= 0
    ):
        raise ValueError("no row of a ledger")
    return dataclasses.replace(start, seconds=seconds)


def total_seconds(starts: Sequence[Start]) -> dict[Category, float]:
    """Returns the seconds of each category over the starts of a run, and between them.

    They add up to the time from the first start to the end of the last. A run that was complete and is trained further
    was not idle in between. Where a clock was set back, a start seems to begin before the end of the one before it. No
    idle time is then counted between the two, nor after a start on a machine whose clock was not set, which seems to
    begin in 1970.
    """
    total = dict.fromkeys(Category, 0.0)
    for start in starts:
        for name, spent in start.seconds.items():
            total[Category(name)] += spent
    for before, after in itertools.pairwise(starts):
        known = before.began > CLOCK_SET and not before.complete
        total[Category.IDLE] += max(after.began - before.end, 0.0) if known else 0.0
    return total


def goodput(total: dict[Category, float]) -> float:
    """Returns the share of all seconds that belong to `Category.STEP`; 0.0 if there are no seconds."""
    return total[Category.STEP] / max(sum(total.values()), 1e-9)


class LedgerFile:
    """Writes a row with what this start has taken so far after the rows of earlier starts, on the first host only.

    A disk that refuses is tried again later: no run ends for its ledger.

    Attributes:
        reached: the last step that earlier starts had made.
        starts: all starts, the last of them this one.
    """

    def __init__(
        self, workdir: Path, start: int, total: int, ledger: Ledger, clock: Callable[[], float] = time.monotonic
    ):
        """Reads the rows of earlier starts, and writes the row of this one.

        If `start` is 0, earlier rows are kept if they made steps, since such a start was killed before its first save.
        Otherwise they are of another run and are dropped. If the run was complete before, nothing is written.

        Args:
            workdir: the folder of the run, or the local side of it.
            start: steps done before this start.
            total: steps of the whole run.
            ledger: the ledger of this start.
            clock: returns seconds.
        """
        self._path, self._ledger, self._clock = workdir / LEDGER, ledger, clock
        self._before = list[Start]()
        with contextlib.suppress(OSError):
            self._before = read_ledger(self._path.read_bytes())
        self.reached = max((each.last for each in self._before), default=0)
        if not start and not self.reached:
            self._before = []
        self._first, self._last, self._saves, self._complete = start, start, 0, False
        was_complete = start == total > 0 and (not self._before or self._before[-1].complete)
        self._writes = jax.process_index() == 0 and not was_complete
        self.write()

    @property
    def starts(self) -> list[Start]:
        """All starts. This one is the last, with its seconds until now; it is absent if nothing is written."""
        return [*self._before, *([self._this()] if self._writes else [])]

    def category(self, step: int) -> Category:
        """Returns the category of the seconds in which a step is dispatched.

        It is `COMPILING` for the first step of this start. It is `REDONE` for other steps that an earlier start made,
        else `STEP`.
        """
        return Category.COMPILING if step == self._first + 1 else self._repeated(step)

    def count_step(self, step: int, results: ArrayTree) -> None:
        """Notes that a step was dispatched, and writes the row if the last write was over `INTERVAL` seconds ago.

        Args:
            step: the number of the step, from 1.
            results: what the devices compute. They must not be donated to a later step.
        """
        self._ledger.dispatch(results, self._repeated(step))
        self._last = step
        if self._clock() - self._wrote > INTERVAL:
            self.write()

    def count_save(self) -> None:
        """Notes that a save begins, and writes the row."""
        self._saves += 1
        self.write()

    def complete(self) -> None:
        """Notes that the run is finished, and writes the row."""
        self._complete = True
        self.write()

    def close(self) -> None:
        """Writes what this start has taken to its end."""
        self.write()
        self._ledger.close()

    def write(self) -> None:
        """Writes the row of this start anew, if the disk takes it."""
        self._wrote = self._clock()
        if not self._writes:
            return
        rows = [dataclasses.asdict(start) for start in self.starts]
        with contextlib.suppress(OSError), atomic_write(self._path) as temporary:
            temporary.write_text(to_json(rows, indent=2) + "\n")

    def _repeated(self, step: int) -> Category:
        return Category.REDONE if step <= self.reached else Category.STEP

    def _this(self) -> Start:
        seconds = {str(name): round(spent, 3) for name, spent in self._ledger.seconds.items() if spent >= 0.0005}
        began = round(self._ledger.began, 3)
        return Start(self._first, self._last, began, seconds, self._saves, self._complete)


def ledger_lines(starts: Sequence[Start]) -> list[str]:
    """Returns the lines of a table of where the time of a run went; no lines if no second is known."""
    total = total_seconds(starts)
    whole = sum(total.values())
    if not whole:
        return []
    since = f", since step {starts[0].first:,}" if starts[0].first else ""
    count = f"{len(starts):,} start{'s' if len(starts) > 1 else ''}{since}"
    rows = [(str(name), f"{spent:,.1f} s", f"{spent / whole:.1%}") for name, spent in total.items() if spent]
    rows.append(("all", f"{whole:,.1f} s", count))
    table = [f"  {line}" for line in align(rows, right=(1, 2))]
    return [f"Goodput: {goodput(total):.1%}, the share of the time in which steps were made that count.", *table]
