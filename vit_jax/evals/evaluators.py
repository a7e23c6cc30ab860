"""The evaluators of a run: how they are built, checked and run."""

import logging
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from vit_jax import UserError, data, errors_of, reason
from vit_jax.config import EVAL_KINDS, has_classes_of_head, kinds_of_task
from vit_jax.data.sources import Source, have_same_classes
from vit_jax.evals import task_metrics
from vit_jax.evals.class_maps import check_names
from vit_jax.evals.frozen import evaluate_frozen
from vit_jax.evals.outputs import OutputCache, Tick, compute_outputs, count_nonfinite, output_key, refuse_nonfinite
from vit_jax.evals.predictions import check_predictions, score_predictions
from vit_jax.evals.probe import check_memory
from vit_jax.inference import Inference, sums_of_outputs
from vit_jax.tasks import Batch
from vit_jax.tree import ArrayTree

Evaluator: TypeAlias = Callable[[ArrayTree, Tick, OutputCache], dict[str, float]]


def make_evaluators(
    config: ConfigDict, program: Inference, opened: data.OpenSources | None = None
) -> dict[str, Evaluator]:
    """Returns name of an evaluation -> its evaluator, for all of `config.evals`.

    An evaluator is a function (params, tick, cache) -> {`<name>/<metric>`: value}. It calls `tick()` for each batch. It
    stores features and logits of the model in `cache` and takes them from there if they are present.

    Args:
        config: the configuration of the run.
        program: the functions of the model.
        opened: the sources that are open already, as in `data.eval_batches`.
    """
    return {name: make_evaluator(config, name, program, opened or {}) for name in config.evals}


def make_head_evaluators(config: ConfigDict, program: Inference, opened: data.OpenSources) -> dict[str, Evaluator]:
    """Returns the evaluators that suit the task of `program`: those of its head, and those of frozen features.

    Arguments and result are like those of `make_evaluators`.
    """
    kinds, evaluations = kinds_of_task(program.task.kind), config.evals.items()
    return {name: make_evaluator(config, name, program, opened) for name, own in evaluations if own.kind in kinds}


def make_evaluator(config: ConfigDict, name: str, program: Inference, opened: data.OpenSources) -> Evaluator:
    """Returns the evaluator of the evaluation `config.evals[name]`; see `make_evaluators`.

    Raises:
        UserError: the data cannot be opened or does not suit the evaluation, or a probe does not fit into memory.
    """
    batches = data.eval_batches(config, name, program.batch_sharding, opened)
    check_labels(config, name, program, batches.source)
    eval_config = config.evals[name]
    if eval_config.kind == "predictions":
        return lambda params, tick, cache: evaluate_predictions(config, name, program, batches, params, tick, cache)
    if EVAL_KINDS[eval_config.kind].task:
        return lambda params, tick, cache: evaluate_head(name, program, batches, params, tick, cache)
    train_batches = data.eval_batches(config, name, program.batch_sharding, opened, part=1)
    own, learned = batches.source, train_batches.source
    if own.class_names and learned.class_names and not have_same_classes(own, learned):
        raise UserError(
            f"evals.{name} learns from {eval_config.train_split}, whose classes are other ones than those of "
            f"{eval_config.split}, or have other numbers; choose two splits with the same classes in the same order."
        )
    if batches.source.overlaps(train_batches.source):
        logging.getLogger(__name__).warning(
            "evals.%s learns from images that it is tested on; choose a split and a train_split without overlap",
            name,
        )
    if eval_config.kind in ("probe", "probe_sgd"):
        settings = len(eval_config.l2 if eval_config.kind == "probe" else eval_config.rates)
        source, width = train_batches.source, program.model.spec.feature_width
        with errors_of(f"in evals.{name}"):
            check_memory(len(source), width, source.num_classes, settings, jax.local_devices()[0])

    def evaluate(params: ArrayTree, tick: Tick, cache: OutputCache) -> dict[str, float]:
        parts = [compute_outputs(program, "features", params, one, cache, tick) for one in (train_batches, batches)]
        tick()
        with errors_of(f"in evals.{name}"):
            return evaluate_frozen(config, name, *parts)

    return evaluate


