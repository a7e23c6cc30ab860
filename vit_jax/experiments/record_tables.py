"""Tables of recorded runs: what each of them reached, and its features on other data, frozen and fine-tuned."""

import posixpath
import re
import statistics
from collections.abc import Sequence

from vit_jax.experiments.run_record import RunRecord
from vit_jax.monitoring import is_percent_metric
from vit_jax.text_tables import markdown_table

PAGE_HEADER = """# Recorded runs

`python -m vit_jax.record WORKDIR --page=FILE` adds a run to the records and writes this page from all of them.

"""
TRANSFER = """## Frozen features beside fine-tuning

Test accuracy in percent on data other than the run's. 1- to 25-shot is the mean over draws of that many images of each
class; neighbours, probes and training use all training images.

"""

# Heading -> pattern of the metric's name, whose group is the data set.
FROZEN = {
    **{f"{shots}-shot": rf"fewshot_(\w+)/{shots}shot" for shots in (1, 5, 10, 25)},
    **{f"{k} neighbour{'s' if k > 1 else ''}": rf"knn_(\w+)/{k}nn" for k in (1, 5, 20)},
    "probe": r"probe_(?!sgd_)(\w+)/accuracy",
    "probe by SGD": r"probe_sgd_(\w+)/accuracy",
}
HEADINGS = ("weights", "data", *FROZEN, "trained from scratch", "fine-tuned")


def format_records(records: Sequence[RunRecord], folder: str) -> str:
    """Returns a page in Markdown with the tables of `format_runs` and `format_transfer`."""
    return f"{PAGE_HEADER}{format_runs(records, folder)}\n{format_transfer(records, folder)}"


def format_runs(records: Sequence[RunRecord], folder: str) -> str:
    """Returns a Markdown table with a line for each run.

    Args:
        records: the runs.
        folder: where their records are, as a link on the page says it.
    """
    headings = ("run", "model", "data", "results", "steps", "time", "hardware", "version")
    lines = [
        (
            f"[{record.name}]({folder}/{record.name}.json)",
            record.config["model"]["name"],
            record.config["data"]["source"],
            "<br>".join(format_metrics(record)),
            f"{record.steps:,}",
            format_time(record.seconds),
            "<br>".join(record.distinct("hardware")),
            "<br>".join([*record.distinct("vit_jax"), *record.distinct("commit")]),
        )
        for record in records
    ]
    return markdown_table([headings, *lines])


def format_metrics(record: RunRecord) -> list[str]:
    """Returns a text for each accuracy of a run, such as "test/accuracy 98.20 %".

    Accuracies of frozen features are left out, and top-5 accuracies if the data has at most ten classes.
    """
    few = record.config["data"]["num_classes"] <= 10
    omitted = [*frozen_metrics(record), *(name for name in record.metrics if few and name.endswith("/top5"))]
    return [
        f"{name} {100 * value:.2f} %"
        for name, value in record.metrics.items()
        if value is not None and is_percent_metric(name) and not name.endswith("_std") and name not in omitted
    ]


def format_time(seconds: float) -> str:
    """Returns a duration as text, such as "5.3 min", in the largest unit (h, min, s) of which it has at least two."""
    units = {"h": 3600, "min": 60}
    unit, size = next(((unit, size) for unit, size in units.items() if seconds >= 2 * size), ("s", 1))
    return f"{seconds / size:.3g} {unit}" if size > 1 else f"{seconds:.0f} s"


def format_transfer(records: Sequence[RunRecord], folder: str) -> str:
    """Returns a section in Markdown with the lines of `transfer_lines`."""
    return TRANSFER + markdown_table([HEADINGS, *transfer_lines(records, folder)])


def transfer_lines(records: Sequence[RunRecord], folder: str) -> list[tuple[str, ...]]:
    """Returns lines with the columns `HEADINGS`, one for each run and data set on which its features were evaluated.

    "Fine-tuned" is the mean over runs that started from the weights of this run. Runs of a sweep over anything but the
    seed are left out: they compare methods or rates. "Trained from scratch" is the mean over runs that differ from such
    a run only in that they started without weights. `folder` is as for `format_runs`.
    """
    lines = []
    for record in records:
        frozen = {key: record.metrics[name] for name, key in frozen_metrics(record).items()}
        for data in sorted({data for data, _ in frozen}):
            tuned = [run for run in _trained(records, data) if _weights(run) == record.name and not _is_compared(run)]
            alike = [run.config | {"init_from": None} for run in tuned]
            scratch = [run for run in _trained(records, data) if not _weights(run) and run.config in alike]
            values = [frozen.get((data, heading)) for heading in FROZEN]
            values += [_mean_accuracy(scratch), _mean_accuracy(tuned)]
            cells = ["" if value is None else f"{100 * value:.2f}" for value in values]
            lines.append((f"[{record.name}]({folder}/{record.name}.json)", data, *cells))
    return lines


def frozen_metrics(record: RunRecord) -> dict[str, tuple[str, str]]:
    """Returns metric -> (data set, heading in `FROZEN`) for the accuracies of frozen features in a record."""
    return {
        name: (match[1], heading)
        for name in record.metrics
        for heading, pattern in FROZEN.items()
        if (match := re.fullmatch(pattern, name))
    }


def _trained(records: Sequence[RunRecord], data: str) -> list[RunRecord]:
    return [record for record in records if record.dataset == data]


def _is_compared(record: RunRecord) -> bool:
    """Returns whether a run belongs to a sweep over more than the seed."""
    return re.fullmatch(r"[^/]+(/seed=\d+)?", record.name) is None


def _weights(record: RunRecord) -> str:
    """Returns the name of the run whose weights a run started from; empty if it started from none."""
    return posixpath.basename((record.config["init_from"] or "").rstrip("/"))


def _mean_accuracy(runs: Sequence[RunRecord]) -> float | None:
    known = [value for run in runs if (value := run.metrics.get("test/accuracy")) is not None]
    return statistics.mean(known) if known else None
