"""Evaluates weights on VTAB-1k: 19 tasks of 1,000 training images each.

The weights are fine-tuned as the paper does it, or frozen.

Examples:
  python -m vit_jax.vtab ViT-L/16-imagenet21k --data-dir=data/tensorflow_datasets --workdir=workdirs/vtab
  python -m vit_jax.vtab workdirs/photos --tasks=dtd,pets --rates=0.003,0.01 --config.accum_steps=8
  python -m vit_jax.vtab workdirs/photos --frozen=fewshot --json

Each task is trained by configs/vtab.py in a folder of its own inside the workdir, and tested on its whole test split.
With several --rates, each is trained on 800 images and tried on the other 200, and the best is trained on all 1,000.
The same command continues where it was stopped; what has finished is not run again. --config.KEY=VALUE sets a field of
the recipe.

With --frozen, a linear classifier learns from features at the model's own resolution: least squares (fewshot) or
logistic regression (probe). The regularisation of either is chosen on a fifth of the images. The features stay in the
cache.

A task whose data set is not in the data directory is left out. A line states the command that prepares the data set.
"""

import argparse
import functools
import posixpath
from collections.abc import Sequence
from typing import Any

import jax

from vit_jax import UserError, choose, cli, data, interop, tell
from vit_jax.data import sources
from vit_jax.evaluate import evaluate
from vit_jax.experiments import (
    Outcome,
    TaskResult,
    Train,
    format_tasks,
    list_combinations,
    summarize_tasks,
    train_combinations,
)
from vit_jax.json_text import to_json

# Classifier on frozen features -> its evaluation. All examples of a class are its shots.
FROZEN = {"fewshot": "fewshot:shots=1000,seeds=1", "probe": "probe:validation=0.2"}
STRENGTHS = tuple(4.0**exponent for exponent in range(-5, 10))  # of the regularisation of least squares


def find_tasks(names: Sequence[str], data_dir: str | None) -> tuple[list[str], list[str]]:
    """Returns the tasks whose data are here, and a sentence on each data set that is not here.

    Raises:
        UserError: a name is not that of a task.
    """
    tasks, missing = [], dict[str, str]()
    for name in names:
        dataset = sources.VTAB_TASKS[choose("VTAB task", name, sources.VTAB_TASKS)].dataset
        try:
            sources.open_split(sources.SourceConfig(f"vtab:{name}", data_dir), "test")
            tasks.append(name)
        except UserError as error:
            missing.setdefault(dataset, str(error))
    return tasks, list(missing.values())


def recipe_words(checkpoint: str) -> list[str]:
    """Returns the words of a command line that trains `configs/vtab.py` from some weights.

    The second word has `{}` in place of the task and the split.

    Raises:
        UserError: the weights cannot be loaded.
    """
    model = interop.read_model(checkpoint)
    fields = {f"model.{field}": value for field, value in interop.config_fields(model).items()}
    words = [f"--config.{field}={value}" for field, value in ({"init_from": checkpoint} | fields).items()]
    return ["vtab", f"--config=configs/vtab.py:{{}},model={model.name}", *words]


def finetune(task: str, words: Sequence[str], learning_rates: Sequence[str], workdir: str, train: Train) -> TaskResult:
    """Returns the accuracy after fine-tuning at the rate that is best on val200. What was begun is continued.

    A single rate is not tried on val200. The accuracy is None if every rate diverges there, or the final training does.

    Args:
        task: the name of the task.
        words: the words of `recipe_words` and further flags.
        learning_rates: the learning rates to choose from.
        workdir: the folder of all tasks.
        train: trains what is left of a sweep.

    Raises:
        UserError: a flag is wrong, or a folder holds another run.
    """

    def train_on(split: str, values: Sequence[str]) -> Outcome:
        recipe = words[1].format(f"task={task},split={split}")
        varied = [f"--sweep.base_lr={','.join(values)}", f"--workdir={posixpath.join(workdir, task, split)}"]
        return train(list_combinations([words[0], recipe, *words[2:], *varied]))[0]

    best = train_on("dev", learning_rates) if len(learning_rates) > 1 else None
    rate = best.name.partition("=")[2] if best else learning_rates[0]
    diverged = best is not None and best.last is None
    return TaskResult(None if diverged else train_on("full", [rate]).last, f"base_lr={rate}")


