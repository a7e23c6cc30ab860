"""Fine-tunes weights on the data sets of Table 2, 5 or 6 of the paper, by the paper's protocol.

Example:
  python -m vit_jax.finetune --table=5 --config=configs/finetune.py:model=ViT-B/16
    --config.init_from=ViT-B/16-imagenet21k --config.data.data_dir=data/tensorflow_datasets

  --table=2|5|6  5: all data sets at 384 pixels; 2: ImageNet as with polyak=yes in the recipe, and three seeds; 6: as 5,
             from a run of configs/studies/compute.py
  --datasets=NAME,...  some of them [imagenet2012,cifar10,cifar100,oxford_iiit_pet,oxford_flowers102]
  --seeds=SEED,...  of the runs on the whole training split [0,1,2 for Table 2, else 0]
  --config   as for vit_jax.main, without dataset= and split= in the argument; --config.KEY=VALUE too
  --sweep.KEY=VALUE,...  as for vit_jax.sweep, beside the learning rates of Table 4; --sweep.base_lr replaces them
  --workdir  folder of all runs, local, gs:// or s3:// [workdirs/table<number>]
  --json     print one JSON object, the same as in finetune.json in the workdir

On each data set the learning rates of Table 4 are tried on a part of the training split. The one with the largest
accuracy on the rest then trains on the whole split, with each seed; its accuracies on the test split are averaged. A
data set that is not here is left out, and the command that prepares it is printed. The same command continues where it
was stopped, and runs nothing twice. The exit codes are those of vit_jax.main.
"""

import dataclasses
import functools

import jax

from vit_jax import MissingData, NonFiniteLoss, UserError, choose, cli, tell
from vit_jax.experiments import (
    Combination,
    Train,
    average_seeds,
    best_combinations,
    full_split_words,
    list_combinations,
    read_outcome,
    train_combinations,
    without_seed,
)
from vit_jax.json_text import to_json
from vit_jax.paper import LEARNING_RATES, PaperNumber, find_paper_number, list_learning_rates
from vit_jax.storage import check_workdir, filesystem
from vit_jax.text_tables import align

RESULT_FILE = "finetune.json"
SEEDS = {"2": "0,1,2", "5": "0", "6": "0"}  # table -> default; the paper averages over three runs in Table 2
FLAGS = ("--table=", "--datasets=", "--seeds=", "--config=", "--workdir=")


@dataclasses.dataclass(frozen=True)
class FinetuneRequest:
    """The fine-tunings that a command line asks for.

    Attributes:
        table: the number of the paper's table, "2", "5" or "6".
        datasets: the names of the data sets.
        seeds: the seeds of the runs on the whole training split, separated by commas.
        recipe: the file of the recipe and its argument, FILE.py:TEXT.
        workdir: the folder of all runs.
        words: the other flags, which every run gets.
    """

    table: str
    datasets: list[str]
    seeds: str
    recipe: str
    workdir: str
    words: list[str]


@dataclasses.dataclass(frozen=True)
class DatasetResult:
    """The result on one data set.

    Attributes:
        dataset: the name of the data set.
        chosen: the best combination: the values of the fields that were varied.
        held_out: the accuracy of `chosen` on the held-out part of the training split; None: every combination diverged.
        mean: the mean over the seeds of the accuracies on the test split; None: a run diverged.
        std: the standard deviation of these accuracies, see `vit_jax.experiments.sweep_table.Average`.
        runs: the number of seeds; 0 if every combination diverged.
        paper: what the paper states for these weights; None: nothing.
    """

    dataset: str
    chosen: str
    held_out: float | None
    mean: float | None
    std: float | None
    runs: int
    paper: PaperNumber | None


def parse_request(argv: list[str]) -> FinetuneRequest:
    """Parses the command line.

    Raises:
        UserError: --table or a data set is unknown, --config is missing, or the argument of --config names a data set
            or a split, which the command chooses itself.
    """
    given = {flag: word.removeprefix(flag) for word in argv[1:] for flag in FLAGS if word.startswith(flag)}
    if "--table=" not in given or "--config=" not in given:
        raise UserError("add --table=2, --table=5 or --table=6, and --config=configs/finetune.py:model=NAME.")
    table = choose("table", given["--table="], SEEDS)
    recipe = given["--config="]
    if {"dataset", "split"} & {pair.partition("=")[0] for pair in recipe.partition(":")[2].split(",")}:
        raise UserError("leave dataset= and split= out of --config; --datasets=NAME,... chooses among the data sets.")
    datasets = list(dict.fromkeys(given.get("--datasets=", ",".join(LEARNING_RATES)).split(",")))
    for dataset in datasets:
        choose("data set", dataset, LEARNING_RATES)
    seeds = given.get("--seeds=", SEEDS[table])
    workdir = check_workdir(given.get("--workdir=", f"workdirs/table{table}"))
    words = [word for word in argv[1:] if not word.startswith(FLAGS) and word != "--json"]
    return FinetuneRequest(table, datasets, seeds, recipe, workdir, words)


