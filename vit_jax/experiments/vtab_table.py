"""The accuracies on VTAB's tasks and their means over groups of tasks, beside the paper's Table 9."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.paper import read_paper_numbers
from vit_jax.text_tables import align

MODELS = ("H/14 JFT", "L/16 JFT", "L/16 I21k")
STATED = [number for number in read_paper_numbers() if number.table == "9"]
# Task -> accuracies in percent, in the order of MODELS.
TABLE_9: Mapping[str, tuple[float, ...]] = {
    dataset.removeprefix("vtab:"): tuple(number.accuracy for number in STATED if number.dataset == dataset)
    for dataset in dict.fromkeys(number.dataset for number in STATED)
}


class TaskResult(NamedTuple):
    """The result of a task.

    Attributes:
        accuracy: the accuracy on the test split, as a fraction; None: the training diverged.
        setting: the setting that was chosen on the split val200, as FIELD=VALUE.
    """

    accuracy: float | None
    setting: str


def summarize_tasks(results: Mapping[str, TaskResult], groups: Mapping[str, str]) -> dict[str, Any]:
    """Returns the results as a JSON object: `tasks`, a row for each task, and `means`, a row for each group of tasks.

    The group `all` has all 19 tasks. A group has a mean only if all its tasks were run. If `all` has none, the group
    `run` has the mean over those of the 19 tasks that were run. Each row also has the paper's accuracies for the same
    tasks. A task whose training diverged counts as an accuracy of 0. Accuracies are fractions.

    Args:
        results: task -> its result.
        groups: task -> its group, for all tasks.
    """
    rows: dict[str, Any] = {}
    for task, (accuracy, setting) in results.items():
        paper = {model: round(value / 100, 3) for model, value in zip(MODELS, TABLE_9.get(task, ()), strict=False)}
        rows[task] = {"accuracy": accuracy, "setting": setting, "paper": paper}
    members = {group: [task for task in TABLE_9 if groups[task] == group] for group in dict.fromkeys(groups.values())}
    complete = {group: own for group, own in (members | {"all": [*TABLE_9]}).items() if own and rows.keys() >= {*own}}
    run = [task for task in TABLE_9 if task in rows]
    if run and "all" not in complete:
        complete["run"] = run
    means = {group: _mean([rows[task] for task in own]) for group, own in complete.items()}
    return {"tasks": rows, "means": means}


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    accuracies = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    paper = {model: sum(row["paper"][model] for row in rows) / len(rows) for model in MODELS}
    return {
        "accuracy": sum(accuracies) / len(rows),
        "tasks": len(rows),
        "diverged": len(rows) - len(accuracies),
        "paper": paper,
    }


def format_tasks(summary: Mapping[str, Any]) -> str:
    """Returns a table of what `summarize_tasks` returns, in percent: a line for each task and for each mean."""
    tasks = [[task, *_percent(row), row["setting"]] for task, row in summary["tasks"].items()]
    lines = [["", "ours", *MODELS, ""], *tasks]
    for group, row in summary["means"].items():
        which = f"the {row['tasks']} of {len(TABLE_9)} tasks" if group == "run" else f"{group} ({row['tasks']})"
        end = f"{row['diverged']} diverged, counted as 0" if row["diverged"] else ""
        lines.append([f"mean, {which}", *_percent(row), end])
    return "\n".join(align(lines, right=range(1, len(lines[0]) - 1)))


def _percent(row: Mapping[str, Any]) -> list[str]:
    ours = "diverged" if row["accuracy"] is None else f"{row['accuracy']:.2%}"
    return [ours, *(f"{row['paper'][model]:.1%}" if row["paper"] else "-" for model in MODELS)]
