"""Trains with every combination of the values of some fields, one after the other, and reports which is best.

Example:
  python -m vit_jax.sweep --config=configs/digits.py --sweep.base_lr=0.0005,0.002 --config.total_epochs=5

  --config   as for vit_jax.main; likewise --config.KEY=VALUE
  --sweep.KEY=VALUE,VALUE,...   values of a field to try; with several fields, all their combinations; with a recipe
             that has a grid of its own, such as configs/studies/pooling.py, each point of the grid with all of them
  --only=PATTERN   only the points of the recipe's grid with such names, as in --only=token/*
  --workdir  folder of the sweep, local, gs:// or s3:// [workdirs/<config name>]; each combination trains in a folder
             inside it
  --json     print one JSON object, the same as in sweep.json in the workdir

The same command continues where it was stopped: combinations that have finished or diverged are not run again. The best
one has the largest checkpoint.best_metric at the end: with --sweep.seed=0,1,2 the largest mean over the seeds, which is
printed with the standard deviation. The exit codes are those of vit_jax.main.
"""

import dataclasses
import json

import jax

from vit_jax import NonFiniteLoss, cli
from vit_jax.storage import filesystem
from vit_jax.sweeps import format_report, list_combinations, make_report, train_combinations

RESULT_FILE = "sweep.json"  # of all combinations


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `list_combinations` and `train_combinations`.
        NonFiniteLoss: every combination diverged.
    """
    if {"--help", "-h"} & set(argv[1:]):
        print(__doc__)
        return
    combinations = list_combinations(argv)
    with cli.supervised() as supervisor:
        outcomes = train_combinations(combinations, supervisor)
    report = make_report(outcomes, combinations)
    if jax.process_index() == 0:
        fields = dataclasses.asdict(report)
        path = filesystem.join_path(combinations[0].workdir, RESULT_FILE)
        filesystem.write_bytes(path, (json.dumps(fields, indent=2) + "\n").encode())
        print(json.dumps(fields) if "--json" in argv else format_report(report))
    if report.averages[0].mean is None:
        raise NonFiniteLoss("every combination diverged; try lower learning rates, or set grad_norm_clip.")
    if jax.process_index() == 0 and "--json" not in argv:
        if report.best:  # more than the seed was varied
            print(f"Best: {report.best}, in {report.workdir}")
        if report.command:
            print(f"On the whole training split: {report.command}")


if __name__ == "__main__":
    cli.run(main, again=cli.AGAIN)
