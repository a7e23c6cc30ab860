"""The metrics of a run in its folder, `metrics.jsonl`: how they are read, and which lines a resumed run drops."""

import json
import math
from pathlib import Path

from vit_jax import UserError, printable
from vit_jax.storage import atomic_write

Metrics = dict[str, float]
METRICS = "metrics.jsonl"


def read_metrics(content: bytes, path: str) -> list[tuple[int, Metrics]]:
    """Returns (step, metrics) of each step that has metrics, once and in order. Values that are not finite are NaN.

    If the lines go back to an earlier step, as in a run that was resumed without `drop_lines`, the later lines count.
    An incomplete last line, which a process was writing, is left out.

    Args:
        content: the content of the file.
        path: the path of the file, for errors.

    Raises:
        UserError: a line has another format.
    """
    rows: list[tuple[int, Metrics]] = []
    for line in complete_lines(content):
        try:
            values = json.loads(line)
            step = int(values.pop("step"))
            metrics = {
                name: value + 0 if value is not None and math.isfinite(value) else math.nan
                for name, value in values.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            text = printable(line.decode(errors="replace"), 40)
            raise UserError(f"cannot read {path}: {text!r} is not the JSON of a step's metrics.") from error
        while rows and rows[-1][0] > step:
            rows.pop()
        if rows and rows[-1][0] == step:
            rows[-1] = step, rows[-1][1] | metrics
        else:
            rows.append((step, metrics))
    return rows


def last_logged_step(workdir: Path) -> int:
    """Returns the largest step in the metrics of a workdir; 0 if there are none.

    Raises:
        UserError: the file is damaged or has another format.
    """
    path = workdir / METRICS
    try:
        rows = read_metrics(path.read_bytes(), str(path)) if path.exists() else []
    except UserError as error:
        raise UserError(f"{str(error).rstrip('.')}; move the file away, or choose another --workdir.") from error
    return rows[-1][0] if rows else 0


def drop_lines(path: Path, last: int, evaluated: bool) -> None:
    """Drops from a file of metrics the lines of step 0 and of steps after `last`.

    Unless `evaluated`, the lines of step `last` without training metrics, those of its evaluation, are dropped, too.
    """
    read = [(line, json.loads(line)) for line in complete_lines(path.read_bytes())]
    kept = [(line, values) for line, values in read if 0 < values["step"] <= last]
    if not evaluated:
        kept = [(line, values) for line, values in kept if values["step"] < last or "train/loss" in values]
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"".join(line for line, _ in kept))


def complete_lines(text: bytes) -> list[bytes]:
    """Returns the lines of a metrics file, without an incomplete last one."""
    return [line for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
