"""Out-of-fold predictions: for each image of a sweep over folds, those of the run that was not trained on it."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import UserError, choose, data, evals, tell
from vit_jax.config import EVAL_KINDS
from vit_jax.data.sources import Fold, Source, divide_folds, locate_example, open_source
from vit_jax.experiments.outcomes import RESULT_FILE, check_inputs, read_object
from vit_jax.experiments.sweep_table import average_name
from vit_jax.monitoring import find_runs, read_run
from vit_jax.storage import filesystem


@dataclasses.dataclass(frozen=True)
class FoldRun:
    """A finished run of a sweep over folds.

    Attributes:
        folder: the folder of the run.
        config: its configuration.
        evaluation: the name of the evaluation that reads the fold.
        split: the split that is divided into folds.
        fold: the fold that the run did not train on.
    """

    folder: str
    config: ConfigDict
    evaluation: str
    split: str
    fold: Fold


@dataclasses.dataclass(frozen=True)
class OutOfFold:
    """The predictions for all images of a split, in the order of the data.

    Attributes:
        source: the images.
        preprocess: their preprocessing.
        labels: their labels, int32 [n], or [n, max_labels]; -1 for an image without one.
        probabilities: of each class, float32 [n, classes]; of several seeds, their mean.
        folds: the number of each image's fold, int32 [n].
        class_names: the names of the classes, or None.
    """

    source: Source
    preprocess: data.Preprocessor
    labels: np.ndarray
    probabilities: np.ndarray
    folds: np.ndarray
    class_names: tuple[str, ...] | None

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays of a file: `names` of the images, `labels`, `probabilities`, `folds`, `class_names`."""
        names = np.array([self.source.example_key(index) for index in range(len(self.source))])
        found = {"names": names, "labels": self.labels, "probabilities": self.probabilities, "folds": self.folds}
        return found | ({"class_names": np.array(self.class_names)} if self.class_names else {})


def find_fold_runs(workdir: str, name: str | None = None) -> list[FoldRun]:
    """Returns the runs of a sweep over folds that differ in fold and seed only.

    Args:
        workdir: the folder of the sweep.
        name: the name of the combination of the other fields; None: the best.

    Raises:
        UserError: the sweep is no sweep over folds, has not ended or has no such combination, or a fold has no run.
    """
    report = filesystem.join_path(workdir, RESULT_FILE)
    if not filesystem.exists(report):
        raise UserError(
            f"{workdir} is not the folder of a sweep that has ended: it has no {RESULT_FILE}. Train on each fold with "
            "python -m vit_jax.sweep --sweep.fold=5."
        )
    averages = read_object(report, lambda content: bool(content.get("averages")))["averages"]
    names = [average["name"] for average in averages]
    if name and names == [""]:
        raise UserError(f"the sweep in {workdir} varied nothing but fold and seed; leave out --of.")
    name = names[0] if name is None else choose("combination of the sweep", name, names)
    runs = list[FoldRun]()
    for folder, where in find_runs(workdir).items():
        result = filesystem.join_path(folder, RESULT_FILE)
        outcome = read_object(result) if filesystem.exists(result) else None
        if outcome is None or average_name(outcome["name"]) != name:
            continue
        if outcome["last"] is None:
            raise UserError(f"{where} diverged, so it predicts nothing; choose another combination with --of=NAME.")
        runs += read_fold_run(folder, where)
    if not runs:
        raise UserError(f"the runs in {workdir} have no folds; train them with python -m vit_jax.sweep --sweep.fold=5.")
    several = {(run.split, run.fold.folds) for run in runs}
    if len(several) > 1:
        told = " and ".join(f"{folds} of {split}" for split, folds in sorted(several))
        raise UserError(f"the runs in {workdir} have different folds, {told}; write sweeps to folders of their own.")
    if missing := sorted({*range(1, runs[0].fold.folds + 1)} - {run.fold.number for run in runs}):
        raise UserError(
            f"fold {missing[0]} of {runs[0].fold.folds} has no run in {workdir} that has ended; the command of the "
            "sweep trains it."
        )
    return runs


