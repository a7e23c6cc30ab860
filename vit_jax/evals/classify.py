"""Exact top-1 accuracy, top-5 accuracy and loss of a split, on any mesh."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from vit_jax import UserError

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

    Raises:
        UserError: no image has a label, or one cannot be read.
    """
    totals = {"accuracy": 0.0, "top5": 0.0, "loss": 0.0, "n": 0.0}
    pending = None
    for batch in batches:
        done, pending = pending, step(params, batch)
        tick()
        _add(totals, done)
    _add(totals, pending)
    n = totals.pop("n")
    if not n:
        raise UserError(f"none of the images of evals.{name} has a label; choose another split.")
    return {f"{name}/{key}": total / n for key, total in totals.items()} | {f"{name}/n": int(n)}


def _add(totals: dict[str, float], sums: dict[str, jax.Array] | None) -> None:
    for key, value in jax.device_get(sums or {}).items():
        totals[key] += float(value)


def split_logits(
    logits: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, " n *most"], rows: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the logits of images that were computed before, in batches of at most `rows`, for `evaluate`."""
    for start in range(0, len(labels), rows):
        part = logits[start : start + rows]
        yield {"logits": part, "label": labels[start : start + rows], "mask": np.ones(len(part), np.float32)}
