"""The report of a sweep: its outcomes, and their means and standard deviations over seeds and folds."""

import dataclasses
import statistics

from vit_jax.config import is_lowest_best
from vit_jax.experiments.combinations import Combination, full_split_command
from vit_jax.experiments.outcomes import Outcome
from vit_jax.text_tables import align


@dataclasses.dataclass(frozen=True)
class Average:
    """The mean of the metric at the end of the outcomes that differ in seed and fold only.

    Attributes:
        name: the name of the outcomes without seed and fold; empty if nothing else was varied.
        mean: the mean of the outcomes; None: at least one diverged.
        std: the standard deviation of the sample, with n - 1 in the denominator (the paper does not state which it
            uses); None: there is no mean, or only one outcome.
        runs: the number of outcomes.
    """

    name: str
    mean: float | None
    std: float | None
    runs: int


@dataclasses.dataclass(frozen=True)
class SweepReport:
    """The report that a sweep prints and writes.

    Attributes:
        metric: the name of the metric that is compared.
        runs: the outcomes, best first.
        averages: the averages over seeds and folds, best first.
        best: the name of the best average.
        workdir: the folder of the best average's run; of several runs, of the best one.
        command: the shell command that trains with the best combination on the whole training split; None: no part of
            the split was held out.
    """

    metric: str
    runs: list[Outcome]
    averages: list[Average]
    best: str
    workdir: str
    command: str | None

    def render(self) -> str:
        """Returns a table of the outcomes, and one of the means over several seeds or folds."""
        return f"{self.metric}\n{format_table(self.runs)}{format_averages(self.averages)}"


def average_name(name: str) -> str:
    """Returns the name of a combination without its parts seed=NUMBER and fold=NUMBER."""
    return ",".join(pair for pair in name.split(",") if not pair.startswith(("seed=", "fold=")))


def average_seeds(outcomes: list[Outcome], lowest: bool = False) -> list[Average]:
    """Returns the averages of outcomes that differ in seed and fold only, best first; those without mean last.

    Args:
        outcomes: the outcomes.
        lowest: whether the smallest mean is the best; otherwise it is the largest.
    """
    groups: dict[str, list[float | None]] = {}
    for outcome in outcomes:
        groups.setdefault(average_name(outcome.name), []).append(outcome.last)
    averages = []
    for name, values in groups.items():
        whole = [value for value in values if value is not None]
        complete = len(whole) == len(values)
        mean = statistics.mean(whole) if complete else None
        std = statistics.stdev(whole) if complete and len(whole) > 1 else None
        averages.append(Average(name, mean, std, len(values)))
    sign = 1 if lowest else -1
    return sorted(averages, key=lambda average: (average.mean is None, sign * (average.mean or 0.0)))


def best_combinations(averages: list[Average], combinations: list[Combination]) -> list[Combination]:
    """Returns the combinations of the first average, one for each seed and fold.

    Args:
        averages: what `average_seeds` returns.
        combinations: all combinations of the sweep.
    """
    return [combination for combination in combinations if average_name(combination.name) == averages[0].name]


def make_report(outcomes: list[Outcome], combinations: list[Combination]) -> SweepReport:
    """Returns the report of a sweep.

    Args:
        outcomes: the outcomes of all combinations, best first.
        combinations: all combinations of the sweep.
    """
    averages = average_seeds(outcomes, is_lowest_best(combinations[0].config))
    first, *_ = best = best_combinations(averages, combinations)
    seeds = list(dict.fromkeys(one.config.seed for one in best))
    command = full_split_command(first, seeds if len(seeds) > 1 else [])
    folders = {one.name: one.folder for one in best}
    folder = next(folders[outcome.name] for outcome in outcomes if outcome.name in folders)
    return SweepReport(first.config.checkpoint.best_metric, outcomes, averages, averages[0].name, folder, command)


def format_averages(averages: list[Average]) -> str:
    """Returns a table with a line for each average; an empty text if no average is one of several runs."""
    if not any(average.runs > 1 for average in averages):
        return ""
    rows = [(one.name, _number(one.mean, "diverged"), _number(one.std), f"{one.runs:,}") for one in averages]
    return "\n".join(["\n", *align([("", "mean", "std", "runs"), *rows], right=range(1, 4))])


def format_table(outcomes: list[Outcome]) -> str:
    """Returns a table with a line for each outcome."""
    rows = [
        (one.name, _number(one.last, "diverged"), _number(one.best), f"{one.steps:,}", f"{one.seconds:,.1f}")
        for one in outcomes
    ]
    return "\n".join(align([("", "at the end", "best", "steps", "seconds"), *rows], right=range(1, 5)))


def _number(value: float | None, otherwise: str = "-") -> str:
    return otherwise if value is None else f"{value:.4f}"
