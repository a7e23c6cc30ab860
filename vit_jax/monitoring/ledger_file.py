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

from vit_jax.columns import align
from vit_jax.monitoring.ledger import Category, Ledger
from vit_jax.storage import atomic_write
from vit_jax.tree import ArrayTree

LEDGER = "ledger.json"
INTERVAL = 5.0  # seconds between two writes: a start that is killed has less unwritten


@dataclasses.dataclass(frozen=True)
class Start:
    """A process that trained the run, as far as it was written.

    Attributes:
        first: steps done before.
        last: the last step that it made, saved or not.
        began: when, in seconds since 1970.
        seconds: those of each category that is not 0.
        saves: how many it began.
        complete: it has finished the run.
    """

    first: int
    last: int
    began: float
    seconds: dict[str, float]
    saves: int = 0
    complete: bool = False

    @property
    def end(self) -> float:
        """When it was written last, in seconds since 1970; by the monotonic clock, whatever was done to the other."""
        return self.began + sum(self.seconds.values())


def read_ledger(text: bytes) -> list[Start]:
    """Returns the starts of a run from the text of its file; what is damaged is left out: no run depends on it."""
    try:
        rows = json.loads(text)
    except ValueError:
        return []
    starts = []
    for row in rows if isinstance(rows, list) else ():
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            starts.append(_start_from_json(row))
    return starts


def _start_from_json(row: dict[str, Any]) -> Start:
    start = Start(**row)
    seconds = {str(Category(name)): float(spent) for name, spent in start.seconds.items()}
    if not (0 <= start.first <= start.last and math.isfinite(start.end) and min(seconds.values(), default=0.0) >= 0):
        raise ValueError("no row of a ledger")
    return dataclasses.replace(start, seconds=seconds)


def total_seconds(starts: Sequence[Start]) -> dict[Category, float]:
    """Returns the seconds of each category over the starts of a run, and between them.

    They add up to the time from the first start to the end of the last. A run that was complete and is trained further
    was not idle in between. Where a clock was set back, a start seems to begin before the end of the one before it:
    then they were not idle either.
    """
    total = dict.fromkeys(Category, 0.0)
    for start in starts:
        for name, spent in start.seconds.items():
            total[Category(name)] += spent
    for before, after in itertools.pairwise(starts):
        total[Category.IDLE] += 0.0 if before.complete else max(after.began - before.end, 0.0)
    return total


def goodput(total: dict[Category, float]) -> float:
    """Returns the share of all seconds in which steps were made that count; 0.0 if there are none."""
    return total[Category.STEP] / max(sum(total.values()), 1e-9)


class LedgerFile:
    """Writes what this start has taken so far after the rows of earlier ones; on the first host only.

    A disk that refuses is tried again later: no run ends for its ledger.

    Attributes:
        reached: the last step that earlier starts had made.
        starts: all of them, this one as it was written last.
    """

    def __init__(
        self, workdir: Path, start: int, total: int, ledger: Ledger, clock: Callable[[], float] = time.monotonic
    ):
        """Opens the file, and writes a row.

        At step 0, what lies there counts if it made steps: a start that was killed before its first save. Otherwise it
        is of another run. A complete run that is looked at again keeps its ledger.

        Args:
            workdir: the folder of the run, or the local side of it.
            start: steps done before.
            total: steps of the whole run.
            ledger: of this start.
            clock: gives seconds.
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
        """All starts, this one until now if it is written."""
        return [*self._before, *([self._this()] if self._writes else [])]

    def category(self, step: int) -> Category:
        """Returns what the seconds of a step belong to until it is dispatched; the first of a start is compiled."""
        return Category.COMPILING if step == self._first + 1 else self._repeated(step)

    def count_step(self, step: int, results: ArrayTree) -> None:
        """Notes that a step is dispatched, and writes that if the last write was a while ago."""
        self._ledger.dispatch(results, self._repeated(step))
        self._last = step
        if self._clock() - self._wrote > INTERVAL:
            self.write()

    def count_save(self) -> None:
        """Notes that a save begins, and writes that."""
        self._saves += 1
        self.write()

    def complete(self) -> None:
        """Notes that the run is finished."""
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
            temporary.write_text(json.dumps(rows, indent=2) + "\n")

    def _repeated(self, step: int) -> Category:
        return Category.REDONE if step <= self.reached else Category.STEP

    def _this(self) -> Start:
        seconds = {str(name): round(spent, 3) for name, spent in self._ledger.seconds.items() if spent >= 0.0005}
        began = round(self._ledger.began, 3)
        return Start(self._first, self._last, began, seconds, self._saves, self._complete)


def ledger_lines(starts: Sequence[Start]) -> list[str]:
    """Returns where the time of a run went, as a table; nothing if no second is known."""
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
