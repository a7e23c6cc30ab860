"""All processes that trained a run: with what, how far, in which time, and what that adds up to (goodput).

`processes.json` has a row for each process. The row is written with every save and every five seconds. Its entry
`saved` is of the last save, the others are of the moment of writing. Earlier versions wrote the two into files of their
own, which are read as before: `history.json` has the processes by saves, `ledger.json` by time.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from vit_jax import UserError, __version__
from vit_jax.json_text import to_json
from vit_jax.machine import describe_hardware
from vit_jax.monitoring.process_ledger import Category, Ledger
from vit_jax.storage import atomic_write
from vit_jax.text_tables import align
from vit_jax.tree import ArrayTree

PROCESSES, HISTORY, LEDGER = "processes.json", "history.json", "ledger.json"
PROCESS_FILES = (PROCESSES, HISTORY, LEDGER)  # the last two are of earlier versions
EVERY = {"first", "last", "seconds", "hardware"}  # the keys of every process that saved a state
CLOCK_SET = 1.6e9  # in 2020: an earlier time is that of a machine whose clock was not set yet
INTERVAL = 5.0  # seconds between two writes: a start that is killed has less unwritten
PACKAGE = Path(__file__).parents[1]

Row = dict[str, Any]


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


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that trained a run.

    Attributes:
        saved: the processes that saved a state, in order, each a dict. `first` and `last` are the numbers of steps done
            before the process and at its last save. `seconds` is its duration up to that save. `hardware` describes the
            devices in words. `vit_jax`, `commit`, `jax` and `python` are versions. `peak_bytes` is the most memory in
            use on a device of the first host, where devices tell. `teacher_macs` are the multiply-accumulates of the
            forward pass of a teacher on an image, where there is one.
        starts: where the time of each process went. None for the processes of versions that did not write it.
    """

    saved: list[dict[str, Any]]
    starts: list[Start]


def read_processes(texts: Mapping[str, bytes], folder: str) -> Processes:
    """Returns the processes of a run.

    Damaged records of where the time went are left out: no run depends on them.

    Args:
        texts: name of a file of `PROCESS_FILES` -> its content, for those that the run has.
        folder: the folder of the run, for errors.

    Raises:
        UserError: a file is damaged.
    """
    return _read_rows(_rows(texts, folder))


def _rows(texts: Mapping[str, bytes], folder: str) -> list[Row]:
    """Returns the rows of a run; for a run of an earlier version, those that this version writes when it goes on."""
    if PROCESSES in texts:
        return _parse(texts[PROCESSES], f"{folder}/{PROCESSES}")
    timed: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        timed = json.loads(texts.get(LEDGER, b""))
    rows = [row for row in timed if isinstance(row, dict)] if isinstance(timed, list) else []
    return [*_parse(texts.get(HISTORY, b"[]"), f"{folder}/{HISTORY}", by_saves=True), *rows]