def list_trials(request: FinetuneRequest, dataset: str) -> list[Combination]:
    """Returns the runs on a data set among which the learning rate is chosen.

    Raises:
        UserError: see `vit_jax.experiments.list_combinations`.
    """
    polyak = ",polyak=yes" if (request.table, dataset) == ("2", "imagenet2012") else ""
    colon = "," if ":" in request.recipe else ":"
    recipe = f"--config={request.recipe}{colon}dataset={dataset},split=dev{polyak}"
    words = [recipe, *request.words, f"--workdir={filesystem.join_path(request.workdir, dataset)}"]
    if any(word.startswith("--sweep.base_lr=") for word in words):
        return list_combinations(["", *words])

    def combine(rates: tuple[float, ...]) -> list[Combination]:
        return list_combinations(["", *words, f"--sweep.base_lr={','.join(map(str, rates))}"])

    trials = combine(LEARNING_RATES[dataset])
    rates = list_learning_rates(dataset, trials[0].config.model.name)
    return trials if rates == LEARNING_RATES[dataset] else combine(rates)


def list_all_trials(argv: list[str]) -> list[Combination]:
    """Returns the runs of `list_trials` on all data sets that a command line asks for.

    Raises:
        UserError: see `parse_request` and `list_trials`.
    """
    request = parse_request(argv)
    return [trial for dataset in request.datasets for trial in list_trials(request, dataset)]


def find_missing(request: FinetuneRequest) -> dict[str, str]:
    """Returns data set -> sentence on how to prepare it, for each data set that is not here.

    Raises:
        UserError: a configuration is wrong or the workdir holds other runs; or no data set is here.
    """
    missing = {}
    for dataset in request.datasets:
        try:
            read_outcome(list_trials(request, dataset)[0])
        except MissingData as error:
            missing[dataset] = str(error)
    if len(missing) == len(request.datasets):
        raise UserError(f"none of the data sets is here: {'; '.join(missing.values())}")
    return missing


def finetune(request: FinetuneRequest, dataset: str, train: Train = train_combinations) -> DatasetResult:
    """Trains what is left to train on a data set, and returns the result.

    Raises:
        UserError: see `vit_jax.experiments.train_combinations`.
    """
    trials = list_trials(request, dataset)
    averages = average_seeds(train(trials))
    best = best_combinations(averages, trials)[0]
    weights = best.config.model.name, best.config.init_from
    paper = find_paper_number(request.table, *weights, dataset)
    if averages[0].mean is None:
        return DatasetResult(dataset, averages[0].name, None, None, None, 0, paper)
    folder = filesystem.join_path(request.workdir, dataset, "full")
    words = [*without_seed(full_split_words(best) or []), f"--sweep.seed={request.seeds}", f"--workdir={folder}"]
    [final] = average_seeds(train(list_combinations(["", *words])))
    return DatasetResult(dataset, averages[0].name, averages[0].mean, final.mean, final.std, final.runs, paper)


def format_rows(rows: list[DatasetResult]) -> str:
    """Returns a line for each data set; accuracies in percent."""
    head = ("", "chosen", "held out", "test", "std", "runs", "paper")
    lines = [head]
    for row in rows:
        held_out, mean, std = (format_percent(value) for value in (row.held_out, row.mean, row.std))
        paper = "-" if row.paper is None else str(row.paper)
        mean = "diverged" if row.mean is None else mean
        lines.append((row.dataset, row.chosen, held_out, mean, std, str(row.runs), paper))
    return "\n".join(align(lines))


def format_percent(value: float | None) -> str:
    """Returns a fraction in percent with two decimals, or a dash for None."""
    return "-" if value is None else f"{100 * value:.2f}"


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `parse_request`, `find_missing` and `finetune`.
        NonFiniteLoss: on a data set, every trial or a run on the whole training split diverged.
    """
    if {"--help", "-h"} & set(argv[1:]):
        print(__doc__)
        return
    request = parse_request(argv)
    list_all_trials(argv)  # mistakes are told before the devices start
    with cli.supervised() as supervisor:
        missing = find_missing(request)
        here = [dataset for dataset in request.datasets if dataset not in missing]
        rows = []
        for dataset in here:
            tell(f"{dataset}:")
            rows.append(finetune(request, dataset, functools.partial(train_combinations, supervisor=supervisor)))
    if jax.process_index() == 0:
        fields = {"table": request.table, "rows": [dataclasses.asdict(row) for row in rows], "missing": missing}
        path = filesystem.join_path(request.workdir, RESULT_FILE)
        filesystem.write_bytes(path, (to_json(fields, indent=2) + "\n").encode())
        lines = [format_rows(rows), *(f"{dataset}: {sentence}" for dataset, sentence in missing.items())]
        print(to_json(fields) if "--json" in argv else "\n".join(lines))
    if diverged := [row.dataset for row in rows if row.mean is None]:
        raise NonFiniteLoss(f"training diverged on {', '.join(diverged)}; try lower learning rates.")


if __name__ == "__main__":
    cli.run_command(main, rerun_advice=cli.RESUME_ADVICE)
