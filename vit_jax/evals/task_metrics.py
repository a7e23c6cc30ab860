"""The exact metrics of a task on a split, on any mesh. For classification: top-1 and top-5 accuracy and the loss."""

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
    """Returns `<name>/<metric>` for each metric of the task, averaged over all images, and their number `<name>/n`.

    If outputs of the model are not finite, `<name>/nonfinite` is the number of images with such outputs. The sums over
    each batch are added on the host, in float64. Images without a label are not counted.

    Args:
        step: `Program.eval_step`, or a function that returns the same sums.
        batches: the batches of the split.
        name: the name of the evaluation.
        params: the parameters to evaluate.
        tick: called once for each batch, after its result has arrived on the host.

    Raises:
        UserError: no image has a label, or an image cannot be read.
    """
    totals = collections.defaultdict[str, float](float)
    for sums in fetch_late(step(params, batch) for batch in batches):
        tick()
        for key, value in sums.items():
            totals[key] += float(value)
    n, bad = totals.pop("n"), int(totals.pop("nonfinite"))
    if not n:
        raise UserError(f"none of the images of evals.{name} has a label; choose another split.")
    names = sorted(totals, key=lambda key: key == "loss")  # the loss comes after the metrics where larger is better
    means = {f"{name}/{key}": totals[key] / n for key in names}
    return means | ({f"{name}/nonfinite": bad} if bad else {}) | {f"{name}/n": int(n)}


def split_logits(
    logits: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, " n *most"], rows: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields stored logits and their labels in batches of at most `rows` images, which `evaluate` accepts."""
    for start in range(0, len(labels), rows):
        part = logits[start : start + rows]
        yield {"logits": part, "label": labels[start : start + rows], "mask": np.ones(len(part), np.float32)}
