"""Tables of the studies of configs/studies/: means over seeds of the recorded runs, beside what the paper states."""

import csv
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from vit_jax.experiments.run_record import RunRecord

PAPER = Path(__file__).with_name("studies.csv")
HEADINGS = ("run", "ours, %", "metric", "steps", "runs", "paper")


def read_paper_rows() -> list[dict[str, str]]:
    """Returns the rows of studies.csv, each as column -> text. The first row of a study has its title and no run."""
    return list(csv.DictReader(PAPER.read_text().splitlines()))


def without_studies(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Returns the records that do not belong to a study."""
    studies = "|".join(dict.fromkeys(row["study"] for row in read_paper_rows()))
    return [record for record in records if not re.match(rf"(\w+_)?({studies})/", record.name)]


def study_tables(records: Sequence[RunRecord], study: str) -> dict[str, list[tuple[str, ...]]]:
    """Returns title -> lines of a table with the columns `HEADINGS`, for each folder of recorded runs of a study.

    The name of a record tells its study. It consists of the sweep's folder, the run and the seed, such as
    `pooling/token/0.0003,seed=1`, or `masked_patches/scratch/all/seed=1` if only the seed was swept. The folder of a
    study on other data has a prefix, such as `cifar10_pooling`. The result is empty if the study has no records or does
    not exist.
    """
    rows = [row for row in read_paper_rows() if row["study"] == study]
    stated = {row["run"]: row["paper"] for row in rows}
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        name = re.sub(r"[,/]seed=\d+(?=,|$)", "", record.name)
        if rows and (match := re.fullmatch(rf"((?:\w+_)?{study})/(.+)", name)):
            groups.setdefault((match[1], match[2]), []).append(record)
    tables = {}
    for folder in dict.fromkeys(folder for folder, _ in groups):
        runs = {run: group for (of, run), group in groups.items() if of == folder}
        names = sorted(runs, key=natural_order)
        lines = [(name, *averages(runs[name]), stated.get(name, "")) for name in names]
        tables[f"{rows[0]['title']}: {folder}"] = [HEADINGS, ("", "", "", "", "", stated.get("", "")), *lines]
    return tables


def averages(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """Returns the columns of `HEADINGS` between the first and the last, for runs that differ in the seed only.

    The metric is `checkpoint.best_metric`, as mean in percent with the standard deviation over several runs. If that is
    a metric of the evaluation `val`, it only chooses the step (early stopping), and the metric of `test` at that step
    is shown.
    """
    chooses = records[0].config["checkpoint"]["best_metric"]
    metric = re.sub(r"^val/", "test/", chooses)
    rows = [record.metrics if metric == chooses else record.stopped_by(chooses) for record in records]
    values = [100 * value for row in rows if (value := row.get(metric)) is not None]
    if not values:
        return "", metric, "", ""
    std = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{std}", metric, f"{records[0].steps:,}", str(len(values))


def natural_order(name: str) -> list[str | float]:
    """Returns a sort key with which numbers in names are ordered by value."""
    return [float(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", name))]