def evaluate_tasks_frozen(
    tasks: Sequence[str], checkpoint: str, kind: str, data_dir: str | None
) -> dict[str, TaskResult]:
    """Returns task -> the accuracy of a classifier on frozen features. Features that were computed before are read.

    Args:
        tasks: the names of the tasks.
        checkpoint: the weights.
        kind: the kind of classifier, a key of `FROZEN`.
        data_dir: the folder of the TFDS data; None: TFDS's default.

    Raises:
        UserError: the weights or the data cannot be read.
    """
    low, high = data.value_range_of(interop.load(checkpoint)[0].preprocess or "value_range(-1,1)")

    def measure(train_split: str, split: str, more: dict[str, str]) -> dict[str, float]:
        images = f"preprocess=resize({{resolution}})|value_range({low:g},{high:g})"
        splits = f"train_split={train_split},split={split},{images}"
        requests = [f"{task}={FROZEN[kind]},source=vtab:{task},{splits}{more.get(task, '')}" for task in tasks]
        return evaluate(checkpoint, requests=requests, data_dir=data_dir)

    if kind == "fewshot":
        tried = measure("train800", "val200", dict.fromkeys(tasks, f",l2={','.join(map(str, STRENGTHS))}"))
        chosen = {task: max(STRENGTHS, key=lambda l2: tried[f"{task}/1000shot_l2_{l2:g}"]) for task in tasks}
        metrics = measure("train800val200", "test", {task: f",l2={l2}" for task, l2 in chosen.items()})
        return {task: TaskResult(metrics[f"{task}/1000shot"], f"l2={l2:g}") for task, l2 in chosen.items()}
    metrics = measure("train800val200", "test", {})
    return {task: TaskResult(metrics[f"{task}/accuracy"], f"l2={metrics[f'{task}/l2']:g}") for task in tasks}


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: a flag is wrong, or no data set is here; or see `finetune` and `evaluate_frozen`.
    """
    args, words = parse_arguments(argv)
    wanted = args.tasks.split(",") if args.tasks else [name for name, task in sources.VTAB_TASKS.items() if task.group]
    tasks, missing = find_tasks(list(dict.fromkeys(wanted)), args.data_dir)
    for sentence in missing:
        tell(f"left out: {sentence}")
    if not tasks:
        raise UserError("none of the data sets is here; prepare one with its command above.")
    if args.frozen:
        cli.join_hosts()
        results = evaluate_tasks_frozen(tasks, args.checkpoint, args.frozen, args.data_dir)
    else:
        with cli.supervised() as supervisor:
            recipe = [*recipe_words(args.checkpoint), *words]
            train = functools.partial(train_combinations, supervisor=supervisor)
            results = {}
            for number, task in enumerate(tasks, start=1):
                tell(f"{task}, {number} of {len(tasks)}")
                results[task] = finetune(task, recipe, args.rates.split(","), args.workdir, train)
    summary = summarize_tasks(results, {name: task.group for name, task in sources.VTAB_TASKS.items()})
    if jax.process_index() == 0:
        print(to_json(summary | {"missing": missing}) if args.json else format_tasks(summary))


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line. Words that it does not know set fields of the recipe."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.vtab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a workdir, or any weights that vit_jax.load reads")
    parser.add_argument("--data-dir", help="folder of the TFDS data [TFDS's default]")
    parser.add_argument(
        "--workdir", default="workdirs/vtab", help="folder of all tasks, local, gs:// or s3:// [%(default)s]"
    )
    parser.add_argument("--tasks", metavar="NAME,NAME", help=f"[all 19] of {', '.join(sources.VTAB_TASKS)}")
    parser.add_argument("--rates", default="0.01", help="learning rates to choose from [%(default)s, the paper's]")
    parser.add_argument("--frozen", choices=FROZEN, help="evaluate frozen features instead of fine-tuning")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def parse_arguments(argv: list[str]) -> tuple[Any, list[str]]:
    """Returns the arguments of the command, and the words that set fields of the recipe.

    Raises:
        UserError: a flag is unknown or does not go with another.
    """
    parser = make_parser()
    args, words = parser.parse_known_args(argv[1:])
    if unknown := [word for word in words if not word.startswith("--config.")]:
        raise UserError(f"unexpected {unknown[0]!r}; fields of the recipe are written --config.KEY=VALUE.")
    if args.frozen and (words or args.rates != parser.get_default("rates")):
        raise UserError("--rates and --config.KEY=VALUE are for fine-tuning; leave them out with --frozen.")
    if args.data_dir and not args.frozen:
        words.append(f"--config.data.data_dir={args.data_dir}")
    return args, words


if __name__ == "__main__":
    cli.run_command(main, rerun_advice="the same command continues, and runs no finished task again.")