def evaluate_head(
    name: str, program: Inference, batches: data.EvalBatches, params: ArrayTree, tick: Tick, cache: OutputCache
) -> dict[str, float]:
    """Returns `<name>/<metric>` of the head's predictions. Logits in the cache are used; none are added to it."""
    if (known := cache.get(output_key("logits", batches))) is None:
        return task_metrics.evaluate(program.eval_step, batches, name, params, tick)
    sums = jax.jit(lambda params, batch: sums_of_outputs(program.task, batch["logits"], batch["label"], batch["mask"]))
    return task_metrics.evaluate(sums, task_metrics.split_logits(*known, batches.batch), name, params, tick)


def evaluate_predictions(
    config: ConfigDict,
    name: str,
    program: Inference,
    batches: data.EvalBatches,
    params: ArrayTree,
    tick: Tick,
    cache: OutputCache,
) -> dict[str, float]:
    """Returns `<name>/<metric>` of the head's predictions for all images. Every host computes the same metrics.

    Raises:
        UserError: see `predictions.score_predictions`.
    """
    logits, labels = compute_outputs(program, "logits", params, batches, cache, tick)
    with errors_of(f"in evals.{name}"):
        metrics = score_predictions(config.evals[name], batches.source, program.model, logits, labels)
    if bad := count_nonfinite(logits):
        metrics["nonfinite"] = bad
    return {f"{name}/{metric}": value for metric, value in metrics.items()}


def check_labels(config: ConfigDict, name: str, program: Inference, source: Source) -> None:
    """Checks that an evaluation can use the labels of its data and the head of the model.

    Raises:
        UserError: the labels are not the classes of the model's head, the head is for another task than the evaluation,
            or images have several labels and the evaluation needs one.
    """
    eval_config, classes = config.evals[name], program.task.num_classes
    where, wanted = eval_config.source or config.data.source, EVAL_KINDS[eval_config.kind].task
    if not wanted:
        if source.max_labels:
            raise UserError(f"evals.{name} needs data with one label an image, but {where} has several.")
        return
    if wanted != program.task.kind:
        raise UserError(
            f"evals.{name} has the kind {eval_config.kind}, which evaluates a head for the task {wanted}, but the "
            f"model's head is for {program.task.kind}; choose from the kinds "
            f"{', '.join(kinds_of_task(program.task.kind))}."
        )
    if classes is None:
        return
    in_order = has_classes_of_head(eval_config)
    if (in_order or eval_config.class_map == "order") and source.num_classes != classes:
        raise UserError(
            f"evals.{name} evaluates the model's head, which has {classes:,} classes, but {where} has "
            f"{source.num_classes:,}; evaluate the features (fewshot or knn), or only the classes that have the same "
            "names (predictions:class_map=names)."
        )
    if in_order:
        check_names(program.model, source, f"evals.{name}", where)
    with errors_of(f"in evals.{name}"):
        check_predictions(eval_config, source, program.model)


def choose_eval_function(program: Inference, kind: str) -> Callable[[ArrayTree, Batch], ArrayTree]:
    """Returns the jitted function (params, batch) -> outputs that a kind of evaluation calls with each batch."""
    if kind == "predictions":
        return program.logits
    return program.eval_step if EVAL_KINDS[kind].task else program.features


def due_evaluators(config: ConfigDict, evaluators: Mapping[str, Evaluator], step: int) -> dict[str, Evaluator]:
    """Returns name -> evaluator for the evaluations that are due after a step.

    An evaluation is due after each multiple of its `every` (of `config.eval_every` if that is unset), and after the
    last step.
    """
    steps = {name: config.evals[name].every or config.eval_every for name in evaluators}
    ends = step == config.total_steps
    return {name: evaluator for name, evaluator in evaluators.items() if ends or step % steps[name] == 0}


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
    steps = [choose_eval_function(program, eval_config.kind) for eval_config in config.evals.values()]
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
