"""Writes the tables of docs/studies.md: results of studies small enough for two CPU cores.

Example:
  python -m docs.studies --write=docs/studies.md

The studies repeat claims of the paper and compare optimizers. Intervals are those of Student's t at 95 % over the
seeds. Differences are taken between runs of the same seed.
"""

import argparse
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.tpu import table
from docs.pages import print_sections
from vit_jax import cli
from vit_jax.experiments import RunRecord, read_records
from vit_jax.planning import run_exaflops

PRETRAINED, TUNED, REGULARIZED = "cifar5_compute", "cifar5_tuned_compute", "cifar10_regularization"
OPTIMIZERS, METHODS = "cifar10_optimizers", "cifar5_methods"
CHOSEN = ("rate: accuracy on `val`, one seed, %", "chosen", "its accuracy on the test images, %")
ACCURACY, VAL = "test/accuracy", "val/accuracy"
SHOTS = ("fewshot/5shot", "fewshot/10shot", "fewshot/25shot")
Runs = Mapping[str, Mapping[int, RunRecord]]  # point of the study -> seed -> run


def read_study(results: Path, study: str) -> Runs:
    """Returns point of a study -> seed -> record, for the records in the folder `results/<study>`."""
    runs: dict[str, dict[int, RunRecord]] = {}
    for record in read_records(results / study).values():
        point = re.sub(r"[,/]seed=\d+", "", record.name.partition("/")[2])
        runs.setdefault(point, {})[int(record.config["seed"])] = record
    return runs