def _parse(text: bytes, path: str, by_saves: bool = False) -> list[Row]:
    try:
        processes = json.loads(text)
        rows = [{"saved": process} if by_saves else process for process in processes]
        valid = isinstance(processes, list) and all("saved" not in row or row["saved"].keys() >= EVERY for row in rows)
    except (ValueError, TypeError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise UserError(f"cannot read {path}: it does not list the processes of a run; move the file away.")
    return rows


def _read_rows(rows: Sequence[Row]) -> Processes:
    starts = []
    for row in rows:
        with contextlib.suppress(ValueError, TypeError, AttributeError, OverflowError):
            starts.append(_start_from_json({name: value for name, value in row.items() if name != "saved"}))
    return Processes([row["saved"] for row in rows if "saved" in row], starts)


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


class ProcessFile:
    """Writes a row on this process after the rows of earlier ones, on the first host only.

    A disk that refuses is tried again later: no run ends for this file.

    Attributes:
        reached: the last step that earlier starts had made.
        starts: all starts, the last of them this one.
    """

    def __init__(
        self,
        workdir: Path,
        start: int,
        total: int,
        ledger: Ledger,
        devices: Sequence[jax.Device],
        teacher_macs: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Reads the rows of earlier processes, and writes the row of this one. A damaged file is begun anew.

        If `start` is 0, what earlier rows say of saves is dropped, as it is of another run. Rows that made steps are
        kept without it, since such a start was killed before its first save. If the run was complete before, nothing is
        written.

        Args:
            workdir: the folder of the run, or the local side of it.
            start: steps done before this start.
            total: steps of the whole run.
            ledger: the ledger of this start.
            devices: the devices of the mesh.
            teacher_macs: the multiply-accumulates of the forward pass of a teacher on an image; 0: there is none.
            clock: returns seconds.
        """
        self._path, self._ledger, self._clock, self._began = workdir / PROCESSES, ledger, clock, clock()
        self._before = list[Row]()
        with contextlib.suppress(OSError, UserError):
            texts = {name: (workdir / name).read_bytes() for name in PROCESS_FILES if (workdir / name).exists()}
            self._before = _rows(texts, str(workdir))
        self._starts = _read_rows(self._before).starts
        self.reached = max((each.last for each in self._starts), default=0)
        if not start:
            self._starts = self._starts if self.reached else []
            self._before = [dataclasses.asdict(each) for each in self._starts]
        self._first, self._last, self._saves, self._complete = start, start, 0, False
        was_complete = start == total > 0 and (not self._starts or self._starts[-1].complete)
        self._writes = jax.process_index() == 0 and not was_complete
        self._devices = [device for device in devices if device.process_index == jax.process_index()]
        self._saved = dict[str, Any]()
        self._process: dict[str, Any] = {}
        if self._writes:
            self._process = {
                "first": start,
                "last": start,
                "seconds": 0.0,
                "hardware": describe_hardware(devices),
                "vit_jax": __version__,
                "commit": package_commit(),
                "jax": jax.__version__,
                "python": platform.python_version(),
            } | ({"teacher_macs": teacher_macs} if teacher_macs else {})
        self.write()

    @property
    def starts(self) -> list[Start]:
        """All starts. This one is the last, with its seconds until now; it is absent if nothing is written."""
        return [*self._starts, *([self._this()] if self._writes else [])]

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

    def count_save(self, step: int) -> None:
        """Notes that the save of a state after `step` begins, and writes the row."""
        self._saves += 1
        self.note_state(step)

    def note_state(self, step: int) -> None:
        """Notes that the state after `step` is kept, and writes the row."""
        if not step == self._first > 0:  # else the process has resumed a run and made no step
            self._saved = self._process | {"last": step, "seconds": round(self._clock() - self._began, 1)}
            if peak := peak_bytes(self._devices):
                self._saved["peak_bytes"] = peak
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
        row = dataclasses.asdict(self._this()) | ({"saved": self._saved} if self._saved else {})
        with contextlib.suppress(OSError), atomic_write(self._path) as temporary:
            temporary.write_text(to_json([*self._before, row], indent=2) + "\n")

    def _repeated(self, step: int) -> Category:
        return Category.REDONE if step <= self.reached else Category.STEP

    def _this(self) -> Start:
        seconds = {str(name): round(spent, 3) for name, spent in self._ledger.seconds.items() if spent >= 0.0005}
        began = round(self._ledger.began, 3)
        return Start(self._first, self._last, began, seconds, self._saves, self._complete)


@functools.cache
def package_commit() -> str | None:
    """Returns the commit of the package, with -dirty if files differ from it; None: it is not a checkout of git."""
    if not (PACKAGE.parent / ".git").exists():
        return None  # a folder above may be under git for another reason
    command = [
        "git",
        "--no-optional-locks",
        "-C",
        str(PACKAGE),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None


def peak_bytes(devices: Sequence[jax.Device]) -> int:
    """Returns the most bytes that one of the devices has had in use; 0: the devices do not tell, as CPUs never do."""
    told = list[dict[str, int]]()
    for device in devices:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            told.append(device.memory_stats() or {})
    return max((stats.get("peak_bytes_in_use", 0) for stats in told), default=0)


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
