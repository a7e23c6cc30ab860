"""Scores of predicted numbers, in the units of the data, over all images at once: mean absolute error and R²."""

import numpy as np
from jaxtyping import Float, Float64
from ml_collections import ConfigDict

from vit_jax import UserError
from vit_jax.data.sources import Source
from vit_jax.model import Model


def check_regression(eval_config: ConfigDict, source: Source, model: Model) -> None:
    """Raises UserError if the data have no numbers."""
    if not source.has_numbers:
        raise UserError("the data have classes, not numbers; write folder:PATH,table=FILE.csv,targets=COLUMN.")


def score_regression(
    eval_config: ConfigDict,
    source: Source,
    model: Model,
    outputs: Float[np.ndarray, "n targets"],
    labels: Float[np.ndarray, "n targets"],
) -> dict[str, float]:
    """Returns the metrics `mae` and `r2`, means over the numbers, those of each of several, and `n`.

    R² is 1 - (sum of squared errors) / (sum of squared differences from the mean of these images); it is NaN where a
    number is the same for all. Images without numbers are left out.

    Raises:
        UserError: no image has numbers.
    """
    known = np.isfinite(labels).all(axis=1)
    if not known.any():
        raise UserError("no image has numbers; choose another split.")
    truth = labels[known].astype(np.float64)
    errors = undo_scale(model, outputs[known]) - truth
    spread = ((truth - truth.mean(axis=0)) ** 2).sum(axis=0)
    lost = np.divide((errors**2).sum(axis=0), spread, where=spread > 0, out=np.full(len(spread), np.nan))
    of_each = {"mae": np.abs(errors).mean(axis=0), "r2": 1 - lost}
    metrics = {metric: float(values.mean()) for metric, values in of_each.items()}
    names = [name.replace("/", "_") for name in source.class_names or ()]
    if len(names) > 1:
        for metric, values in of_each.items():
            metrics |= {f"{metric}_{name}": value for name, value in zip(names, values.tolist(), strict=True)}
    return metrics | {"n": int(known.sum())}


def undo_scale(model: Model, outputs: Float[np.ndarray, "n targets"]) -> Float64[np.ndarray, "n targets"]:
    """Returns the numbers that outputs stand for, in float64; see `Model.target_scale`."""
    means, deviations = np.array(model.target_scale or [(0.0, 1.0)] * outputs.shape[1]).T
    return outputs.astype(np.float64) * deviations + means
