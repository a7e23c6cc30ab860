"""Exact top-1 accuracy, top-5 accuracy and loss of a split, on any mesh."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

EvalStep = Callable[[Any, dict[str, jax.Array]], dict[str, jax.Array]]


def evaluate(
    step: EvalStep, batches: Iterable[dict[str, jax.Array]], name: str, params: Any, tick: Callable[[], None]
) -> dict[str, float]:
    """Returns `<name>/{accuracy, top5, loss, n}` over all batches; counts are added exactly, on the host.

    Args:
        step: `Program.eval_step`.
        batches: of the split.
        name: of the evaluation.
        params: the parameters to evaluate.
        tick: called after each batch that is dispatched.
    """
    totals = {"accuracy": 0.0, "top5": 0.0, "loss": 0.0, "n": 0.0}
    pending = None
    for batch in batches:
        done, pending = pending, step(params, batch)
        tick()
        _add(totals, done)
    _add(totals, pending)
    n = totals.pop("n")
    return {f"{name}/{key}": total / n for key, total in totals.items()} | {f"{name}/n": int(n)}


def _add(totals: dict[str, float], sums: dict[str, jax.Array] | None) -> None:
    for key, value in jax.device_get(sums or {}).items():
        totals[key] += float(value)
