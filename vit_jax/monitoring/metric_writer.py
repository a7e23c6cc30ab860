"""What a run tells: lines or a progress bar, metrics.jsonl, TensorBoard events, and how fast it goes."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import tensorboardX
from tqdm import tqdm

from vit_jax import UserError

Metrics = dict[str, float]
MetricsCallback = Callable[[int, Metrics], None]
METRICS = "metrics.jsonl"


class MetricWriter:
    """Writes to `<workdir>/{train.log, metrics.jsonl}`, TensorBoard events and the terminal; on the first host only.

    Lines of metrics.jsonl are `{"step": n, "train/loss": ..., ...}`. Those after step `start` are dropped when a run
    resumes there, and that of an evaluation of `start` if it is done again, so that the file reads as if the run had
    never stopped; all, when it starts anew.
    """

    def __init__(
        self,
        workdir: Path,
        start: int,
        evaluated: bool,
        total: int,
        batch: int,
        classes: int,
        wrote: Callable[[], None] = lambda: None,
        watch: MetricsCallback | None = None,
    ):
        """Begins.

        Args:
            workdir: the folder of the files.
            start: steps done before.
            evaluated: the last of them was evaluated, if that was due.
            total: steps of the whole run.
            batch: images of a step.
            classes: of the data; of five or fewer the top-5 accuracy, which is 100 %, is not told.
            wrote: called after each line of metrics.
            watch: called with the metrics of each line, those kept included; they are then not told on the terminal,
                where a bar is drawn.
        """
        self._wrote, self._watch = wrote, watch
        self._writes = jax.process_index() == 0
        self._start, self._total, self._batch = start, total, batch
        self._untold = ("norm/", "/top5") if classes <= 5 else ("norm/",)
        self._bar = None
        self.start_clock(start)
        if not self._writes:
            return
        self._text = (workdir / "train.log").open("a")
        path = _cut(workdir / METRICS, start, evaluated)
        if watch and path.exists():
            for step, metrics in _read(path):
                watch(step, metrics)
        self._jsonl = path.open("a")
        self._events = tensorboardX.SummaryWriter(str(workdir), purge_step=start + 1 if start else None)
        if watch or sys.stderr.isatty():  # a notebook is no terminal, but draws a bar
            self._bar = tqdm(initial=start, total=total, unit="step", dynamic_ncols=True, smoothing=0.05)

    def write_text(self, text: str, to_terminal: bool = True) -> None:
        """Writes lines of text to the file and, aloud, to the terminal."""
        if not self._writes:
            return
        if to_terminal:
            tqdm.write(text, file=sys.stderr)
        self._text.write(text + "\n")
        self._text.flush()

    def advance(self, step: int) -> None:
        """Moves the progress bar."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def start_clock(self, step: int, waited: float = 0.0) -> None:
        """Lets the speed count from here, after `step` steps and `waited` seconds without a batch."""
        self._clock, self._counted, self._waited = time.monotonic(), step, waited

    def speed(self, step: int, waited: float) -> Metrics:
        """Returns images per second since the last call, evaluation and saving left out, and the share of that time in
        which the host waited for the loader: devices may have been at work meanwhile.
        """
        passed = max(time.monotonic() - self._clock, 1e-9)
        rate, share = (step - self._counted) * self._batch / passed, min((waited - self._waited) / passed, 1.0)
        self.start_clock(step, waited)
        return {
            "train/images_per_sec": rate,
            "train/images_per_sec_per_chip": rate / jax.device_count(),
            "perf/data_wait": share,
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps what happens inside out of the speed."""
        began = time.monotonic()
        yield
        self._clock += time.monotonic() - began

    def write_metrics(self, step: int, metrics: Metrics) -> None:
        """Writes the metrics of a step everywhere, if there are any."""
        if not self._writes or not metrics:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._jsonl.write(json.dumps({"step": step, **finite}) + "\n")
        self._jsonl.flush()
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self.write_text(self._line(step, metrics), to_terminal=self._watch is None)
        self._wrote()
        if self._watch:
            self._watch(step, metrics)

    def flush(self) -> None:
        """Writes out what is still in memory."""
        if self._writes:
            self._events.flush()

    def close(self) -> None:
        """Closes the files and ends the bar."""
        if not self._writes:
            return
        if self._bar is not None:
            self._bar.close()
        for file in (self._text, self._jsonl, self._events):
            file.close()

    def _shown(self, name: str) -> bool:
        return not (name.startswith(self._untold) or name.endswith(self._untold))

    def _line(self, step: int, metrics: Metrics) -> str:
        words = [f"step {step}/{self._total}"]
        words += [f"{_label(name)} {_number(name, value)}" for name, value in metrics.items() if self._shown(name)]
        if "train/images_per_sec" in metrics:
            left = (self._total - step) * self._batch / max(metrics["train/images_per_sec"], 1e-9)
            words.append(f"ETA {duration(left)}")
        return "  ".join(words)


def duration(seconds: float) -> str:
    """Returns seconds as 1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _label(name: str) -> str:
    return (
        name.removeprefix("train/")
        .removeprefix("perf/")
        .replace("images_per_sec", "images/s")
        .replace("_per_chip", "/chip")
    )


def _number(name: str, value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if name.endswith(("accuracy", "top5", "data_wait")):
        return f"{value:.2%}"
    if "images_per_sec" in name:
        return f"{value:,.1f}"
    return f"{value:.4g}"


def _read(path: Path) -> Iterator[tuple[int, Metrics]]:
    """Yields steps and their metrics."""
    for line in path.read_text().splitlines():
        values = json.loads(line)
        step = values.pop("step")
        yield step, {name: math.nan if value is None else value for name, value in values.items()}


def last_logged_step(workdir: Path) -> int:
    """Returns the step of the last line of metrics that a run has left in a folder; 0: it has left none.

    Raises:
        UserError: the file is not one of ours, or is damaged.
    """
    path = workdir / METRICS
    try:
        return max((int(json.loads(line)["step"]) for line in _lines(path)), default=0) if path.exists() else 0
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not what a run writes; move it away, or choose another --workdir.") from error


def _lines(path: Path) -> list[str]:
    """Returns the lines of a metrics file, without one that was cut short."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _cut(path: Path, last: int, evaluated: bool) -> Path:
    """Drops the lines after step `last`, that of its evaluation unless it is `evaluated`, and that of step 0."""
    if path.exists():
        read = [(line, json.loads(line)) for line in _lines(path)]
        kept = [(line, values) for line, values in read if 0 < values["step"] <= last]
        if not evaluated:
            kept = [(line, values) for line, values in kept if values["step"] < last or "train/loss" in values]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(line for line, _ in kept))
        partial.replace(path)
    return path
