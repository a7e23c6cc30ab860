"""Metrics of a run: log lines or a progress bar, metrics.jsonl, TensorBoard events, and the speed of training."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from vit_jax import encode_text, ignore_closed_stderr, machine, monitoring, user_errors, without_queries
from vit_jax.json_text import to_json
from vit_jax.monitoring.log_folder import LogFolder
from vit_jax.monitoring.metrics_file import METRICS, Metrics, drop_lines, read_metrics

MetricsCallback = Callable[[int, Metrics], None]
LOG = "train.log"
PERCENT_METRICS = re.compile(r"(accuracy|top5|data_wait)$|/\d+(shot|nn)")  # fractions
PROGRESS_NOTICE_SECONDS = 30.0  # after which a run that logs rarely says how far it is


class MetricWriter:
    """Writes to `<workdir>/{train.log, metrics.jsonl}`, TensorBoard events and the terminal; on the first host only.

    Lines of metrics.jsonl are `{"step": n, "train/loss": ..., ...}`. When a run resumes after step `start`, later lines
    are dropped, and so is an evaluation of `start` that will be repeated: the file reads as if the run had never
    stopped. When a run starts from the beginning, all lines are dropped.
    """

    def __init__(
        self,
        workdir: Path,
        start: int,
        evaluated: bool,
        total: int,
        batch: int,
        classes: int,
        on_write: Callable[[], None] = lambda: None,
        watch: MetricsCallback | None = None,
        wandb: Any = None,
    ):
        """Opens the files.

        Args:
            workdir: the folder of the files.
            start: steps done before.
            evaluated: whether the state after step `start` needs no evaluation: it had one, or none was due.
            total: steps of the whole run.
            batch: images per step.
            classes: classes of the data; with five or fewer the top-5 accuracy, always 100 %, is not printed.
            on_write: called after each line of metrics.
            watch: called with the step and the metrics of each line, kept lines included; the terminal then shows a
                progress bar instead of the lines.
            wandb: a `WandbRun` that is given each line of metrics too, or None.

        Raises:
            UserError: the files cannot be written. Later, what cannot be written waits; see `LogFolder`.
        """
        self._on_write, self._watch, self._wandb = on_write, watch, wandb
        self._writes = jax.process_index() == 0
        self._start, self._total, self._batch = start, total, batch
        self._hidden = ("norm/", "_std", "/top5") if classes <= 5 else ("norm/", "_std")
        self._wrote_text = time.monotonic()
        self.start_clock(start)
        if not self._writes:
            return
        path, self._events = workdir / METRICS, monitoring.events.event_file_name()
        with user_errors(f"cannot write the logs in {workdir}"):
            for name in (LOG, METRICS, self._events):
                (workdir / name).touch()
            drop_lines(path, start, evaluated)
        if watch:
            for step, metrics in read_metrics(path.read_bytes(), str(path)):
                watch(step, metrics)
        self._logs = LogFolder(workdir)
        self._logs.append(self._events, monitoring.events.first_record(start))
        self._terminal = Terminal(watch is not None, start, total)

    def write_text(self, text: str, to_terminal: bool = True) -> None:
        """Writes lines of text, `without_queries`, to train.log and to the terminal."""
        if not self._writes:
            return
        text = without_queries(text)
        self._wrote_text = time.monotonic()
        if to_terminal:
            self._terminal.write(text)
        self._logs.append(LOG, encode_text(f"{text}\n"))

    def write_progress(self, step: int, metrics: Metrics) -> None:
        """Writes the metrics of a step as text, if none was for `PROGRESS_NOTICE_SECONDS` and no bar is drawn."""
        if (
            self._writes
            and not self._terminal.has_bar
            and time.monotonic() - self._wrote_text > PROGRESS_NOTICE_SECONDS
        ):
            self.write_text(self._line(step, metrics), to_terminal=self._watch is None)

    def advance(self, step: int) -> None:
        """Moves the progress bar."""
        if self._writes:
            self._terminal.advance(step)

    def set_total(self, total: int) -> None:
        """Takes another number of steps of the whole run, which ends early."""
        self._total = total
        if self._writes:
            self._terminal.set_total(total)

    def start_clock(self, step: int, waited: float = 0.0) -> None:
        """Starts to measure the speed after `step` steps and `waited` seconds without a batch."""
        self._clock, self._counted, self._waited = time.monotonic(), step, waited

    def speed(self, step: int, waited: float) -> Metrics:
        """Returns the speed since the last call, as metrics, and starts to measure anew.

        These are the images per second and the fraction of the time in which the host waited for data, whether the
        devices were busy meanwhile or not. The time in `paused` does not count.

        Args:
            step: the number of steps done.
            waited: the seconds spent waiting for data so far.
        """
        passed = max(time.monotonic() - self._clock, 1e-9)
        rate, fraction = (step - self._counted) * self._batch / passed, min((waited - self._waited) / passed, 1.0)
        self.start_clock(step, waited)
        return {
            "train/images_per_sec": rate,
            "train/images_per_sec_per_chip": rate / machine.count_chips(jax.devices()),
            "perf/data_wait": fraction,
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time spent in the block from the speed."""
        began = time.monotonic()
        yield
        self._clock += time.monotonic() - began

    def write_metrics(self, step: int, metrics: Metrics) -> None:
        """Writes the metrics of a step to all files and to the terminal; nothing if `metrics` is empty."""
        if not self._writes or not metrics:
            return
        self._logs.append(METRICS, (to_json({"step": step, **metrics}) + "\n").encode())
        self._logs.append(self._events, monitoring.events.metrics_record(step, metrics))
        if self._wandb:
            self._wandb.write_metrics(step, metrics)
        self.write_text(self._line(step, metrics), to_terminal=self._watch is None)
        self._on_write()
        if self._watch:
            self._watch(step, metrics)

    def flush(self) -> None:
        """Tries to write what the disk refused."""
        if self._writes:
            self._logs.flush()

    def close(self) -> None:
        """Closes the files and the progress bar."""
        if self._writes:
            self._terminal.close()
            self._logs.close()
        if self._wandb:
            self._wandb.close()

    def _is_printed(self, name: str) -> bool:
        return not (name.startswith(self._hidden) or name.endswith(self._hidden))

    def _line(self, step: int, metrics: Metrics) -> str:
        words = [f"step {step}/{self._total}"]
        words += [
            f"{_label(name)} {format_value(name, value)}" for name, value in metrics.items() if self._is_printed(name)
        ]
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


