"""Compiles the kept training steps again, and compares their cycles and memory with those in benchmarks/tpu_results.

Example:
  python -m benchmarks.tpu_check --only='*-depth2*'

Without --only it compiles every step of docs/speed.md, which takes hours on two cores. The steps of big_vision need
--big-vision, a checkout of its code. Exits with 1 if the cycles or the peak memory of a step are more than 3 % above
the kept ones. To keep new figures, delete the file of a row and run `python -m benchmarks.tpu`.
"""

import argparse
import dataclasses
import fnmatch
from collections.abc import Iterable
from pathlib import Path

from benchmarks import tpu
from benchmarks.tpu_rows import Row
from vit_jax import cli
from vit_jax.planning.records import step_from_json

TOLERANCE = 1.03


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of a step that are compared.

    Attributes:
        cycles: the cycles by schedule, with the exchange that is not hidden.
        peak_bytes: the peak memory in bytes.
        libtpu: the version of libtpu that compiled the step.
    """

    cycles: int
    peak_bytes: int
    libtpu: str | None


def read_figures(report: tpu.Report) -> Figures | None:
    """Returns the figures of a report; None: the step did not fit, or did not compile."""
    if "schedule" not in report:
        return None
    step = step_from_json(report)
    executable = step.executable
    assert executable and executable.schedule
    cycles = executable.schedule.cycles + executable.schedule.exchange_exposed
    return Figures(cycles, executable.peak_bytes, step.versions["libtpu"])


def is_worse(kept: Figures | None, found: Figures | None) -> bool:
    """Returns whether a step needs more cycles or memory than the kept one, beyond the tolerance.

    A step that no longer compiles or fits is worse. A step without kept figures never is.
    """
    if kept is None or found is None:
        return kept is not None
    return found.cycles > TOLERANCE * kept.cycles or found.peak_bytes > TOLERANCE * kept.peak_bytes


def describe(kept: Figures | None, found: Figures | None) -> str:
    """Returns the kept and the new figures as text, with the ratios of new to kept."""
    if kept is None or found is None:
        return " -> ".join("no step" if each is None else f"{each.cycles:,} cycles" for each in (kept, found))
    ratios = found.cycles / kept.cycles, found.peak_bytes / kept.peak_bytes
    names = " -> ".join(dict.fromkeys(f"libtpu {each.libtpu}" for each in (kept, found)))
    cycles = f"{kept.cycles:,} -> {found.cycles:,} cycles ({ratios[0]:.3f})"
    return f"{cycles}, {kept.peak_bytes:,} -> {found.peak_bytes:,} bytes ({ratios[1]:.3f}), {names}"


def check(rows: Iterable[Row], checkout: Path | None) -> bool:
    """Compiles rows, prints their kept and new figures, and returns whether one of them is worse."""
    worse = []
    for row in rows:
        kept, found = read_figures(tpu.read_report(row) or {}), read_figures(tpu.compile_row(row, checkout))
        worse.append(is_worse(kept, found))
        print(f"{row.name}: {describe(kept, found)}{': worse' if worse[-1] else ''}", flush=True)
    return any(worse)


def main(argv: list[str]) -> int:
    """Runs the command line; returns 1 if a step is worse, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="rows to compile; none: no row [all that are kept]")
    parser.add_argument("--big-vision", type=Path, help="a checkout of big_vision; omitted: its rows are left out")
    args = parser.parse_args(argv[1:])
    codes = tpu.CODES if args.big_vision else tpu.CODES[:1]
    rows = [row for row in tpu.kept_rows() if row.code in codes and fnmatch.fnmatch(row.name, args.only)]
    worse = check(rows, args.big_vision.resolve() if args.big_vision else None)
    print(f"{len(rows)} steps compiled again.")
    return int(worse)


if __name__ == "__main__":
    cli.run_command(main)
