"""What the small studies found: claims of the paper, and optimizers, at a size that two CPU cores can pay.

Example:
  python -m docs.studies --write=docs/studies.md

Intervals are those of Student's t at 95 % over the seeds; differences are taken within a seed.
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
from vit_jax.experiments import Record, read_records
from vit_jax.planning import run_exaflops

PRETRAINED, TUNED, REGULARIZED = "cifar5_compute", "cifar5_tuned_compute", "cifar10_regularization"
OPTIMIZERS = "cifar10_optimizers"
CHOSEN = ("rate: accuracy on `val`, one seed, %", "chosen", "its accuracy on the test images, %")
ACCURACY, VAL = "test/accuracy", "val/accuracy"
SHOTS = ("fewshot/5shot", "fewshot/10shot", "fewshot/25shot")
Runs = Mapping[str, Mapping[int, Record]]  # point of the study -> seed -> run


def read_study(results: Path, study: str) -> Runs:
    """Returns the records of a study, by the names of its points."""
    runs: dict[str, dict[int, Record]] = {}
    for record in read_records(results / study).values():
        point = re.sub(r"[,/]seed=\d+", "", record.name.partition("/")[2])
        runs.setdefault(point, {})[int(record.config["seed"])] = record
    return runs


def interval(values: np.ndarray) -> str:
    """Returns mean and half of the interval, in percent."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{100 * np.mean(values):.2f} ± {100 * half:.2f}"


def compute(pretrained: Runs, tuned: Runs) -> Iterable[list[str]]:
    """Yields the rows of Figure 5: each model's compute and accuracies, then both families at equal compute."""
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


def exaflops(runs: Mapping[int, Record]) -> float:
    """Returns the compute of the pre-training of one of the runs."""
    return run_exaflops(next(iter(runs.values())).as_run("").config)


def interpolate(curve: Sequence[tuple[float, np.ndarray]], place: float) -> np.ndarray:
    """Returns the accuracy of each seed at a compute, linear in its logarithm between the models."""
    places, finals = np.log([at for at, _ in curve]), np.array([values for _, values in curve])
    return np.array([np.interp(np.log(place), places, values) for values in finals.T])


def regularization(runs: Runs) -> Iterable[list[str]]:
    """Yields the rows of Figure 3: for each number of images, each strength, and what the chosen one adds to none."""
    for size in sorted({int(point.split("/")[0]) for point in runs}):
        points = sorted(point for point in runs if point.startswith(f"{size}/"))
        val, test = (finals(runs, points, metric, stop=VAL) for metric in (VAL, ACCURACY))
        chosen = int(val.mean(1).argmax())
        gain = interval(test[chosen] - test[0]) if chosen else "none is chosen"
        yield [f"{size:,}", *map(interval, test), points[chosen].split("/")[1], gain]


def proxy(pretrained: Runs, tuned: Runs) -> Iterable[list[str]]:
    """Yields the rows of section 4.1: how cheaper accuracies rank the models beside that after fine-tuning."""
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
    """Yields a row for each line of a study whose points are `LINE/RATE`: its rates, the chosen one, its test accuracy.

    Of every rate one seed is compared by `val`; the best rate's seeds are tested.
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
    """Returns a metric of the runs [points, seeds] at their end, or where `stop` was largest."""
    rows = [[runs[point][seed] for seed in sorted(runs[point])] for point in points]
    return np.array([[(run.stopped_by(stop) if stop else run.metrics)[metric] for run in row] for row in rows], float)


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the records [%(default)s]")
    parser.add_argument("--write", type=Path, help="Markdown file whose tables to replace")
    args = parser.parse_args(argv[1:])
    names = PRETRAINED, TUNED, REGULARIZED, OPTIMIZERS
    pretrained, tuned, regularized, optimizers = (read_study(args.results, name) for name in names)
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
    }
    print_sections([(name, table(heads, rows)) for name, (heads, rows) in sections.items()], args.write)


if __name__ == "__main__":
    cli.run(main)
