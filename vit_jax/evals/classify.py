"""Exact top-1, top-5 and loss over a split, on any mesh."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

Sums = Callable[[Any, dict[str, jax.Array]], dict[str, jax.Array]]


def make_sums(predict: Callable[[Any, jax.Array], jax.Array], task: Any) -> Sums:
    """Returns a jitted function from weights and a batch to sums over the rows whose `mask` is 1.

    The loss is the task's against the plain labels: no smoothing, no mixing. Of an image with several labels any
    counts as right.
    """

    plain = dataclasses.replace(task, label_smoothing=0.0)

    @jax.jit
    def sums(weights: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        logits, labels, mask = predict(weights, batch["image"]), batch["label"], batch["mask"]
        _, best = jax.lax.top_k(logits, min(5, task.num_classes))
        hits = best == labels[:, None] if labels.ndim == 1 else (best[..., None] == labels[:, None]).any(axis=-1)
        losses = plain.losses(logits, plain.targets(labels))
        return {
            "n": mask.sum(),
            "accuracy": (hits[:, 0] * mask).sum(),
            "top5": (hits.any(axis=1) * mask).sum(),
            "loss": jnp.where(mask > 0, losses, 0.0).sum(),
        }

    return sums


def evaluate(
    sums: Sums, batches: Iterable[dict[str, jax.Array]], name: str, weights: Any, tick: Callable[[], None]
) -> dict[str, float]:
    """Returns `<name>/{accuracy, top5, loss, n}` over all the batches; counts are added exactly, on the host.

    `tick` is called after each batch that was begun.
    """
    totals = {"accuracy": 0.0, "top5": 0.0, "loss": 0.0, "n": 0.0}
    pending = None
    for batch in batches:
        done, pending = pending, sums(weights, batch)
        tick()
        _add(totals, done)
    _add(totals, pending)
    n = totals.pop("n")
    return {f"{name}/{key}": total / n for key, total in totals.items()} | {f"{name}/n": int(n)}


def _add(totals: dict[str, float], sums: dict[str, jax.Array] | None) -> None:
    for key, value in jax.device_get(sums or {}).items():
        totals[key] += float(value)
