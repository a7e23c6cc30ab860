"""The contents of the folder of a run, finished or not: configuration, metrics, processes, plan and saved outputs."""

import dataclasses
import functools
import json
import math
import posixpath
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, encode_text, user_errors, without_queries
from vit_jax.config import flatten_config, is_lowest_best, parse_config
from vit_jax.monitoring.metrics_file import METRICS, read_metrics
from vit_jax.monitoring.run_ledger import PROCESS_FILES, Start, read_processes
from vit_jax.storage import filesystem

CONFIG, PLAN, MISTAKES = "config.json", "plan.json", ".mistakes.npz"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run as its folder describes it.

    Attributes:
        name: the name of the run.
        location: the folder, local or remote.
        config: the configuration.
        metrics: (step, metrics) of each step that has metrics, once and in order.
        processes: the processes that trained it, see `vit_jax.monitoring.Processes`; none before the first save.
        plan: the content of plan.json, which `vit_jax.plan --json` printed there; None: there is no such file.
        mistakes: name of a file that `vit_jax.evaluate --save=mistakes` wrote there -> its content.
        starts: where its time went, by process; none if an earlier version trained it.
    """

    name: str
    location: str
    config: ConfigDict
    metrics: list[tuple[int, dict[str, float]]]
    processes: list[dict[str, Any]]
    plan: bytes | None
    mistakes: dict[str, bytes]
    starts: list[Start] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def fields(self) -> dict[str, str]:
        """Dotted name of a field of the configuration -> its value as text."""
        return fields_as_text(self.config)

    @property
    def step(self) -> int:
        """The last step that has metrics."""
        return self.metrics[-1][0] if self.metrics else 0

    @functools.cached_property
    def last(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: value for _, metrics in self.metrics for name, value in metrics.items()}

    @property
    def exported_step(self) -> int:
        """The step of the exported weights: the last or, with `stop_after`, the best; of equal ones the newest."""
        metric, sign = self.config.checkpoint.best_metric, -1 if is_lowest_best(self.config) else 1
        scores = [(sign * metrics.get(metric, math.nan), step) for step, metrics in self.metrics]
        finite = [score for score in scores if math.isfinite(score[0])]
        return max(finite)[1] if finite and self.config.stop_after is not None else self.step

    @property
    def exported(self) -> dict[str, float]:
        """The metrics at the step of the exported weights; the last value of each metric that was not taken there."""
        return self.last | dict(self.metrics).get(self.exported_step, {})

    @property
    def is_complete(self) -> bool:
        """Whether the training, which may end early, and its last evaluation have ended."""
        evaluated = not self.step or self.config.checkpoint.best_metric in self.metrics[-1][1]
        ended = self.step >= self.config.total_steps or bool(self.starts and self.starts[-1].complete)
        return ended and evaluated


def find_runs(folder: str) -> dict[str, str]:
    """Returns folder of a run -> name of the run, for the run in `folder` or else for all runs below it.

    The name of the run in `folder` is the name of the folder. The name of a run below it is its path from there on.

    Args:
        folder: a folder, local or remote.

    Raises:
        UserError: there is no run.
    """
    top = filesystem.absolute_path(folder).rstrip("/")
    if filesystem.exists(filesystem.join_path(top, CONFIG)):
        return {top: posixpath.basename(top)}
    remote = filesystem.is_remote(top)
    files = filesystem.list_files(top) if remote else [str(path.relative_to(top)) for path in Path(top).rglob(CONFIG)]
    runs = sorted(posixpath.dirname(file) for file in files if posixpath.basename(file) == CONFIG)
    if not runs:
        raise UserError(f"there is no run in {folder}: no folder there contains a {CONFIG}.")
    return {filesystem.join_path(top, run): f"{posixpath.basename(top)}/{run}" for run in runs}


def read_run(location: str, name: str) -> RunFolder:
    """Returns what lies in the folder of a run.

    Raises:
        UserError: there is no run, or a file cannot be read.
    """
    paths = {file: filesystem.join_path(location, file) for file in (CONFIG, METRICS, PLAN, *PROCESS_FILES)}
    text = {file: filesystem.read_bytes(path) for file, path in paths.items() if filesystem.exists(path)}
    saved = filesystem.expand_pattern(filesystem.join_path(location, f"*{MISTAKES}"))
    if CONFIG not in text:
        raise UserError(f"{location} is not the folder of a run: it contains no {CONFIG}.")
    config = parse_config(text[CONFIG], paths[CONFIG])
    if "total_steps" not in config:
        raise UserError(f"{location} is not the folder of a run: its {CONFIG} is of another program.")
    processes = read_processes({file: text[file] for file in PROCESS_FILES if file in text}, location)
    return RunFolder(
        name,
        location,
        config,
        read_metrics(text.get(METRICS, b""), paths[METRICS]),
        processes.saved,
        text.get(PLAN),
        {path.rpartition("/")[2]: filesystem.read_bytes(path) for path in sorted(saved)},
        processes.starts,
    )


def fields_as_text(config: ConfigDict) -> dict[str, str]:
    """Returns dotted name of a field of a configuration -> its value as text, `without_queries` of addresses."""
    return {name: _as_text(value) for name, value in flatten_config(config).items()}


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return without_queries(value)
    return "unset" if value is None else json.dumps(value, default=list)


def write_page(path: str, content: str) -> str:
    """Writes a page, local or remote, and returns its path.

    Raises:
        UserError: the page cannot be written.
    """
    if not filesystem.is_remote(path):
        with user_errors(f"cannot write {path}"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
    filesystem.write_bytes(path, encode_text(content))
    return path
