"""The exact metrics of a task on a split, on any mesh: of classification, top-1 and top-5 accuracy and the loss."""

import collections
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np
from jaxtyping import Float, Int

from vit_jax import UserError
from vit_jax.evals.outputs import fetch_late
from vit_jax.tree import ArrayTree

EvalStep = Callable[[ArrayTree, dict[str, jax.Array]], dict[str, jax.Array]]


def evaluate(
    step: EvalStep, batches: Iterable[dict[str, jax.Array]], name: str, params: ArrayTree, tick: Callable[[], None]
) -> dict[str, float]:
    """Returns `<name>/<metric>` of the task and `<name>/n` over all batches; counts are added exactly, on the host.

    Args:
        step: `Program.eval_step`.
        batches: of the split.
        name: of the evaluation.
        params: the parameters to evaluate.
        tick: called after each batch that is dispatched.

    Raises:
        UserError: no image has a label, or one cannot be read.
    """
    totals = collections.defaultdict[str, float](float)
    for sums in fetch_late(step(params, batch) for batch in batches):
        tick()
        for key, value in sums.items():
            totals[key] += float(value)
    n = totals.pop("n")
    if not n:
        raise UserError(f"none of the images of evals.{name} has a label; choose another split.")
    names = sorted(totals, key=lambda key: key == "loss")  # the loss comes after what is better if larger
    return {f"{name}/{key}": totals[key] / n for key in names} | {f"{name}/n": int(n)}


def split_logits(
    logits: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, " n *most"], rows: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the logits of images that were computed before, in batches of at most `rows`, for `evaluate`."""
    for start in range(0, len(labels), rows):
        part = logits[start : start + rows]
        yield {"logits": part, "label": labels[start : start + rows], "mask": np.ones(len(part), np.float32)}
