"""The evaluations of a run: what each kind computes, and how they are opened, checked and run."""

import collections
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from vit_jax import UserError, data, errors_of, reason
from vit_jax.config import EVAL_KINDS, has_classes_of_head, kinds_of_task
from vit_jax.data.sources import Source, have_same_classes
from vit_jax.evals.class_maps import check_names
from vit_jax.evals.embedding import stored_features
from vit_jax.evals.fewshot import fewshot
from vit_jax.evals.knn import knn
from vit_jax.evals.labelled_features import Examples
from vit_jax.evals.logit_metrics import check_predictions, score_predictions
from vit_jax.evals.multi_label import check_multi_label, score_multi_label
from vit_jax.evals.outputs import (
    OutputCache,
    Tick,
    compute_outputs,
    count_nonfinite,
    fetch_late,
    output_key,
    refuse_nonfinite,
)
from vit_jax.evals.probe import check_probe, probe, probe_sgd
from vit_jax.evals.regression import check_regression, score_regression
from vit_jax.evals.texts import check_zeroshot, score_zeroshot
from vit_jax.inference import Inference, sums_of_outputs
from vit_jax.model import Model
from vit_jax.tasks import Batch
from vit_jax.tree import ArrayTree

Evaluator: TypeAlias = Callable[[ArrayTree, Tick, OutputCache], dict[str, float]]
Step: TypeAlias = Callable[[ArrayTree, Batch], ArrayTree]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation whose data are open.

    Attributes:
        name: its name, the start of its metrics.
        config: its fields, `config.evals[name]` of the run.
        program: the functions of the model.
        batches: the images that are evaluated.
        train_batches: the images that it learns from; None: it learns from none.
    """

    name: str
    config: ConfigDict
    program: Inference
    batches: data.EvalBatches
    train_batches: data.EvalBatches | None = None


class Method(Protocol):
    """What a kind of evaluation computes; `METHODS` has the method of each kind."""

    def step(self, program: Inference) -> Step:
        """Returns the jitted function that is called with the parameters and each batch."""

    def check(self, evaluation: Evaluation) -> None:
        """Raises UserError, before an image is read, if data, fields and model do not suit each other.

        `check_labels` has been called before.
        """
        return  # `check_labels` is enough where a method does not say otherwise

    def measure(self, evaluation: Evaluation, params: ArrayTree, tick: Tick, cache: OutputCache) -> dict[str, float]:
        """Returns metric -> value, and `n`, the number of images; on every host the same.

        Args:
            evaluation: the evaluation.
            params: the parameters of the model.
            tick: is called for each batch.
            cache: features and logits of the model, which are taken from there if they are present.

        Raises:
            UserError: an image cannot be read, or the images do not suit the method.
        """


class TaskSums(Method):
    """The metrics of the head's task, summed batch by batch. For classification: top-1 and top-5 accuracy, the loss."""

    def step(self, program: Inference) -> Step:
        """Returns the function whose results are summed."""
        return program.eval_step

    def measure(self, evaluation: Evaluation, params: ArrayTree, tick: Tick, cache: OutputCache) -> dict[str, float]:
        """Returns the mean of each metric over all images with a label, and their number `n`.

        If outputs of the model are not finite, `nonfinite` is the number of images with such outputs. The sums over
        each batch are added on the host, in float64. Logits in the cache are used; none are added to it.

        Raises:
            UserError: no image has a label, or an image cannot be read.
        """
        task, batches = evaluation.program.task, evaluation.batches
        step: Step = evaluation.program.eval_step
        parts: Iterable[Batch] = batches
        if (known := cache.get(output_key("logits", batches))) is not None:
            step = jax.jit(lambda _, batch: sums_of_outputs(task, batch["logits"], batch["label"], batch["mask"]))
            arrays = {"logits": known[0], "label": known[1], "mask": np.ones(len(known[1]), np.float32)}
            starts = range(0, len(known[1]), batches.batch)
            parts = ({key: array[i : i + batches.batch] for key, array in arrays.items()} for i in starts)
        totals = collections.defaultdict[str, float](float)
        for sums in fetch_late(step(params, batch) for batch in parts):
            tick()
            for key, value in sums.items():
                totals[key] += float(value)
        n, bad = totals.pop("n"), int(totals.pop("nonfinite"))
        if not n:
            raise UserError(f"none of the images of evals.{evaluation.name} has a label; choose another split.")
        names = sorted(totals, key=lambda key: key == "loss")  # the loss comes after the metrics where larger is better
        return {key: totals[key] / n for key in names} | ({"nonfinite": bad} if bad else {}) | {"n": int(n)}


