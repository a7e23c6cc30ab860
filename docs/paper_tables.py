"""The paper's Tables 2, 5, 6 and 9, with our numbers beside the paper's.

Ours are of the recorded runs that were fine-tuned as in the paper: those with the configuration of our recipe for it.
"""

import functools
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax import UserError, data
from vit_jax.config import EXECUTION_FIELDS, flatten_config, parse_command_line, parse_config, resolve_config
from vit_jax.data.sources import VTAB_TASKS
from vit_jax.experiments import RunRecord
from vit_jax.paper import PaperNumber, PaperRun, list_learning_rates, read_paper_numbers, read_paper_runs
from vit_jax.text_tables import markdown_table

DATASETS = {
    "imagenet2012": "ImageNet",
    "imagenet2012_real": "ImageNet ReaL",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "oxford_iiit_pet": "Pets",
    "oxford_flowers102": "Flowers",
    "vtab": "VTAB (19 tasks)",
}
FIVE = [name for name in DATASETS if name not in ("imagenet2012_real", "vtab")]  # Figure 5 shows the mean over these
PRETRAINING = {
    "jft": "JFT",
    "imagenet21k": "ImageNet-21k",
    "imagenet2012": "ImageNet",
    "noisy_student": "Noisy Student",
}
COMPARED_MODELS = ("BiT-L", "EfficientNet-L2")  # models that the paper only compares with; they have no column of ours

# Fields that do not decide what is computed, or that may differ between runs of the same protocol.
IRRELEVANT_FIELDS = re.compile(
    r"seed|base_lr|init_from|batch_eval|accum_steps|log_every|eval_every|checkpoint.*|stall_limit|profile_steps|wandb|"
    r"report|compiler_options|use_measured_times|step_numbers|mesh\..*|data\.(data_dir|workers|accept_change|bad_images|max_bad)|"
    rf"optim\.max_nonfinite_skips|model\.({'|'.join(EXECUTION_FIELDS)})|evals\.(?!test\.).*|evals\.test\.every"
)


class TableLayout(NamedTuple):
    """The rows and columns in which the numbers of a table of the paper stand.

    Attributes:
        title: the title of the table.
        corner: the headings of the first columns, which name the row.
        row: number of the paper -> the cells of these columns in its row.
        column: number of the paper -> the heading of its column.
    """

    title: str
    corner: tuple[str, ...]
    row: Callable[[PaperNumber], tuple[str, ...]]
    column: Callable[[PaperNumber], str]


def weights_of(number: PaperNumber | PaperRun) -> str:
    """Returns the model and its pre-training data as a heading, such as "ViT-L/16, JFT"."""
    return f"{number.model}, {PRETRAINING[number.pretraining]}"


LAYOUTS: Mapping[str, TableLayout] = {
    "2": TableLayout(
        "fine-tuned, mean and standard deviation", ("",), lambda number: (DATASETS[number.dataset],), weights_of
    ),
    "5": TableLayout(
        "fine-tuned at 384 pixels",
        ("pre-trained on", ""),
        lambda number: (PRETRAINING[number.pretraining], DATASETS[number.dataset]),
        lambda number: number.model,
    ),
    "6": TableLayout(
        "pre-trained on JFT, fine-tuned",
        ("model", "epochs"),
        lambda number: (number.model, str(number.epochs)),
        lambda number: DATASETS[number.dataset],
    ),
    "9": TableLayout(
        "the tasks of VTAB-1k",
        ("group", "task"),
        lambda number: (VTAB_TASKS[number.dataset.removeprefix("vtab:")].group or "", number.dataset[5:]),
        weights_of,
    ),
}


def format_paper_table(table: str, records: Sequence[RunRecord]) -> str:
    """Returns a table of the paper in Markdown. Each column of the paper is followed by one with our numbers.

    Args:
        table: the number of the table, a key of `LAYOUTS`.
        records: our recorded runs.
    """
    layout, numbers = LAYOUTS[table], [number for number in read_paper_numbers() if number.table == table]
    columns = {layout.column(number): number.model in COMPARED_MODELS for number in numbers}
    head = [*layout.corner, *(word for name, others in columns.items() for word in _beside(others, name, "ours"))]
    lines = [head]
    for row in dict.fromkeys(layout.row(number) for number in numbers):
        cells = {layout.column(one): one for one in numbers if layout.row(one) == row}
        line = [*row]
        for name, others in columns.items():
            number = cells.get(name)
            line += _beside(others, str(number), format_ours(number, records)) if number else _beside(others, "", "")
        lines.append(line)
    if table == "2":
        days = {weights_of(run): f"{run.core_days:,}" for run in read_paper_runs() if run.core_days}
        lines.append(
            ["TPUv3-core-days", *(word for name, others in columns.items() for word in _beside(others, days[name], ""))]
        )
    if table == "6":
        lines = [[*line, *more] for line, more in zip(lines, _table6_ends(records), strict=True)]
    return markdown_table(lines)


def _beside(is_compared_model: bool, paper: str, ours: str) -> list[str]:
    return [paper] if is_compared_model else [paper, ours]


def _table6_ends(records: Sequence[RunRecord]) -> list[list[str]]:
    """Returns further columns of Table 6, the numbers of Figure 5: a list of headings, then a list for each row."""
    ends = [["mean of the five data sets", "ours", "exaFLOPs"]]
    for run in read_paper_runs():
        if run.exaflops:
            ours = our_mean_of_five(run, records)
            ends.append([f"{mean_of_five(run):.2f}", "" if ours is None else f"{ours:.2f}", f"{run.exaflops:,}"])
    return ends