def is_percent_metric(name: str) -> bool:
    """Returns whether a metric is a fraction, which is printed in percent: an accuracy, or the time waited for data."""
    return PERCENT_METRICS.search(name) is not None


def format_value(name: str, value: float) -> str:
    """Returns the value of a metric as text: an accuracy as a percentage, most others with 4 digits."""
    if isinstance(value, int):
        return f"{value:,}"
    if is_percent_metric(name):
        return f"{value:.2%}"
    if "images_per_sec" in name:
        return f"{value:,.1f}"
    return f"{value:.4g}"


class Terminal:
    """Lines of text and a bar on stderr, as long as anything reads it."""

    def __init__(self, bar: bool, start: int, total: int):
        """Draws a bar from step `start` to `total`, if asked to or if stderr is a terminal."""
        self.has_bar = bar or (sys.stderr is not None and sys.stderr.isatty())  # a notebook is none, but shows a bar
        with ignore_closed_stderr():
            self._bar = tqdm(
                initial=start, total=total, unit="step", dynamic_ncols=True, smoothing=0.05, disable=not self.has_bar
            )

    @ignore_closed_stderr()
    def write(self, text: str) -> None:
        """Writes lines."""
        tqdm.write(text, file=sys.stderr)

    @ignore_closed_stderr()
    def advance(self, step: int) -> None:
        """Moves the bar."""
        self._bar.update(step - self._bar.n)

    @ignore_closed_stderr()
    def set_total(self, total: int) -> None:
        """Changes the step at which the bar ends."""
        self._bar.total = total
        self._bar.refresh()

    @ignore_closed_stderr()
    def close(self) -> None:
        """Ends the bar, which stays visible as it is."""
        self._bar.close()
