"""Exact top-1, top-5 and loss over a split, on any mesh."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

Step = Callable[[Any, dict[str, jax.Array]], dict[str, jax.Array]]


def evaluate(
    step: Step, batches: Iterable[dict[str, jax.Array]], name: str, weights: Any, tick: Callable[[], None]
) -> dict[str, float]:
    """Returns `<name>/{accuracy, top5, loss, n}` over all the batches; counts are added exactly, on the host.

    `step` is `Program.eval_step`; `tick` is called after each batch that was begun.
    """
    totals = {"accuracy": 0.0, "top5": 0.0, "loss": 0.0, "n": 0.0}
    pending = None
    for batch in batches:
        done, pending = pending, step(weights, batch)
        tick()
        _add(totals, done)
    _add(totals, pending)
    n = totals.pop("n")
    return {f"{name}/{key}": total / n for key, total in totals.items()} | {f"{name}/n": int(n)}


def _add(totals: dict[str, float], sums: dict[str, jax.Array] | None) -> None:
    for key, value in jax.device_get(sums or {}).items():
        totals[key] += float(value)