@dataclasses.dataclass(frozen=True)
class ScoredOutputs(Method):
    """Metrics of the outputs of all images, which every host computes.

    Attributes:
        outputs: logits or features, as for `compute_outputs`.
        score: (eval_config, source, model, outputs, labels) -> metrics.
        suits: (eval_config, source, model), raises UserError if they do not suit each other.
    """

    outputs: Literal["logits", "features"]
    score: Callable[[ConfigDict, Source, Model, np.ndarray, np.ndarray], dict[str, float]]
    suits: Callable[[ConfigDict, Source, Model], None]

    def step(self, program: Inference) -> Step:
        """Returns the function of the outputs."""
        return program.logits if self.outputs == "logits" else program.features

    def check(self, evaluation: Evaluation) -> None:
        """Raises UserError if data, fields and model do not suit each other."""
        with errors_of(f"in evals.{evaluation.name}"):
            self.suits(evaluation.config, evaluation.batches.source, evaluation.program.model)

    def measure(self, evaluation: Evaluation, params: ArrayTree, tick: Tick, cache: OutputCache) -> dict[str, float]:
        """Returns the metrics of `score`, and `nonfinite` as `TaskSums` does."""
        program, batches = evaluation.program, evaluation.batches
        outputs, labels = compute_outputs(program, self.outputs, params, batches, cache, tick)
        with errors_of(f"in evals.{evaluation.name}"):
            metrics = self.score(evaluation.config, batches.source, program.model, outputs, labels)
        bad = count_nonfinite(outputs)
        return metrics | ({"nonfinite": bad} if bad else {})


@dataclasses.dataclass(frozen=True)
class FrozenFeatures(Method):
    """Metrics of a classifier that is learnt from frozen features, on the host.

    Attributes:
        learn: (eval_config, training examples, test examples) -> metrics.
        suits: (eval_config, number of training examples, width of the features, number of classes), raises UserError if
            the classifier does not fit into memory; None: it needs little more than the features.
    """

    learn: Callable[[ConfigDict, Examples, Examples], dict[str, float]]
    suits: Callable[[ConfigDict, int, int, int], None] | None = None

    def step(self, program: Inference) -> Step:
        """Returns the function of the features."""
        return program.features

    def check(self, evaluation: Evaluation) -> None:
        """Raises UserError if the splits have other classes, or the classifier does not fit into memory.

        Warns if the evaluation is tested on images that it learns from.
        """
        assert evaluation.train_batches
        name, eval_config = evaluation.name, evaluation.config
        tested, learned = evaluation.batches.source, evaluation.train_batches.source
        if tested.class_names and learned.class_names and not have_same_classes(tested, learned):
            raise UserError(
                f"evals.{name} learns from {eval_config.train_split}, whose classes are other ones than those of "
                f"{eval_config.split}, or have other numbers; choose two splits with the same classes in the same "
                "order."
            )
        if tested.overlaps(learned):
            logging.getLogger(__name__).warning(
                "evals.%s learns from images that it is tested on; choose a split and a train_split without overlap",
                name,
            )
        if self.suits:
            with errors_of(f"in evals.{name}"):
                self.suits(eval_config, len(learned), evaluation.program.model.spec.feature_width, learned.num_classes)

    def measure(self, evaluation: Evaluation, params: ArrayTree, tick: Tick, cache: OutputCache) -> dict[str, float]:
        """Returns the metrics of `learn`, and the numbers of images `n` and `n_train`.

        Every host computes them. All return those of the first host, so that they agree to the last bit.

        Raises:
            UserError: the features are not finite, or the examples do not suit the method.
        """
        both = evaluation.train_batches, evaluation.batches
        outputs = [compute_outputs(evaluation.program, "features", params, one, cache, tick) for one in both if one]
        train, test = (Examples(*one) for one in outputs)
        tick()
        with errors_of(f"in evals.{evaluation.name}"):
            metrics = self.learn(evaluation.config, train, test)
        metrics |= {"n": len(test.labels), "n_train": len(train.labels)}
        if jax.process_count() == 1:
            return metrics
        values = np.array([*metrics.values()], np.float64).view(np.uint32)  # as devices may lack float64
        agreed = np.asarray(multihost_utils.broadcast_one_to_all(values)).view(np.float64)
        return {key: type(value)(one) for (key, value), one in zip(metrics.items(), agreed.tolist(), strict=True)}


