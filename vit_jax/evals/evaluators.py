"""Evaluations of a run, one per entry of `config.evals`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from vit_jax import UserError, data
from vit_jax.evals import classify
from vit_jax.program import Program

Evaluator = Callable[[Any, Callable[[], None]], dict[str, float]]


def make(config: ConfigDict, program: Program, opened: Mapping[str, Any] | None = None) -> dict[str, Evaluator]:
    """Returns, by name, functions from weights to metrics `<name>/<metric>`, which call their second argument after
    each batch; `opened` as for `data.eval_batches`.
    """
    step, sharding = program.eval_step, program.batch_sharding
    return {
        name: partial(classify.evaluate, step, data.eval_batches(config, name, sharding, opened), name)
        for name in config.evals
    }


def check_fits(program: Program, weights: Any) -> None:
    """Compiles the evaluation step and runs it once, on zeros: one that is too large is found before training, beside
    the state that training keeps on the devices. What is compiled is what evaluations run.

    Raises:
        UserError: the devices have too little memory for it.
    """
    shapes, sharding = program.eval_batch, program.batch_sharding
    rows = shapes["image"].shape[0]
    try:
        zeros = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=sharding)
        jax.block_until_ready(program.eval_step(weights, zeros()))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        parts = rows // sharding.shard_shape((rows,))[0]
        smaller = f", a multiple of {parts}" if parts > 1 else ""
        raise UserError(
            f"an evaluation step of {rows:,} images does not fit into the devices' memory; "
            f"set --config.batch_eval to less{smaller}: {str(error).splitlines()[0]}"
        ) from error


def run(evaluators: dict[str, Evaluator], weights: Any, tick: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Returns the metrics of all evaluations together; calls `tick` after each batch that was begun."""
    return {key: value for evaluate in evaluators.values() for key, value in evaluate(weights, tick).items()}
