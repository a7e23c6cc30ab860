"""The functions that use a model's weights without changing them, on the devices of a mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax import sharding, tasks
from vit_jax.kernels import choose_options
from vit_jax.model import Model
from vit_jax.tasks import Batch
from vit_jax.tree import ArrayTree


@dataclasses.dataclass(frozen=True)
class Inference:
    """The jitted functions of a model, and the shapes and shardings of its parameters. Nothing is allocated yet.

    A batch of an evaluation has `image`, `label` and `mask`.

    Attributes:
        mesh: the devices.
        model: the network, with the variants chosen for the mesh's platform.
        task: the objective.
        params: shapes of the parameters.
        params_shardings: shardings of the parameters.
        batch_sharding: the sharding of arrays with a leading batch dimension.
        predict: (params, images) -> logits.
        eval_step: (params, batch of an evaluation) -> sums over its rows; see `sums_of_outputs`.
        features: (params, batch of an evaluation) -> (`pre_logits`, float32 [batch, width], labels), whole on every
            host.
        logits: (params, batch of an evaluation) -> (logits, float32 [batch, classes], labels), whole on every host.
        compiler_options: the options under which all functions are compiled.
    """

    mesh: Mesh
    model: Model
    task: tasks.Task
    params: ArrayTree
    params_shardings: ArrayTree
    batch_sharding: NamedSharding
    predict: Callable[[ArrayTree, jax.Array], jax.Array]
    eval_step: Callable[[ArrayTree, Batch], Batch]
    features: Callable[[ArrayTree, Batch], tuple[jax.Array, jax.Array]]
    logits: Callable[[ArrayTree, Batch], tuple[jax.Array, jax.Array]]
    compiler_options: dict[str, str | bool]


def make_inference(
    model: Model, mesh: Mesh, params: ArrayTree, task: tasks.Task | None = None, compiler_options: str = ""
) -> Inference:
    """Returns the functions of a model whose parameters have the shapes of `params`.

    If `task` is None, it is the task that the model has learnt (`tasks.task_of_model`).

    Raises:
        UserError: the model cannot be split over the mesh, or the compiler rejects an option.
    """
    task = task or tasks.task_of_model(model)
    sharding.check_divides(mesh, model.spec.split_sizes)
    params_shardings, batch_sharding = sharding.state_shardings(params, mesh), sharding.batch_sharding(mesh)

    def predict(params: ArrayTree, images: jax.Array, **inputs: jax.Array) -> jax.Array:
        with sharding.use_mesh(mesh):
            return model.apply(params, images, **inputs)[0]

    def eval_step(params: ArrayTree, batch: Batch) -> Batch:
        inputs, targets = task.test_examples(batch)
        return sums_of_outputs(task, predict(params, **inputs), targets, batch["mask"])

    def features(params: ArrayTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        with sharding.use_mesh(mesh):
            return model.apply(params, batch["image"])[1]["pre_logits"].astype(jnp.float32), batch["label"]

    def logits(params: ArrayTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return predict(params, batch["image"]), batch["label"]

    options = choose_options(compiler_options, mesh)
    jit = functools.partial(jax.jit, in_shardings=(params_shardings, batch_sharding), compiler_options=options)
    replicated = NamedSharding(mesh, P())
    return Inference(
        mesh=mesh,
        model=model,
        task=task,
        params=params,
        params_shardings=params_shardings,
        batch_sharding=batch_sharding,
        predict=jit(predict, out_shardings=batch_sharding),
        eval_step=jit(eval_step, out_shardings=replicated),
        features=jit(features, out_shardings=replicated),
        logits=jit(logits, out_shardings=replicated),
        compiler_options=options,
    )


def sums_of_outputs(task: tasks.Task, outputs: jax.Array, targets: Any, mask: jax.Array) -> Batch:
    """Returns the sums of `task.metric_sums`, and `nonfinite`: the number of rows with an output that is not finite."""
    finite = jnp.isfinite(outputs).all(axis=tuple(range(1, outputs.ndim)))
    return task.metric_sums(outputs, targets, mask) | {"nonfinite": (mask * ~finite).sum()}