# Kind of evaluation -> its method; the rest that is known of a kind is its row of `config.EVAL_KINDS`.
METHODS: Mapping[str, Method] = {
    "classify": TaskSums(),
    "predictions": ScoredOutputs("logits", score_predictions, check_predictions),
    "multi_label": ScoredOutputs("logits", score_multi_label, check_multi_label),
    "regression": ScoredOutputs("logits", score_regression, check_regression),
    "masked_patches": TaskSums(),
    "fewshot": FrozenFeatures(fewshot),
    "knn": FrozenFeatures(knn),
    "probe": FrozenFeatures(probe, check_probe),
    "probe_sgd": FrozenFeatures(probe_sgd, check_probe),
    "zeroshot": ScoredOutputs("features", score_zeroshot, check_zeroshot),
}


def make_evaluators(
    config: ConfigDict, program: Inference, opened: data.OpenSources | None = None
) -> dict[str, Evaluator]:
    """Returns name of an evaluation -> its evaluator, for all of `config.evals`.

    An evaluator is a function (params, tick, cache) -> {`<name>/<metric>`: value}. It calls `tick()` for each batch. It
    stores features and logits of the model in `cache` and takes them from there if they are present.

    Args:
        config: the configuration of the run.
        program: the functions of the model.
        opened: the sources that are open already, as in `data.EvalBatches`.

    Raises:
        UserError: the data cannot be opened or do not suit the evaluation, a probe does not fit into memory, or the
            metric of the best checkpoint is not defined for images with several labels.
    """
    return {name: _make_evaluator(config, name, program, opened or {}) for name in config.evals}


def make_head_evaluators(config: ConfigDict, program: Inference, opened: data.OpenSources) -> dict[str, Evaluator]:
    """Returns the evaluators that suit the task of `program`: those of its head, and those that learn from features.

    Arguments and result are like those of `make_evaluators`. Vectors of texts are for the features of one model.
    """
    kinds = [kind for kind in kinds_of_task(program.task.kind) if kind != "zeroshot"]
    evaluations = config.evals.items()
    return {name: _make_evaluator(config, name, program, opened) for name, own in evaluations if own.kind in kinds}


def _make_evaluator(config: ConfigDict, name: str, program: Inference, opened: data.OpenSources) -> Evaluator:
    eval_config = config.evals[name]
    batches = data.EvalBatches(config, name, program.batch_sharding, opened)
    check_labels(config, name, program, batches.source)
    several = batches.source.max_labels or eval_config.get("labels")
    if several and config.checkpoint.best_metric == f"{name}/class_accuracy":
        raise UserError(
            f"checkpoint.best_metric={name}/class_accuracy needs images with one label each; choose {name}/accuracy."
        )
    learns = "train_split" in eval_config
    train_batches = data.EvalBatches(config, name, program.batch_sharding, opened, part=1) if learns else None
    evaluation = Evaluation(name, eval_config, program, batches, train_batches)
    method = METHODS[eval_config.kind]
    method.check(evaluation)

    def evaluate(params: ArrayTree, tick: Tick, cache: OutputCache) -> dict[str, float]:
        metrics = method.measure(evaluation, params, tick, cache)
        return {f"{name}/{metric}": value for metric, value in metrics.items()}

    return evaluate


def check_labels(config: ConfigDict, name: str, program: Inference, source: Source) -> None:
    """Checks that an evaluation can use the labels of its data and the head of the model.

    Raises:
        UserError: the labels are not the classes of the model's head, the head is for another task than the evaluation,
            or images have several labels and the evaluation needs one.
    """
    eval_config, classes = config.evals[name], program.task.num_classes
    where, wanted = eval_config.source or config.data.source, EVAL_KINDS[eval_config.kind].task
    if not wanted:
        if source.max_labels or source.has_numbers:
            has = "numbers" if source.has_numbers else "several"
            raise UserError(f"evals.{name} needs data with one label an image, but {where} has {has}.")
        return
    if wanted != program.task.kind:
        raise UserError(
            f"evals.{name} has the kind {eval_config.kind}, which evaluates a head for the task {wanted}, but the "
            f"model's head is for {program.task.kind}; choose from the kinds "
            f"{', '.join(kinds_of_task(program.task.kind))}."
        )
    if wanted == "classify" and source.has_numbers:
        raise UserError(f"evals.{name} needs data with labels, but {where} has numbers; leave out ,targets= there.")
    if classes is None:
        return
    in_order = has_classes_of_head(eval_config)
    if wanted == "regress":
        theirs, names = source.class_names or (), program.model.class_names
        if len(theirs) != classes or (names and names != theirs):
            ours = ", ".join(names) if names else f"{classes:,} numbers"
            raise UserError(
                f"evals.{name} evaluates a head that predicts {ours}, but {where} has {', '.join(theirs) or 'none'}; "
                "name the same columns in ,targets= in the same order."
            )
        return
    if (in_order or eval_config.class_map == "order") and source.num_classes != classes:
        raise UserError(
            f"evals.{name} evaluates the model's head, which has {classes:,} classes, but {where} has "
            f"{source.num_classes:,}; evaluate the features (fewshot or knn), or only the classes that have the same "
            "names (predictions:class_map=names)."
        )
    if in_order:
        check_names(program.model, source, f"evals.{name}", where)


