"""The evaluators of a run: how they are built, checked and run."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from vit_jax import UserError, data, reason
from vit_jax.evals import classify
from vit_jax.program import Program

Evaluator = Callable[[Any, Callable[[], None]], dict[str, float]]


def make_evaluators(
    config: ConfigDict, program: Program, opened: Mapping[str, Any] | None = None
) -> dict[str, Evaluator]:
    """Returns, by name, functions from parameters to metrics `<name>/<metric>`.

    They call their second argument after each batch; `opened` is as for `data.eval_batches`.
    """
    step, sharding = program.eval_step, program.batch_sharding
    return {
        name: partial(classify.evaluate, step, data.eval_batches(config, name, sharding, opened), name)
        for name in config.evals
    }


def check_fits(program: Program, params: Any) -> None:
    """Compiles the evaluation step and runs it once, on zeros, while the training state is on the devices.

    A batch that is too large is so found before training. Evaluations run the same compiled step.

    Raises:
        UserError: the devices have too little memory.
    """
    shapes, sharding = program.eval_batch, program.batch_sharding
    rows = shapes["image"].shape[0]
    try:
        zeros = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=sharding)
        jax.block_until_ready(program.eval_step(params, zeros()))
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
    evaluators: dict[str, Evaluator], params: Any, tick: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Returns the metrics of all evaluations together; calls `tick` after each batch that is dispatched."""
    return {key: value for evaluate in evaluators.values() for key, value in evaluate(params, tick).items()}
