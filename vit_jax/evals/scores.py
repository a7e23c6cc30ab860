"""Scores of a classification from its logits and labels, in NumPy: top-k, per class, calibration.

Labels are [n], or [n, most] where an image has several, any of which counts; negative ones pad. An image whose labels
are all negative has none, and is in no score.
"""

import csv
import io
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Int64


def top_k_hits(
    logits: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, " n *most"], k: int
) -> Bool[np.ndarray, " n"]:
    """Returns which images have one of their labels among the k greatest logits.

    Of equal logits the first are the greater. An image with a logit that is no number is wrong.
    """
    labels = labels.reshape(len(labels), -1)
    classes = np.arange(logits.shape[1])
    hits: np.ndarray = np.zeros(len(logits), bool)
    for label in labels.T:
        own = logits[np.arange(len(logits)), label][:, None]
        before = (logits > own) | ((logits == own) & (classes < label[:, None]))
        hits |= (label >= 0) & (before.sum(axis=1) < k)
    return hits & ~np.isnan(logits).any(axis=1)


def top_k_accuracy(logits: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, " n *most"], k: int = 1) -> float:
    """Returns the fraction of the images with labels that `top_k_hits` finds; nan without any."""
    labelled = _labelled(labels)
    return float(top_k_hits(logits, labels, k)[labelled].mean()) if labelled.any() else float("nan")


def confusion_matrix(
    predicted: Int[np.ndarray, " n"], labels: Int[np.ndarray, " n"], num_classes: int
) -> Int64[np.ndarray, "label prediction"]:
    """Returns the number of images of each class (row) that are taken for each class (column)."""
    known = labels >= 0
    pairs = labels[known].astype(np.int64) * num_classes + predicted[known]
    return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def class_accuracies(matrix: Int64[np.ndarray, "label prediction"]) -> Float64[np.ndarray, " label"]:
    """Returns the accuracy on the images of each class, from a confusion matrix; nan for a class without images."""
    counts = matrix.sum(axis=1)
    return np.divide(np.diag(matrix), counts, where=counts > 0, out=np.full(len(matrix), np.nan))


def format_confusion(matrix: Int64[np.ndarray, "label prediction"], names: Sequence[str]) -> str:
    """Returns a confusion matrix as CSV: a line of names, then for each class its name, its row and its accuracy."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["label \\ prediction", *names, "accuracy"])
    rows = zip(names, matrix.tolist(), class_accuracies(matrix).tolist(), strict=True)
    writer.writerows([name, *row, f"{accuracy:.6g}"] for name, row, accuracy in rows)
    return text.getvalue()


def class_probabilities(logits: Float[np.ndarray, "n classes"], loss: str) -> Float64[np.ndarray, "n classes"]:
    """Returns the softmax or the sigmoid of logits in float64, depending on the loss of the training."""
    logits = logits.astype(np.float64)
    if loss == "sigmoid":
        return 0.5 * (1 + np.tanh(logits / 2))  # exp would overflow
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def calibration_error(
    probabilities: Float64[np.ndarray, "n classes"], labels: Int[np.ndarray, " n *most"], bins: int = 15
) -> float:
    """Returns the expected calibration error of the most probable class (Guo et al., arXiv 1706.04599, equation 3).

    Confidences in (i / bins, (i + 1) / bins] are one bin, 0 is in the first. The error is the mean over images of the
    distance between accuracy and mean confidence in their bin; nan without labelled images.
    """
    labelled = _labelled(labels)
    if not labelled.any():
        return float("nan")
    confidences = probabilities[labelled].max(axis=1)
    hits = top_k_hits(probabilities[labelled], labels[labelled], 1)
    edges = np.arange(1, bins) / bins
    rows = np.searchsorted(edges, confidences)  # the first edge that is not smaller
    excess = np.bincount(rows, weights=hits - confidences, minlength=bins)
    return float(np.abs(excess).sum() / len(hits))


def _labelled(labels: Int[np.ndarray, " n *most"]) -> Bool[np.ndarray, " n"]:
    return (labels.reshape(len(labels), -1) >= 0).any(axis=1)