def read_features(folders: Sequence[str], config: ConfigDict, program: Inference, weights: str) -> OutputCache:
    """Returns a cache with the features of all images of the evaluations of features, read from folders.

    Args:
        folders: folders of `vit_jax.embed`.
        config: the configuration with the evaluations.
        program: the functions of the model.
        weights: a digest of the weights.

    Raises:
        UserError: no evaluation is one of features, no folder has all images of one, or see `stored_features`.
    """
    wanted = dict[str, data.EvalBatches]()
    for name, own in config.evals.items():
        if METHODS[own.kind].step(program) is program.features:
            for part, field in enumerate(("split", "train_split") if "train_split" in own else ("split",)):
                batches = data.EvalBatches(config, name, program.batch_sharding, {}, part)
                wanted[f"{own[field]} of {own.source or config.data.source}"] = batches
    if not wanted:
        raise UserError("no evaluation is one of features; leave out --features, or ask for knn, fewshot or a probe.")
    found = {name: arrays for one in folders for name, arrays in stored_features(one, weights, wanted).items()}
    if absent := [name for name in wanted if name not in found]:
        raise UserError(
            f"{', '.join(folders)} does not contain the images {absent[0]}, preprocessed as "
            f"{wanted[absent[0]].preprocess.text}; write them with python -m vit_jax.embed, and give each folder as "
            "--features."
        )
    return {output_key("features", wanted[name]): arrays for name, arrays in found.items()}


def due_evaluators(
    config: ConfigDict, evaluators: Mapping[str, Evaluator], step: int, last: int
) -> dict[str, Evaluator]:
    """Returns name -> evaluator for the evaluations that are due after a step.

    An evaluation is due after each multiple of its `every` (of `config.eval_every` if that is unset), and after the
    `last` step of the run.
    """
    steps = {name: config.evals[name].every or config.eval_every for name in evaluators}
    return {name: evaluator for name, evaluator in evaluators.items() if step == last or step % steps[name] == 0}


def check_fits(
    config: ConfigDict, program: Inference, batch: Mapping[str, jax.ShapeDtypeStruct], params: ArrayTree
) -> None:
    """Compiles the steps of the evaluations and runs each once, on zeros, while the training state is on the devices.

    A batch that does not fit is thus found before training. Later evaluations reuse the compiled steps.

    Args:
        config: the configuration of the run.
        program: the functions of the model.
        batch: the shapes and dtypes of an evaluation batch.
        params: the parameters, on the devices.

    Raises:
        UserError: the devices have too little memory.
    """
    sharding, rows = program.batch_sharding, batch["image"].shape[0]
    steps = [METHODS[eval_config.kind].step(program) for eval_config in config.evals.values()]
    try:
        zeros = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), dict(batch)), out_shardings=sharding
        )
        for step in dict.fromkeys(steps):
            jax.block_until_ready(step(params, zeros()))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        parts = rows // sharding.shard_shape((rows,))[0]
        multiple = f" and a multiple of {parts}" if parts > 1 else ""
        raise UserError(
            f"an evaluation step of {rows:,} images does not fit into the devices' memory ({reason(error)}); set "
            f"--config.batch_eval to less than {rows}{multiple}."
        ) from error


def run_evaluators(
    evaluators: Mapping[str, Evaluator], params: ArrayTree, tick: Tick = lambda: None, cache: OutputCache | None = None
) -> dict[str, float]:
    """Returns the metrics of all evaluations together.

    Args:
        evaluators: name of an evaluation -> its evaluator; see `make_evaluators`.
        params: the parameters to evaluate.
        tick: called for each batch.
        cache: features and logits of the model with these parameters. By default an empty cache, which the evaluations
            share and which is dropped at the end.
    """
    cache = {} if cache is None else cache
    return {key: value for evaluate in evaluators.values() for key, value in evaluate(params, tick, cache).items()}


def check_finite(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the metrics of evaluations, unless they are of a model that fails, as its accuracies do not show it.

    Raises:
        UserError: an output for an image was not finite.
    """
    for key, bad in metrics.items():
        name, _, metric = key.rpartition("/")
        if metric == "nonfinite":
            refuse_nonfinite(f"evals.{name}: the logits", int(bad), int(metrics[f"{name}/n"]))
    return metrics
