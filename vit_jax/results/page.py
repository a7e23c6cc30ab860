"""The page of results: each run, then the paper's tables with our numbers beside the paper's."""

import re
import statistics
from collections.abc import Sequence

from vit_jax.results.paper import PaperNumber, read_paper_numbers
from vit_jax.results.protocols import is_of_paper
from vit_jax.results.record import Record
from vit_jax.results.studies import study_tables, without_studies
from vit_jax.results.transfer import HEADINGS, frozen_metrics, transfer_lines

HEAD = """# Results

Every run that was made and recorded here, and the paper's numbers with ours beside them; where nothing was run, ours is
empty. `python -m vit_jax.record` writes this page from [results/](../results/); nothing is typed by hand.

```bash
python -m vit_jax.record workdirs/digits
```

adds the record of a finished run, or of all runs in a folder: configuration, metrics at the end, how long it took (with
compiling and evaluations), on what hardware, and the commit. `--evaluations=FILE` adds what `vit_jax.evaluate --json`
printed of its last checkpoint. Ours stands beside a number of the paper if every field that decides what is computed is
as in the recipe of the paper's run, but for the seed and for the learning rate, which is one of the paper's.

What others have reached on ImageNet with recipes that are here: [imagenet.md](imagenet.md).
"""
TRANSFER = """## Frozen features beside fine-tuning

Test accuracy in percent on data other than the run's. 1- to 25-shot is the mean over draws of that many images of each
class; neighbours, probes and training use all training images.

"""
FRACTION = re.compile(r"(accuracy|top5)$|/\d+(shot|nn)(_l2_[\d.]+)?$")  # names of metrics to show in percent
VTAB_TASKS = 19
DATASETS = {
    "imagenet2012": "ImageNet",
    "imagenet2012_real": "ImageNet ReaL",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "oxford_iiit_pet": "Pets",
    "oxford_flowers102": "Flowers",
    "vtab": "VTAB (19 tasks)",
}
PRETRAINING = {"jft": "JFT", "imagenet21k": "ImageNet-21k", "imagenet2012": "ImageNet"}
TITLES = {"2": "fine-tuned, mean and standard deviation", "5": "fine-tuned at 384 pixels"}


def format_page(records: Sequence[Record]) -> str:
    """Returns the page in Markdown."""
    tables = [
        f"## Table {number}: {title}\n\n{format_paper_table(number, records)}" for number, title in TITLES.items()
    ]
    transfer = TRANSFER + format_table([HEADINGS, *transfer_lines(records)])
    studies = [f"## {title}\n\n{format_table(lines)}" for title, lines in study_tables(records).items()]
    return "\n".join([HEAD, "## Runs\n", format_runs(without_studies(records)), transfer, *studies, *tables])


def format_runs(records: Sequence[Record]) -> str:
    """Returns a table with a line for each run."""
    lines = [("run", "model", "data", "results", "steps", "time", "hardware", "version")]
    for record in records:
        config = record.config
        lines.append(
            (
                f"[{record.name}](../results/{record.name}.json)",
                config["model"]["name"],
                config["data"]["source"],
                "<br>".join(format_metrics(record)),
                f"{record.steps:,}",
                format_time(record.seconds),
                "<br>".join(record.distinct("hardware")),
                "<br>".join([*record.distinct("vit_jax"), *record.distinct("commit")]),
            )
        )
    return format_table(lines)


def format_metrics(record: Record) -> list[str]:
    """Returns a text for each accuracy of a run but those of frozen features; top-5 only with more than ten classes."""
    few = record.config["data"]["num_classes"] <= 10
    elsewhere = frozen_metrics(record)
    shown = [name for name in record.metrics if FRACTION.search(name) and name not in elsewhere]
    shown = [name for name in shown if not (few and name.endswith("/top5"))]
    values = {name: record.metrics[name] for name in shown}
    return [f"{name} {100 * value:.2f} %" for name, value in values.items() if value is not None]


def format_paper_table(table: str, records: Sequence[Record]) -> str:
    """Returns a table of the paper, in which each model has a column of the paper's numbers and one of ours."""
    numbers = [number for number in read_paper_numbers() if number.table == table]
    models = list(dict.fromkeys(number.model for number in numbers))
    lines = [["pre-trained on", "", *[word for model in models for word in (model, "ours")]]]
    for pretraining, dataset in dict.fromkeys((number.pretraining, number.dataset) for number in numbers):
        cells = {one.model: one for one in numbers if (one.pretraining, one.dataset) == (pretraining, dataset)}
        row = [
            text
            for model in models
            for text in ((str(cells[model]), format_ours(cells[model], records)) if model in cells else ("", ""))
        ]
        lines.append([PRETRAINING[pretraining], DATASETS[dataset], *row])
    return format_table(lines)


def format_ours(number: PaperNumber, records: Sequence[Record]) -> str:
    """Returns the mean over the runs that a number of the paper is about, with the standard deviation of several."""
    values = our_accuracies(number, records)
    if not values:
        return ""
    std = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{std} ({len(values)} run{'s' if len(values) > 1 else ''})"


def our_accuracies(number: PaperNumber, records: Sequence[Record]) -> list[float]:
    """Returns the accuracies, in percent, of the runs that a number of the paper is about, or of VTAB the mean.

    `protocols.is_of_paper` tells which they are.
    """
    metric = "real/accuracy" if number.dataset.endswith("_real") else "test/accuracy"
    found: dict[str, list[float]] = {}
    for record in records:
        value = record.metrics.get(metric)
        if value is not None and is_of_paper(record, number):
            found.setdefault(record.config["data"]["source"], []).append(100 * value)
    if number.dataset != "vtab":
        return [value for values in found.values() for value in values]
    return [statistics.mean(map(statistics.mean, found.values()))] if len(found) == VTAB_TASKS else []


def format_time(seconds: float) -> str:
    """Returns seconds, minutes or hours, whichever is the largest unit of which there are two."""
    units = {"h": 3600, "min": 60}
    unit, size = next(((unit, size) for unit, size in units.items() if seconds >= 2 * size), ("s", 1))
    return f"{seconds / size:.3g} {unit}" if size > 1 else f"{seconds:.0f} s"


def format_table(lines: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table of a head and lines, ended by a line break."""
    head, *rest = [re.sub(" +", " ", f"| {' | '.join(line)} |") for line in lines]
    return "\n".join([head, f"|{'---|' * len(lines[0])}", *rest]) + "\n"
