"""Trains with every combination of the values of some fields, and reports which is best.

Examples:
  python -m vit_jax.sweep --config=configs/digits.py --sweep.base_lr=0.0005,0.002 --config.total_epochs=20
  python -m vit_jax.sweep --config=configs/digits.py --sweep.fold=5 --workdir=workdirs/folds
  python -m vit_jax.sweep --plot=scaling.svg workdirs/digits workdirs/shape

  --config   as for vit_jax.main, and --config.KEY=VALUE too
  --sweep.KEY=VALUE,VALUE,...   values of a field to try; with several fields, all their combinations; with a recipe
             that has a grid of its own, such as configs/studies/pooling.py, each point of the grid with all of them
  --sweep.fold=NUMBER   cross-validation: so many runs, each trained without one fold of data.split and evaluated on it,
             by the evaluation of checkpoint.best_metric; with --sweep.KEY too, for each combination
  --only=PATTERN   only the points of the recipe's grid with such names, as in --only=token/*
  --workdir  folder of the sweep, local, gs:// or s3:// [workdirs/<config name>]; each combination trains in a folder
             inside it
  --json     print one JSON object, the same as in sweep.json in the workdir

The same command continues where it was stopped: combinations that have finished or diverged are not run again. The best
one has the largest checkpoint.best_metric at the end: with --sweep.seed=0,1,2 or --sweep.fold=5 the largest mean over
seeds and folds, which is printed with the standard deviation. The exit codes are those of vit_jax.main.

With --plot=FILE nothing is trained. The finished runs in some folders, or their records, as in results/, are drawn and
printed as a table: an accuracy against the exaFLOPs of pre-training, counted as in docs/plans.md. Runs that differ in
the seed only are one point, the mean with the standard deviation. Against a field, as in --against=base_lr, there is a
line for each combination of the other fields, and the best point has a ring.

  --metric=NAME     the accuracy [checkpoint.best_metric of each run]
  --against=FIELD   a field instead of the exaFLOPs, as in --against=data.num_examples
  --stop=NAME       a metric that decides which step of a run counts, where it is largest (early stopping) [the last]
  --speeds=FILE     what vit_jax.plan --inference --sizes=224 --json printed: a second plot, against images a second
"""

import dataclasses
import sys
from pathlib import Path

import jax

from vit_jax import NonFiniteLoss, UserError, analysis, choose, cli, tell, user_errors
from vit_jax.experiments import list_combinations, make_report, scaling, train_combinations
from vit_jax.json_text import to_json
from vit_jax.storage import filesystem

RESULT_FILE = "sweep.json"  # of all combinations


def plot(argv: list[str]) -> None:
    """Draws the runs in some folders and prints them, as the flags say.

    Raises:
        UserError: a flag is unknown, no folder is given, the file cannot be written, or see `scaling.read_points` and
            `scaling.read_speeds`.
    """
    flags = dict(word.removeprefix("--").partition("=")[::2] for word in argv if word.startswith("--"))
    for flag in flags:
        choose("flag of --plot", flag, ("plot", "metric", "against", "stop", "speeds", "json"))
    folders = [word for word in argv if not word.startswith("--")]
    if not folders or not flags["plot"]:
        raise UserError("write --plot=FILE and folders of runs, as in --plot=scaling.svg workdirs/digits.")
    request = scaling.ScalingPlot(flags.get("metric"), flags.get("against", scaling.COMPUTE), flags.get("stop"))
    points, notes = scaling.read_points(folders, request)
    print("\n".join(f"Left out: {note}" for note in notes), end="\n" if notes else "", file=sys.stderr)
    rows = [to_json(dataclasses.asdict(point)) for point in points]
    print("\n".join(rows) if "json" in flags else scaling.format_points(points, request.against))
    label = "exaFLOPs of pre-training" if request.against == scaling.COMPUTE else request.against
    joined = request.against != scaling.COMPUTE or scaling.are_lines(points)
    speeds = scaling.read_speeds(flags["speeds"], points) if "speeds" in flags else None
    figure = analysis.plot.scaling(scaling.lines_of(points), label, joined, speeds)
    with user_errors(f"cannot write {flags['plot']}"):
        Path(flags["plot"]).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(flags["plot"])
    tell(f"Wrote {flags['plot']}")


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `plot`, `list_combinations` and `train_combinations`.
        NonFiniteLoss: every combination diverged.
    """
    if {"--help", "-h"} & set(argv[1:]):
        print(__doc__)
        return
    if any(word.startswith("--plot") for word in argv[1:]):
        plot(argv[1:])
        return
    combinations = list_combinations(argv)
    with cli.supervised() as supervisor:
        outcomes = train_combinations(combinations, supervisor)
    report = make_report(outcomes, combinations)
    if jax.process_index() == 0:
        fields = dataclasses.asdict(report)
        path = filesystem.join_path(combinations[0].workdir, RESULT_FILE)
        filesystem.write_bytes(path, (to_json(fields, indent=2) + "\n").encode())
        print(to_json(fields) if "--json" in argv else report.render())
    if report.averages[0].mean is None:
        raise NonFiniteLoss("every combination diverged; try lower learning rates, or set grad_norm_clip.")
    if jax.process_index() == 0 and "--json" not in argv:
        if report.best:  # more than the seed was varied
            several = "" if report.averages[0].runs == 1 else "the mean of these runs, of which the best is "
            print(f"Best: {report.best}, {several}in {report.workdir}")
        if report.command:
            print(f"On the whole training split: {report.command}")


if __name__ == "__main__":
    cli.run_command(main, rerun_advice=cli.RESUME_ADVICE)
