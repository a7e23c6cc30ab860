"""Trains with every combination of some fields' values, one after the other, and tells which is best.

Example:
  python -m vit_jax.sweep --config=configs/digits.py --sweep.base_lr=0.0005,0.002 --config.total_epochs=5

  --config   as for vit_jax.main; likewise --config.KEY=VALUE
  --sweep.KEY=VALUE,VALUE,...   the values of a field to try; several fields: all combinations
  --workdir  folder of the sweep, local, gs:// or s3:// [workdirs/<config name>]; each combination trains in a folder
             in it
  --json     print one JSON object, that of sweep.json in the workdir

The same command goes on where it was stopped: what is finished, or has diverged, is not run again. The best is that of
the largest checkpoint.best_metric at the end. Exit codes as of vit_jax.main.
"""

import dataclasses
import gc
import itertools
import json
import posixpath
import re
import shlex
import sys
import time
from typing import Any

import jax
from ml_collections import ConfigDict

import vit_jax
from vit_jax import NonFiniteLoss, UserError, cli, data
from vit_jax.config import flatten_config, parse_config
from vit_jax.config_flags import parse_command_line
from vit_jax.distributed import Supervisor
from vit_jax.main import supervised
from vit_jax.storage import filesystem

RESULT = "sweep.json"  # in the folder of a combination, once it is finished; of all together in the sweep's own
Grid = dict[str, list[str]]  # field -> values as written


@dataclasses.dataclass(frozen=True)
class Row:
    """What came of a combination; of one that diverged, up to then.

    Attributes:
        name: KEY=VALUE,... as written, and the name of its folder.
        last: the metric at the end; None: it diverged.
        best: the largest value of the metric on the way; None: it was never evaluated.
        steps: that it ran.
        seconds: that it took, without those before an interruption.
    """

    name: str
    last: float | None
    best: float | None
    steps: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Run:
    """A combination: its name, the command line that asks for it, its configuration and its folder."""

    name: str
    words: list[str]
    config: ConfigDict
    folder: str


def sweep(runs: list[Run], supervisor: Supervisor | None = None) -> list[Row]:
    """Trains what is not finished, and returns a row for each run, best first.

    Raises:
        UserError: one of the configurations is wrong, or a folder holds another; then nothing was begun. Or: something
            in the data or the workdir is wrong.
    """
    done = [finished(run) for run in runs]
    rows = []
    for number, (run, row) in enumerate(zip(runs, done, strict=True), start=1):
        print(f"[{number}/{len(runs)}] {run.name}{'' if row is None else ': done before'}", file=sys.stderr, flush=True)
        rows.append(train(run, supervisor) if row is None else row)
    return sorted(rows, key=lambda row: (row.last is None, -(row.last or 0.0)))


def finished(run: Run) -> Row | None:
    """Returns the row that `train` left, or None if it did not come to its end.

    Raises:
        UserError: the configuration is wrong, the folder holds a run of another or a file that is not ours, or it is
            remote, and the store refuses or does not answer.
    """
    config, _, _ = vit_jax.train.prepare(run.config)
    begun, result = (filesystem.join_path(run.folder, name) for name in ("config.json", RESULT))
    if not filesystem.exists(begun):
        return None
    old, new = _meaning(parse_config(filesystem.read_bytes(begun), begun)), _meaning(config)
    if differ := [key for key in new if old.get(key) != new[key]]:
        raise UserError(f"{run.folder} was run with another {', '.join(differ)}; choose a new --workdir.")
    return _row(run, result) if filesystem.exists(result) else None


def _meaning(config: ConfigDict) -> dict[str, Any]:
    """Returns the fields by name, the pipes of evaluations with the resolution filled in: they may be written anew."""
    pipes = {f"evals.{name}.preprocess": told["preprocess"] for name, told in data.describe_evals(config).items()}
    return flatten_config(config) | pipes


def _row(run: Run, path: str) -> Row:
    told = _read(path)
    number = int | float
    kinds = {"name": str, "last": number | None, "best": number | None, "steps": int, "seconds": number}
    fits = told.keys() == kinds.keys() and all(isinstance(told[key], kind) for key, kind in kinds.items())
    if not fits or told["name"] != run.name:
        raise _foreign(path)
    return Row(**told)


def _read(path: str) -> dict[str, Any]:
    content = filesystem.read_bytes(path)
    try:
        told = json.loads(content)
    except ValueError as error:
        raise _foreign(path) from error
    if not isinstance(told, dict):
        raise _foreign(path)
    return told


def _foreign(path: str) -> UserError:
    return UserError(f"{path} is not what a run leaves there; remove it, or choose another --workdir.")


