"""Scores for images with any number of classes: mean average precision, F1 and loss, over all images at once."""

import numpy as np
from jaxtyping import Bool, Float, Float64, Int
from ml_collections import ConfigDict

from vit_jax import UserError
from vit_jax.data.sources import Source
from vit_jax.evals.scores import has_label
from vit_jax.model import Model


def check_multi_label(eval_config: ConfigDict, source: Source, model: Model) -> None:
    """Raises UserError if the head was not trained with a sigmoid for each class."""
    if model.loss != "sigmoid":
        raise UserError(
            f"the kind multi_label needs a head that was trained with the sigmoid loss, not {model.loss}; choose the "
            "kind predictions, or train with --config.task.loss=sigmoid."
        )


def score_multi_label(
    eval_config: ConfigDict,
    source: Source,
    model: Model,
    logits: Float[np.ndarray, "n classes"],
    labels: Int[np.ndarray, " n *most"],
) -> dict[str, float]:
    """Returns the metrics `map`, `f1_micro`, `f1_macro`, `loss` and `n`, the number of images.

    `map` and `f1_macro` are means over the classes that occur. A class is predicted where its probability is above 0.5.
    The loss is the mean over images of the cross-entropy of the sigmoids, summed over classes. An image with several
    labels that has none of the classes counts; one of other data that has no label is left out.

    Raises:
        UserError: no image has a class.
    """
    if labels.ndim == 1:
        present = has_label(labels)
        logits, labels = logits[present], labels[present, None]
    truth = multi_hot(labels, logits.shape[1])
    if not truth.any():
        raise UserError("no image has one of the classes; choose another split.")
    scores: Float64[np.ndarray, "n classes"] = np.nan_to_num(logits.astype(np.float64), nan=-np.inf)
    occur = truth.any(axis=0)
    hits, predicted = (truth & (scores > 0)).sum(axis=0), (scores > 0).sum(axis=0)
    total = predicted + truth.sum(axis=0)
    columns = np.flatnonzero(occur).tolist()
    return {
        "map": float(np.mean([average_precision(scores[:, label], truth[:, label]) for label in columns])),
        "f1_micro": float(2 * hits.sum() / total.sum()),
        "f1_macro": float((2 * hits[occur] / total[occur]).mean()),
        "loss": float((np.logaddexp(0.0, scores) - np.where(truth, scores, 0.0)).sum(axis=1).mean()),
        "n": len(labels),
    }


def multi_hot(labels: Int[np.ndarray, "n most"], num_classes: int) -> Bool[np.ndarray, "n classes"]:
    """Returns which images have which classes; negative labels are padding."""
    truth: np.ndarray = np.zeros((len(labels), num_classes), bool)
    rows, columns = np.nonzero(labels >= 0)
    truth[rows, labels[rows, columns]] = True
    return truth


def average_precision(scores: Float64[np.ndarray, " n"], truth: Bool[np.ndarray, " n"]) -> float:
    """Returns the average precision of a class that occurs: the sum of (R_k - R_(k-1)) P_k over distinct scores.

    P_k and R_k are precision and recall of the images with one of the k highest scores. Nothing is interpolated.
    """
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    last: Bool[np.ndarray, " n"] = np.append(ranked[1:] != ranked[:-1], True)  # of the images with the same score
    found = np.cumsum(truth[order])[last]
    precision, recall = found / (np.flatnonzero(last) + 1), found / found[-1]
    return float((np.diff(recall, prepend=0.0) * precision).sum())
