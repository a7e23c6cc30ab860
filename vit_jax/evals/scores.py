"""Scores of a classification from its logits and labels, in NumPy: top-k, per class, calibration.

Labels have the shape [n], or [n, most] if images have several labels. Any label of an image counts as correct. Negative
labels are padding. An image with only negative labels has no label and is left out of all scores.
"""

import csv
import io
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Int64

ROWS = 4096  # images whose probabilities are in memory at once


def top_k_hits(
    logits: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, " n *most"], k: int
) -> Bool[np.ndarray, " n"]:
    """Returns which images have one of their labels among the k greatest logits.

    Among equal logits the class with the smaller number ranks higher. An image with a NaN among its logits is wrong.
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
    """Returns the fraction of `top_k_hits` among the images that have a label; NaN if none has."""
    labelled = has_label(labels)
    return float(top_k_hits(logits, labels, k)[labelled].mean()) if labelled.any() else float("nan")


def confusion_matrix(
    predicted: Int[np.ndarray, " n"], labels: Int[np.ndarray, " n"], num_classes: int
) -> Int64[np.ndarray, "label prediction"]:
    """Returns the number of images for each label (row) and prediction (column), without images that have no label."""
    known = labels >= 0
    pairs = labels[known].astype(np.int64) * num_classes + predicted[known]
    return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def confusion_cells(
    predicted: Int[np.ndarray, " n"], labels: Int[np.ndarray, " n"]
) -> tuple[Int64[np.ndarray, " cells"], Int64[np.ndarray, " cells"], Int64[np.ndarray, " cells"]]:
    """Returns the cells of the confusion matrix that are not 0, ordered by label, then by prediction.

    Returns:
        The label, the prediction and the number of images of each cell.
    """
    known, classes = labels >= 0, int(predicted.max(initial=0)) + 1
    pairs, counts = np.unique(labels[known].astype(np.int64) * classes + predicted[known], return_counts=True)
    return pairs // classes, pairs % classes, counts


def class_accuracies(matrix: Int64[np.ndarray, "label prediction"]) -> Float64[np.ndarray, " label"]:
    """Returns the accuracy on the images of each class, from a confusion matrix; NaN for a class without images."""
    counts = matrix.sum(axis=1)
    return np.divide(np.diag(matrix), counts, where=counts > 0, out=np.full(len(matrix), np.nan))


def mean_class_accuracy(hits: Bool[np.ndarray, " n"], labels: Int[np.ndarray, " n"]) -> float:
    """Returns the mean, over the classes that occur, of the accuracy on the images of a class.

    All images must have a label.
    """
    counts, right = np.bincount(labels), np.bincount(labels, weights=hits)
    return float((right[counts > 0] / counts[counts > 0]).mean())


def format_confusion(matrix: Int64[np.ndarray, "label prediction"], names: Sequence[str]) -> str:
    """Returns a confusion matrix as CSV: a line of class names, then a line for each label.

    The line of a label has its name, its row of the matrix and the accuracy on its images.
    """
    rows = zip(names, matrix.tolist(), class_accuracies(matrix).tolist(), strict=True)
    lines = [[name, *row, f"{accuracy:.6g}"] for name, row, accuracy in rows]
    return _format_csv([["label \\ prediction", *names, "accuracy"], *lines])


def format_cells(predicted: Int[np.ndarray, " n"], labels: Int[np.ndarray, " n"], names: Sequence[str]) -> str:
    """Returns the cells of a confusion matrix that are not 0 as CSV: a line of headings, then one line per cell."""
    cells = zip(*(part.tolist() for part in confusion_cells(predicted, labels)), strict=True)
    lines = [[names[label], names[prediction], images] for label, prediction, images in cells]
    return _format_csv([["label", "prediction", "images"], *lines])


def _format_csv(rows: list[list]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def top_confidences(logits: Float[np.ndarray, "n classes"], loss: str) -> Float64[np.ndarray, " n"]:
    """Returns the largest probability of each image, in float64.

    Args:
        logits: the logits.
        loss: the loss of the training: "sigmoid", or anything else for softmax.
    """
    largest = logits.max(axis=1).astype(np.float64)
    if loss == "sigmoid":
        return 0.5 * (1 + np.tanh(largest / 2))  # exp would overflow
    confidences: np.ndarray = np.empty(len(logits))
    for start in range(0, len(logits), ROWS):
        block = slice(start, start + ROWS)
        confidences[block] = 1 / np.exp(logits[block].astype(np.float64) - largest[block, None]).sum(axis=1)
    return confidences


def calibration_error(confidences: Float64[np.ndarray, " n"], hits: Bool[np.ndarray, " n"], bins: int = 15) -> float:
    """Returns the expected calibration error of the most probable class (Guo et al., arXiv 1706.04599, equation 3).

    Bin i has the confidences in (i / bins, (i + 1) / bins]; a confidence of 0 is in the first bin. The error is the
    mean over bins, weighted by their numbers of images, of |accuracy - mean confidence|. It is NaN without images.
    """
    if not len(hits):
        return float("nan")
    edges = np.arange(1, bins) / bins
    rows = np.searchsorted(edges, confidences)  # the first edge that is not smaller
    excess = np.bincount(rows, weights=hits - confidences, minlength=bins)
    return float(np.abs(excess).sum() / len(hits))


def has_label(labels: Int[np.ndarray, " n *most"]) -> Bool[np.ndarray, " n"]:
    """Returns which images have a label."""
    return (labels.reshape(len(labels), -1) >= 0).any(axis=1)