def train(run: Run, supervisor: Supervisor | None = None) -> Row:
    """Trains a combination, from where it stands, and leaves its row in its folder."""
    gc.collect()  # what the run before left on the devices
    metric, start = run.config.checkpoint.best_metric, time.monotonic()
    try:
        last = vit_jax.train.train(run.config, run.folder, supervisor=supervisor)[metric]
    except NonFiniteLoss as error:
        print(f"{run.name}: {error}", file=sys.stderr, flush=True)
        last = None
    log = filesystem.join_path(run.folder, "metrics.jsonl")
    lines = [json.loads(line) for line in filesystem.read_bytes(log).splitlines()] if filesystem.exists(log) else []
    best = max((line[metric] for line in lines if line.get(metric) is not None), default=last)
    steps = max((line["step"] for line in lines), default=0)
    row = Row(run.name, last, best, steps, round(time.monotonic() - start, 1))
    if jax.process_index() == 0:
        told = json.dumps(dataclasses.asdict(row)) + "\n"
        filesystem.write_bytes(filesystem.join_path(run.folder, RESULT), told.encode())
    return row


def combinations(argv: list[str]) -> list[Run]:
    """Returns the combinations that a command line asks for, each configuration once, however its numbers are written.

    Raises:
        UserError: nothing or no field is varied, one is varied twice, two combinations would share a folder, nothing
            can be written to the workdir, or as `vit_jax.config_flags.parse_command_line`.
    """
    words = [word for word in argv if not word.startswith("--sweep.") and word != "--json"]
    grid = _grid(argv, words)
    runs: dict[str, Run] = {}
    for chosen in itertools.product(*grid.values()):
        pairs = [f"{key}={value}" for key, value in zip(grid, chosen, strict=True)]
        given = [*words, *(f"--config.{pair}" for pair in pairs)]
        config, workdir = parse_command_line(given)
        name = ",".join(sorted(pairs))
        folder = filesystem.join_path(vit_jax.train.check_workdir(workdir), re.sub(r"[^\w.,=+-]", "_", name))
        if any(run.config == config for run in runs.values()):
            continue
        if folder in runs:
            raise UserError(f"{runs[folder].name} and {name} would share {folder}; sweep them in two --workdirs.")
        runs[folder] = Run(name, given[1:], config, folder)
    return list(runs.values())


def _grid(argv: list[str], words: list[str]) -> Grid:
    grid: Grid = {}
    for word in argv:
        if word.startswith("--sweep."):
            key, _, values = word.removeprefix("--sweep.").partition("=")
            if not all(values.split(",")):
                raise UserError(f"{word} gives no values; write --sweep.base_lr=0.003,0.01.")
            if key in grid or any(other.startswith(f"--config.{key}=") for other in words):
                raise UserError(f"--sweep.{key} gives {key} a second time.")
            grid[key] = list(dict.fromkeys(values.split(",")))
    if not grid:
        raise UserError("say what to vary with --sweep.KEY=VALUE,VALUE, for example --sweep.base_lr=0.003,0.01.")
    return grid


def command(run: Run) -> str | None:
    """Returns the command that trains as a run did, but on the whole training split; None if that held nothing back,
    by split=dev in the config's argument.
    """
    words = [word for word in run.words if not word.startswith("--workdir=")]
    whole = [re.sub(r"^(--config=.*)\bsplit=dev\b", r"\1split=full", word) for word in words]
    if whole == words:
        return None
    workdir = f"--workdir={filesystem.join_path(posixpath.dirname(run.folder), 'full')}"
    return f"python -m vit_jax.main {shlex.join([*whole, workdir])}"


def report(rows: list[Row], runs: list[Run]) -> dict[str, Any]:
    """Returns what there is to tell, as JSON."""
    [best] = [run for run in runs if run.name == rows[0].name]
    told = {"metric": best.config.checkpoint.best_metric, "runs": [dataclasses.asdict(row) for row in rows]}
    return told | {"best": best.name, "workdir": best.folder, "command": command(best)}


def table(rows: list[Row]) -> str:
    """Returns a line for each row."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'':{width}}  {'at the end':>10}  {'best':>8}  {'steps':>7}  {'seconds':>9}"]
    for row in rows:
        last, best = ("-" if value is None else f"{value:.4f}" for value in (row.last, row.best))
        last = "diverged" if row.last is None else last
        lines.append(f"{row.name:{width}}  {last:>10}  {best:>8}  {row.steps:>7,}  {row.seconds:>9,.1f}")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `combinations` and `sweep`.
        NonFiniteLoss: every combination diverged.
    """
    if {"--help", "-h"} & set(argv[1:]):
        print(__doc__)
        return
    runs = combinations(argv)
    with supervised() as supervisor:
        rows = sweep(runs, supervisor)
    told = report(rows, runs)
    if jax.process_index() == 0:
        filesystem.write_bytes(
            filesystem.join_path(posixpath.dirname(runs[0].folder), RESULT),
            (json.dumps(told, indent=2) + "\n").encode(),
        )
        print(json.dumps(told) if "--json" in argv else f"{told['metric']}\n{table(rows)}")
    if rows[0].last is None:
        raise NonFiniteLoss("every combination diverged; try lower rates, or set grad_norm_clip.")
    if jax.process_index() == 0 and "--json" not in argv:
        print(f"Best: {told['best']}, in {told['workdir']}")
        if told["command"]:
            print(f"On the whole training split: {told['command']}")


if __name__ == "__main__":
    cli.run(main, again=cli.AGAIN)