def interval(values: np.ndarray) -> str:
    """Returns the text "mean ± half of the 95 % interval", in percent, for fractions of several seeds."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{100 * np.mean(values):.2f} ± {100 * half:.2f}"


def compute(pretrained: Runs, tuned: Runs) -> Iterable[list[str]]:
    """Yields the rows of the table for Figure 5.

    The first rows have each model's compute and accuracies. The last rows have the difference between hybrids and ViTs
    at three equal amounts of compute.
    """
    curves: dict[str, list[tuple[float, np.ndarray]]] = {}
    for point, runs in sorted(pretrained.items(), key=lambda each: (each[0].split("/")[0], exaflops(each[1]))):
        [upstream], [final] = (finals(each, [point], ACCURACY) for each in (pretrained, tuned))
        curves.setdefault(point.split("/")[0], []).append((exaflops(runs), final))
        yield [point, f"{1e6 * exaflops(runs):.2f}", interval(upstream), interval(final), ""]
    lowest = max(curve[0][0] for curve in curves.values())
    highest = min(curve[-1][0] for curve in curves.values())
    for place in np.geomspace(lowest, highest, 3):
        vit, hybrid = (interpolate(curves[line], place) for line in ("ViT", "hybrid"))
        yield ["at equal compute", f"{1e6 * place:.2f}", "", "", interval(hybrid - vit)]


def exaflops(runs: Mapping[int, RunRecord]) -> float:
    """Returns the exaFLOPs of a run; the runs, one for each seed, need the same."""
    return run_exaflops(next(iter(runs.values())).as_run("").config)


def interpolate(curve: Sequence[tuple[float, np.ndarray]], place: float) -> np.ndarray:
    """Returns the accuracy of each seed at a given compute, interpolated linearly in the logarithm of compute.

    Args:
        curve: (compute, accuracy of each seed) of each model, by increasing compute.
        place: the compute.
    """
    places, finals = np.log([at for at, _ in curve]), np.array([values for _, values in curve])
    return np.array([np.interp(np.log(place), places, values) for values in finals.T])


def regularization(runs: Runs) -> Iterable[list[str]]:
    """Yields the rows of the table for Figure 3, one for each number of images.

    A row has the test accuracy at each strength of regularisation, the strength that is best on `val`, and what that
    strength adds to the accuracy without regularisation.
    """
    for size in sorted({int(point.split("/")[0]) for point in runs}):
        points = sorted(point for point in runs if point.startswith(f"{size}/"))
        val, test = (finals(runs, points, metric, stop=VAL) for metric in (VAL, ACCURACY))
        chosen = int(val.mean(1).argmax())
        gain = interval(test[chosen] - test[0]) if chosen else "none is chosen"
        yield [f"{size:,}", *map(interval, test), points[chosen].split("/")[1], gain]


def proxy(pretrained: Runs, tuned: Runs) -> Iterable[list[str]]:
    """Yields the rows of the table for section 4.1: how well cheaper accuracies predict the one after fine-tuning."""
    points = sorted(pretrained)
    for metric in (*SHOTS, ACCURACY):
        cheap, final = (finals(runs, points, name) for runs, name in ((pretrained, metric), (tuned, ACCURACY)))
        ranks = [stats.spearmanr(cheap[:, seed], final[:, seed]).statistic for seed in range(cheap.shape[1])]
        means = list(zip(cheap.mean(1), final.mean(1), strict=True))
        alike = [(a > b) == (c > d) for (a, c), (b, d) in itertools.combinations(means, 2)]
        yield [
            "of pre-training" if metric == ACCURACY else metric.removeprefix("fewshot/").replace("shot", "-shot"),
            f"{stats.pearsonr(cheap.ravel(), final.ravel()).statistic:.2f}",
            ", ".join(f"{rank:.2f}" for rank in ranks),
            f"{sum(alike)} of {len(alike)}",
        ]


def chosen_rates(runs: Runs) -> Iterable[list[str]]:
    """Yields a row for each line of a study whose points are named `LINE/RATE`.

    A row has the accuracy on `val` at each learning rate (of seed 0), the rate that is best there, and the test
    accuracy at that rate over its seeds.
    """
    lines: dict[str, dict[float, str]] = {}
    for point in runs:
        line, _, rate = point.partition("/")
        lines.setdefault(line, {})[float(rate)] = point
    for line, points in lines.items():
        val = {rate: float(runs[point][0].metrics[VAL]) for rate, point in sorted(points.items())}
        best = max(val, key=val.__getitem__)
        tested = finals(runs, [points[best]], ACCURACY)[0]
        tried = ", ".join(f"{rate:g}: {100 * accuracy:.1f}" for rate, accuracy in val.items())
        yield [line, tried, f"{best:g}", interval(tested) if len(tested) > 1 else f"{100 * tested[0]:.2f}"]


def finals(runs: Runs, points: Sequence[str], metric: str, stop: str | None = None) -> np.ndarray:
    """Returns a metric of the runs, as an array [points, seeds].

    Args:
        runs: point -> seed -> run.
        points: the points, which all have the same number of seeds.
        metric: the name of the metric.
        stop: a metric that chooses the step of each run at which it is largest; None: the end of the run.
    """
    rows = [[runs[point][seed] for seed in sorted(runs[point])] for point in points]
    return np.array([[(run.stopped_by(stop) if stop else run.metrics)[metric] for run in row] for row in rows], float)


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the records [%(default)s]")
    parser.add_argument("--write", type=Path, help="Markdown file whose tables to replace")
    args = parser.parse_args(argv[1:])
    names = PRETRAINED, TUNED, REGULARIZED, OPTIMIZERS, METHODS
    pretrained, tuned, regularized, optimizers, methods = (read_study(args.results, name) for name in names)
    sections = {
        "compute": (
            [
                "model",
                "10¹² FLOPs of pre-training",
                "on its five classes, %",
                "fine-tuned to the others, %",
                "hybrid - ViT",
            ],
            compute(pretrained, tuned),
        ),
        "regularization": (
            ["images", "none, %", "0.1, 0.05, 0.05", "0.3, 0.1, 0.1", "best on `val`", "it adds"],
            regularization(regularized),
        ),
        "proxy": (
            [
                "cheaper accuracy",
                "correlation, 18 runs",
                "rank correlation of 6 models, each seed",
                "pairs of models ranked alike",
            ],
            proxy(pretrained, tuned),
        ),
        "optimizers": (
            ["optimizer", *CHOSEN],
            chosen_rates(optimizers),
        ),
        "methods": (
            ["method", *CHOSEN],
            chosen_rates(methods),
        ),
    }
    print_sections([(name, table(heads, rows)) for name, (heads, rows) in sections.items()], args.write)


if __name__ == "__main__":
    cli.run_command(main)
