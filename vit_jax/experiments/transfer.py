"""Accuracies of a run's features on other data: with frozen features, after fine-tuning, and trained from scratch."""

import posixpath
import re
import statistics
from collections.abc import Sequence

from vit_jax.experiments.run_record import RunRecord

# Heading -> pattern of the metric's name, whose group is the data set.
FROZEN = {
    **{f"{shots}-shot": rf"fewshot_(\w+)/{shots}shot" for shots in (1, 5, 10, 25)},
    **{f"{k} neighbour{'s' if k > 1 else ''}": rf"knn_(\w+)/{k}nn" for k in (1, 5, 20)},
    "probe": r"probe_(?!sgd_)(\w+)/accuracy",
    "probe by SGD": r"probe_sgd_(\w+)/accuracy",
}
HEADINGS = ("weights", "data", *FROZEN, "trained from scratch", "fine-tuned")


def transfer_lines(records: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """Returns lines with the columns `HEADINGS`, one for each run and data set on which its features were evaluated.

    "Fine-tuned" is the mean over runs that started from the weights of this run. Runs of a sweep over anything but the
    seed are left out: they compare methods or rates. "Trained from scratch" is the mean over runs that differ from such
    a run only in that they started without weights.
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
            lines.append((f"[{record.name}](../results/{record.name}.json)", data, *cells))
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
