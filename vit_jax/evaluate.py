"""Evaluates models exactly: runs on their own splits, any weights as --evals asks.

Examples:
  python -m vit_jax.evaluate workdirs/digits --json
  python -m vit_jax.evaluate workdirs/digits --evals=test --evals=fewshot:shots=1,5
  python -m vit_jax.evaluate model.npz --evals='knn:source=folder:data/photos,train_split=train[:70%],split=train[70%:]'
  python -m vit_jax.evaluate ViT-B_16 model.npz --evals=fewshot:source=tfds:cifar100,tfds:dtd

--evals=[NAME=]WHAT[:FIELD=VALUE,...] may be given several times. WHAT is
  an evaluation of the run, by its name: test
  a kind of evaluation, on the data of the run or on others: fewshot, knn:source=tfds:cifar10;
    on those of the run it takes the run's splits, unless it names others
  a recipe, all of whose evaluations are meant: configs/cifar10.py
docs/fields.md lists the fields of each kind with their defaults. If a field that takes one
value is given several, as source above, there is one evaluation for each of them.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from vit_jax import UserError, cli, data, evals, interop, refuse, tell, without_queries
from vit_jax.evals import (
    OUTPUTS,
    choose_batch,
    choose_evaluations,
    is_run,
    open_run,
    open_weights,
    parse_outputs,
    rounded,
)
from vit_jax.json_text import to_json
from vit_jax.machine import count_cores
from vit_jax.text_tables import align


class EvaluationResult(NamedTuple):
    """The metrics of a model, and what identifies its weights and the data.

    Attributes:
        metrics: name -> value. For a checkpoint of a run, its `step` too.
        about: `weights`, a digest of the weights, and `evals`, what `data.identify_evals` returns.
        classes: the number of classes of the model's head; None: it does not classify.
    """

    metrics: dict[str, float]
    about: dict[str, Any]
    classes: int | None = None

    @property
    def shown(self) -> dict[str, float]:
        """The metrics that are printed: without top-5 accuracies of five classes or fewer, which are 1."""
        few = self.classes is not None and self.classes <= 5
        return {
            name: value for name, value in self.metrics.items() if not (few and name.endswith(("/top5", "/top5_all")))
        }


def evaluate(path: str | Path, *args: Any, **options: Any) -> dict[str, float]:
    """Returns the metrics of a model: name -> value. Takes and raises what `evaluate_model` does."""
    return evaluate_model(path, *args, **options).metrics


def evaluate_model(
    path: str | Path,
    best: bool = False,
    fsdp: int = 1,
    source: str | None = None,
    *,
    batch: int | None = None,
    workers: int | None = None,
    split: str | None = None,
    requests: Sequence[str] = (),
    data_dir: str | None = None,
    save: str = "",
    save_dir: str | Path = ".",
    resolution: int | tuple[int, ...] | None = None,
    features: Sequence[str] = (),
) -> EvaluationResult:
    """Returns the metrics of a model, and what identifies its weights and the data.

    Args:
        path: a run's folder, local or remote, whose newest checkpoint is meant; or anything that `vit_jax.load` reads.
            Nothing is written there.
        best: whether to evaluate the best checkpoint that a run kept, not its newest; only for a run.
        fsdp: the number of devices to split the weights over.
        source: the data, as `config.data.source`: their new place if a run's data have moved; for weights, the data.
        batch: images per step over all devices, rounded up to a multiple of their number; None: see `choose_batch`.
        workers: processes that read and decode, 0: threads of this one; None: see `set_workers`.
        split: the split for the run's first evaluation, which is then the only one and names the metrics; None: all its
            evaluations on their own splits.
        requests: evaluations in place of the run's own, as --evals of the command line; see `request_evaluations`.
        data_dir: as `config.data.data_dir`, in place of the run's.
        save: what to write, separated by commas: features, predictions, confusion or mistakes, see
            `evals.save_outputs`; model, see `evals.save_probed_models`. Empty: nothing.
        save_dir: the folder to write these to.
        resolution: the size of the images, as for `vit_jax.load`; only for weights that are not a run.
        features: folders of `vit_jax.embed`, which contain the features of all images of evaluations of features.

    Raises:
        UserError: there is no such model, or no such checkpoint of the run yet, the data or the split is absent, or a
            number is too small.
    """
    check_numbers(fsdp=(fsdp, 1), batch=(batch, 1), workers=(workers, 0))
    if is_run(path):
        refuse((resolution, f"{path} is evaluated at its own resolution; for another give its {interop.MODEL_FILE}."))
        loaded = open_run(path, best, fsdp, source)
    else:
        refuse((best or split, f"{path} is no run's folder; leave out --best and --split, which only runs have."))
        loaded = open_weights(path, fsdp, source, resolution)
    config, program = loaded.config, loaded.program
    choose_evaluations(config, program.model.image_size, program.model.preprocess, requests, split)
    wanted = parse_outputs(save, config.evals)
    config.data.data_dir = data_dir or config.data.data_dir
    config.batch_eval = rounded(batch) if batch else min(rounded(loaded.batch), choose_batch(program))
    set_workers(config, workers)
    evaluators = evals.make_evaluators(config, program)  # opens the data first: the weights may take long to read
    weights = loaded.read()
    # Other hosts may have outputs that this one lacks, while all must read them together.
    cache: evals.OutputCache = evals.OutputFiles(program.model, weights) if jax.process_count() == 1 else {}
    if features:
        cache = evals.read_features(features, config, program, loaded.digest())
    about = {"weights": loaded.digest(), "evals": data.identify_evals(config)}
    placed, folder, written = jax.device_put(weights, program.params_shardings), Path(save_dir), list[str]()
    for what in wanted:
        if what != "model":  # which needs the metrics; the others leave outputs in the cache for the evaluations
            written += evals.save_outputs(what, folder, config, program, placed, cache, loaded.step)
    metrics = evals.check_finite(evals.run_evaluators(evaluators, placed, cache=cache))
    if "model" in wanted:
        written += evals.save_probed_models(folder, config, program, weights, cache, metrics)
    for path in written:
        tell(f"Wrote {path}")
    step = {} if loaded.step is None else {"step": loaded.step}
    return EvaluationResult({**step, **metrics}, about, program.task.num_classes)


def check_numbers(**numbers: tuple[int | None, int]) -> None:
    """Raises UserError unless each number, given by name as (number, least), is None or at least `least`."""
    for name, (number, least) in numbers.items():
        if number is not None and number < least:
            raise UserError(f"{name} must be at least {least}, not {number}.")


def set_workers(config: ConfigDict, asked: int | None) -> None:
    """Sets `config.data.workers` to `asked`, or if that is None to the run's number, but not more than the cores here.

    With None on a CPU backend it is 0, because the cores also compute.
    """
    cores = count_cores()
    chosen = 0 if jax.default_backend() == "cpu" else min(data.choose_workers(config.data.workers, cores), cores)
    with config.ignore_type():  # a number in place of a word
        config.data.workers = chosen if asked is None else asked


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="model",
        help="folder of a run, or any weights that vit_jax.load reads; several are compared",
    )
    parser.add_argument("--workdir", help="same as the positional argument")
    parser.add_argument("--evals", action="append", default=[], help="what to evaluate, see above [as the run says]")
    parser.add_argument(
        "--best",
        action="store_true",
        help="evaluate the best checkpoint, not the newest [if the run has stop_after]",
    )
    parser.add_argument("--split", help="evaluate this split, for example train[:10%%] [those of the run]")
    parser.add_argument("--batch", type=int, help="images per step over all devices [chosen to fit this machine]")
    parser.add_argument("--workers", type=int, help="processes that read images; 0: threads [chosen for this machine]")
    cli.add_resolution(parser, "that of the stated preprocessing, or of the run")
    parser.add_argument(
        "--features", action="append", default=[], metavar="DIR", help="take features from this folder of vit_jax.embed"
    )
    parser.add_argument("--fsdp", type=int, default=1, help="devices to split the weights over [1]")
    parser.add_argument("--source", help="new place of the data, if they have moved, for example folder:PATH")
    parser.add_argument("--data-dir", help="folder of the TFDS data [that of the run, else TFDS's default]")
    parser.add_argument(
        "--save",
        action="append",
        default=[],
        metavar="WHAT,...",
        help=f"also write {', '.join(OUTPUTS)} (of a linear probe); may be given several times",
    )
    parser.add_argument("--save-dir", default=".", help="folder of these files; one for each of several models [.]")
    parser.add_argument("--json", action="store_true", help="print JSON, one object a model")
    return parser


def main(argv: list[str]) -> None:
    """Runs the command line."""
    args = make_parser().parse_args(argv[1:])
    models = list(dict.fromkeys([*args.models, *([args.workdir] if args.workdir is not None else [])]))
    if not all(models) or len(models) < 1 or (args.workdir and len(models) > 1):
        raise UserError("give a run or other weights to evaluate: python -m vit_jax.evaluate WORKDIR.")
    cli.join_hosts()
    for model in models:
        is_run(model)  # before any is evaluated: there must be something of each name
    rows = []
    for number, model in enumerate(models):
        folder = Path(args.save_dir, str(number)) if len(models) > 1 else args.save_dir
        found = evaluate_model(
            model,
            args.best,
            args.fsdp,
            args.source,
            batch=args.batch,
            workers=args.workers,
            split=args.split,
            requests=args.evals,
            data_dir=args.data_dir,
            save=",".join(args.save),
            save_dir=folder,
            resolution=args.resolution,
            features=args.features,
        )
        # The metrics keep the names of the run's evaluation, such as test/accuracy, whatever split it reads.
        named: dict[str, Any] = {"model": without_queries(model)} if len(models) > 1 else {}
        named |= {} if args.split is None else {"split": args.split}
        rows.append(named | found.shown)
        if args.json and jax.process_index() == 0:
            print(to_json(named | found.metrics | found.about), flush=True)
    if not args.json and jax.process_index() == 0:
        print(format_table(rows) if len(rows) > 1 else format_list(rows[0]))


def format_list(row: dict[str, float | str]) -> str:
    """Returns a line for each value, with its name before it."""
    return "\n".join(f"{name:20} {format_value(value)}" for name, value in row.items())


def format_table(rows: Sequence[dict[str, float | str]]) -> str:
    """Returns a line for each row, under a line of names. A value that a row lacks is left blank."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([format_value(row[name]) if name in row else "" for name in names] for row in rows)]
    return "\n".join(align(cells))


def format_value(value: float | str) -> str:
    """Returns a number with six digits, and a text as it is."""
    return value if isinstance(value, str) else f"{value:.6g}"


if __name__ == "__main__":
    cli.run_command(main, is_report=True)