def is_recorded(table: str, records: Sequence[RunRecord]) -> bool:
    """Returns whether we have runs for at least one number of a table."""
    return any(our_accuracies(number, records) for number in read_paper_numbers() if number.table == table)


def numbers_of_run(run: PaperRun) -> dict[str, PaperNumber]:
    """Returns data set -> number of Table 6, for the model and the epochs of a pre-training run."""
    wanted = ("6", run.model, run.epochs)
    return {one.dataset: one for one in read_paper_numbers() if (one.table, one.model, one.epochs) == wanted}


def mean_of_five(run: PaperRun) -> float:
    """Returns the paper's mean over ImageNet, CIFAR-10, CIFAR-100, Pets and Flowers, in percent."""
    numbers = numbers_of_run(run)
    return statistics.mean(numbers[dataset].accuracy for dataset in FIVE)


def our_mean_of_five(run: PaperRun, records: Sequence[RunRecord]) -> float | None:
    """Returns our mean over the data sets of `mean_of_five`, in percent; None if one of them has no run."""
    numbers = numbers_of_run(run)
    means = [our_mean(numbers[dataset], records) for dataset in FIVE]
    known = [mean for mean in means if mean is not None]
    return statistics.mean(known) if len(known) == len(FIVE) else None


def our_mean(paper_number: PaperNumber, records: Sequence[RunRecord]) -> float | None:
    """Returns the mean accuracy of our runs that reproduce a number of the paper, in percent; None without runs."""
    values = our_accuracies(paper_number, records)
    return statistics.mean(values) if values else None


def format_ours(paper_number: PaperNumber, records: Sequence[RunRecord]) -> str:
    """Returns the mean accuracy of our runs that reproduce a number, such as "88.12 ± 0.05 (3 runs)".

    The standard deviation is left out for a single run. The text is empty without runs.
    """
    values = our_accuracies(paper_number, records)
    if not values:
        return ""
    std = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{std} ({len(values)} run{'s' if len(values) > 1 else ''})"


def our_accuracies(paper_number: PaperNumber, records: Sequence[RunRecord]) -> list[float]:
    """Returns the accuracies, in percent, of our runs that reproduce a number of the paper.

    `is_of_paper` decides which runs these are. For the data set `vtab` the list has one value, the mean over
    the 19 tasks; it is empty if a task has no run.
    """
    metric = "real/accuracy" if paper_number.dataset.endswith("_real") else "test/accuracy"
    accuracies: dict[str, list[float]] = {}
    for record in records:
        value = record.metrics.get(metric)
        if value is not None and is_of_paper(record, paper_number):
            accuracies.setdefault(record.config["data"]["source"], []).append(100 * value)
    if paper_number.dataset != "vtab":
        return [value for values in accuracies.values() for value in values]
    tasks = [task for task in VTAB_TASKS.values() if task.group]
    return [statistics.mean(map(statistics.mean, accuracies.values()))] if len(accuracies) == len(tasks) else []


def is_of_paper(record: RunRecord, paper_number: PaperNumber) -> bool:
    """Returns whether a run reproduces a number of the paper.

    It does if it started from the weights of the paper and every field that decides what is computed is as in our
    recipe, except the learning rate, which must be one of those in the paper. For ReaL it must also have evaluated all
    of ImageNet's validation images with ReaL's labels.
    """
    model, source = record.config["model"]["name"], record.config["data"]["source"]
    if model != paper_number.model or not paper_number.is_of(record.config["init_from"] or ""):
        return False
    dataset, task = paper_number.dataset.removesuffix("_real"), source.removeprefix("vtab:")
    polyak = ",polyak=yes" if (paper_number.table, dataset) == ("2", "imagenet2012") else ""
    if not dataset.startswith("vtab"):
        recipe = f"configs/finetune.py:model={model},dataset={dataset}{polyak}"
    elif dataset in ("vtab", source) and source != task and task in VTAB_TASKS and VTAB_TASKS[task].group:
        recipe = f"configs/vtab.py:task={task},model={model}"
    else:
        return False
    wanted = _deciding_fields(recipe)
    try:
        config = resolve_config(parse_config(json.dumps(record.config).encode(), record.name))
    except UserError:
        return False
    known = record.steps == wanted["total_steps"] and config.base_lr in list_learning_rates(dataset, model)
    real = not paper_number.dataset.endswith("_real") or _is_real(record, config)
    return known and real and _without_free(config) == wanted


def _is_real(record: RunRecord, config: ConfigDict) -> bool:
    """Returns whether the evaluation `real` used all of ImageNet's validation images, ReaL's labels and the same
    preprocessing as the evaluation `test`.
    """
    evaluation = (data.identify_evals(config) | record.evaluations).get("real", {"split": "", "preprocess": ""})
    pipe = data.describe_evals(config)["test"]["preprocess"]
    split = re.fullmatch(r"val(idation)? (?!.*labels=None)(.* )?labels=.*class_map=None.*", evaluation["split"])
    return bool(split) and evaluation["preprocess"] == pipe


@functools.cache
def _deciding_fields(recipe: str) -> dict[str, Any]:
    config, _ = parse_command_line(["", f"--config={recipe}"])
    return _without_free(resolve_config(config))


def _without_free(config: ConfigDict) -> dict[str, Any]:
    return {name: value for name, value in flatten_config(config).items() if not IRRELEVANT_FIELDS.fullmatch(name)}
