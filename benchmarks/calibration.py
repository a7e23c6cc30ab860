"""Compares published speeds of real TPUs with both predictions for training steps of the same sizes, for docs/speed.md.

Example:
  python -m benchmarks.calibration --write=docs/speed.md

Takes an hour the first time on two cores. Reports are kept in benchmarks/calibration_results, so the same command
compiles only what is missing; to compile a run again, delete its file.
"""

import argparse
import dataclasses
import fnmatch
import json
from pathlib import Path

from benchmarks.published_runs import RUNS, PublishedRun
from benchmarks.tpu import table
from benchmarks.tpu_process import ROOT, compile_in_process
from docs.pages import print_sections
from vit_jax import cli
from vit_jax.planning import CHIPS, parse_topology, records
from vit_jax.planning.plan_table import format_band
from vit_jax.planning.records import step_from_json
from vit_jax.planning.time_estimate import MEASURED, find_band

KEPT = ROOT / "benchmarks" / "calibration_results"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A published run, and the compiler's report (with schedules) on a training step of the same sizes."""

    run: PublishedRun
    executable: records.Executable

    @property
    def estimate_seconds(self) -> float:
        """The seconds of a step by the compiler's estimate, plus those of its exchanges, as in `planning.estimate`."""
        tpu = parse_topology(self.run.target)
        exchange = sum(each.link_bytes for each in self.executable.collectives.values()) / tpu.link_bandwidth
        return ((self.executable.cycles or 0) + (self.executable.kernel_cycles or 0)) / tpu.chip.clock + exchange

    @property
    def schedule_seconds(self) -> float:
        """The seconds of a step by the schedules of its operations, plus the exchange that they do not hide."""
        schedule = self.executable.schedule
        assert schedule
        return (schedule.cycles + schedule.exchange_exposed) / parse_topology(self.run.target).chip.clock

    @property
    def ratios(self) -> dict[str, float]:
        """Measure (`estimate` or `schedule`) -> the published time divided by the predicted time."""
        seconds = self.run.step_seconds
        return {"estimate": seconds / self.estimate_seconds, "schedule": seconds / self.schedule_seconds}

    def cells(self) -> list[str]:
        """Returns the cells of both predictions in seconds, then of both ratios."""
        schedule = self.executable.schedule
        assert schedule
        exposed = schedule.exchange_exposed / parse_topology(self.run.target).chip.clock
        predicted = f"{self.estimate_seconds:.2f}", f"{self.schedule_seconds - exposed:.2f} + {exposed:.2f}"
        return [*predicted, *(f"{ratio:.2f}" for ratio in self.ratios.values())]


def read_comparisons(pattern: str) -> list[Comparison]:
    """Returns the comparisons of all runs whose step was compiled.

    Runs whose names match the pattern and whose step was not compiled yet are compiled now.
    """
    found = []
    for run in RUNS:
        path = KEPT / f"{run.name}.json"
        if not path.exists() and fnmatch.fnmatch(run.name, pattern):
            path.parent.mkdir(exist_ok=True)
            report = compile_in_process(run.name, run.target, "benchmarks.published_runs", run.name)
            path.write_text(json.dumps(report, indent=1) + "\n")
        kept = json.loads(path.read_text()) if path.exists() else {}
        if "schedule" in kept:  # neither refused for its size nor failed
            executable = step_from_json(kept).executable
            assert executable
            found.append(Comparison(run, executable))
    return found


def ratios_by_chip(found: list[Comparison]) -> dict[str, dict[str, tuple[float, ...]]]:
    """Returns measure -> kind of chip -> ratios to two digits, in the form of `planning.time_estimate.MEASURED`."""
    result: dict[str, dict[str, tuple[float, ...]]] = {}
    for each in found:
        kind = parse_topology(each.run.target).kind
        for measure, ratio in each.ratios.items():
            by_kind = result.setdefault(measure, {})
            by_kind[kind] = (*by_kind.get(kind, ()), round(ratio, 2))
    return result


def runs_table(found: list[Comparison]) -> list[str]:
    """Returns the table of all published runs. The cells of runs whose step was not compiled are empty."""
    labels = ["run", "source", "chips", "sequences a chip", "published: MFU", "s a step"]
    labels += ["estimate, s", "schedule + exchange, s", "published / estimate", "published / schedule"]
    cells = {each.run: each.cells() for each in found}
    rows = []
    for run in RUNS:
        told = [run.model, run.source, run.target, f"{run.sequences} x {run.decoder.length:,}", f"{run.mfu:.1%}"]
        rows.append([*told, f"{run.step_seconds:.2f}", *cells.get(run, [""] * 4)])
    return table(labels, rows)


def bands_table() -> list[str]:
    """Returns the table of the bands that `vit_jax.plan` prints."""
    rows = [[kind, *(format_band(find_band(kind, measure)) for measure in MEASURED)] for kind in CHIPS]
    return table(["chip", *(f"published / {measure}" for measure in MEASURED)], rows)


def main(argv: list[str]) -> int:
    """Runs the command line; returns 1 if `planning/time_estimate.py` states other ratios than the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="runs to compile, as in '*-v5e_16x16'; none: no run [all]")
    parser.add_argument("--write", type=Path, help="Markdown file in which to replace the tables")
    args = parser.parse_args(argv[1:])
    found = read_comparisons(args.only)
    print_sections([("published", runs_table(found)), ("bands", bands_table())], args.write)
    if ratios_by_chip(found) == MEASURED:
        return 0
    print(f"vit_jax/planning/time_estimate.py states other ratios; write there MEASURED = {ratios_by_chip(found)}")
    return 1


if __name__ == "__main__":
    cli.run_command(main)
