"""Evaluations of a run, one per entry of `config.evals`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ml_collections import ConfigDict

from vit_jax import data
from vit_jax.evals import classify
from vit_jax.program import Program

Evaluator = Callable[[Any, Callable[[], None]], dict[str, float]]


def make(config: ConfigDict, program: Program, opened: Mapping[str, Any] = data.UNOPENED) -> dict[str, Evaluator]:
    """Returns, by name, functions from weights to metrics `<name>/<metric>`, which call their second argument after
    each batch; `opened` as for `data.make_eval`.
    """
    sums = classify.make_sums(program.predict, program.task)
    return {
        name: partial(classify.evaluate, sums, data.make_eval(config, name, program.batch_sharding, opened), name)
        for name in config.evals
    }


def run(evaluators: dict[str, Evaluator], weights: Any, tick: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Returns the metrics of all evaluations together; calls `tick` after each batch that was begun."""
    return {key: value for evaluate in evaluators.values() for key, value in evaluate(weights, tick).items()}