def read_fold_run(folder: str, where: str) -> list[FoldRun]:
    """Returns the run in a folder, or [] if it was not trained without a fold that its evaluation reads.

    Args:
        folder: the folder of the run.
        where: the name of the run, for messages.

    Raises:
        UserError: the run has no model that classifies.
    """
    config = read_run(folder, where).config
    name = config.checkpoint.best_metric.partition("/")[0]
    if EVAL_KINDS[config.evals[name].kind].task != "classify":
        raise UserError(f"{where} is no classifier, so it predicts no probabilities of classes.")
    split, folds = divide_folds(config.evals[name].split)
    trained = divide_folds(config.data.split)
    fold = folds[0]
    if (
        fold is None
        or fold.negated
        or {*folds} != {fold}
        or trained != (split, (fold._replace(negated=True),) * len(folds))
    ):
        return []
    return [FoldRun(folder, config, name, split, fold)]


def predict_out_of_fold(runs: Sequence[FoldRun], source: str | None = None, fsdp: int = 1) -> OutOfFold:
    """Returns the predictions of the runs of all folds, each for the images that it was not trained on.

    Args:
        runs: what `find_fold_runs` returns.
        source: the new place of the data, if they have moved; None: that of the runs.
        fsdp: the number of devices to split the weights over.

    Raises:
        UserError: the data have changed since a run began or cannot be read, or outputs are not finite.
    """
    found, start = dict[tuple[str, int], tuple[int, np.ndarray, list[np.ndarray]]](), runs[0]
    for run in runs:
        tell(f"Predicting {run.evaluation} {run.config.evals[run.evaluation].split} of {run.folder}")
        batches, probabilities, labels, names = predict_fold(run, source, fsdp)
        for index, (label, row) in enumerate(zip(labels, probabilities, strict=True)):
            found.setdefault(locate_example(batches.source.parts, index), (run.fold.number, label, []))[2].append(row)
    config = start.config.copy_and_resolve_references()
    config.data.source = source or config.data.source
    whole = open_source(config, start.split, streams=True)
    places = [locate_example(whole.parts, index) for index in range(len(whole))]
    if {*places} != found.keys():
        raise UserError(
            f"the folds have {len(found):,} images, but {start.split} has {len(places):,}: the data have changed; run "
            "the sweep again in another --workdir."
        )
    return OutOfFold(
        whole,
        batches.preprocess,
        np.array([found[place][1] for place in places]),
        np.array([np.mean(found[place][2], axis=0) for place in places], np.float32),
        np.array([found[place][0] for place in places], np.int32),
        names,
    )


def predict_fold(
    run: FoldRun, source: str | None, fsdp: int
) -> tuple[data.EvalBatches, np.ndarray, np.ndarray, tuple[str, ...] | None]:
    """Returns the images of a run's fold, probabilities [n, classes], labels [n, ...], and names of the classes.

    Takes and raises what `predict_out_of_fold` does.
    """
    stored = run.config.copy_and_resolve_references()
    stored.data.source = source or stored.data.source
    stored.data.num_examples = None  # a change of the data is told by `check_inputs`
    completed, info = data.complete_config(stored)
    check_inputs(run.folder, completed, info, is_finished=True)
    loaded = evals.open_run(run.folder, False, fsdp, source)
    config, program = loaded.config, loaded.program
    config.batch_eval = min(evals.rounded(loaded.batch), evals.choose_batch(program))
    with config.ignore_type():  # a number in place of a word
        config.data.workers = 0
    batches = data.EvalBatches(config, run.evaluation, program.batch_sharding, info.opened)
    params = jax.device_put(loaded.read(), program.params_shardings)
    logits, labels = evals.compute_outputs(program, "logits", params, batches, {})
    evals.refuse_nonfinite(f"{run.folder}: the logits", evals.count_nonfinite(logits), len(logits))
    return batches, np.asarray(program.model.activate(logits)), labels, program.model.class_names
