"""Confident learning (Northcutt et al., arXiv 1911.00068): which labels a model doubts, from probabilities for images
that it was not trained on.

The model is confident that an image is of class j if it gives j a probability of at least t_j, its mean probability for
j over the images that are labelled j (equation 2). The confident joint counts the images with label i that are
confidently of class j (equation 1). The images off its diagonal are candidates for a wrong label, as the paper's method
"C": other methods of the paper prune as many images of each pair of classes as the joint says.
"""

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Int64

SLACK = 1e-6  # a probability that equals the mean but for rounding reaches it


def class_thresholds(
    labels: Int[np.ndarray, " n"], probabilities: Float[np.ndarray, "n classes"]
) -> Float64[np.ndarray, " classes"]:
    """Returns t_j, the mean probability of each class over the images with its label; infinite without such images."""
    classes = probabilities.shape[1]
    counts = np.bincount(labels, minlength=classes)
    sums = np.bincount(labels, weights=label_probabilities(labels, probabilities), minlength=classes)
    return np.divide(sums, counts, where=counts > 0, out=np.full(classes, np.inf))


def label_probabilities(
    labels: Int[np.ndarray, " n"], probabilities: Float[np.ndarray, "n classes"]
) -> Float[np.ndarray, " n"]:
    """Returns the probability of each image's label, its self-confidence."""
    return probabilities[np.arange(len(labels)), labels]


def confident_classes(
    labels: Int[np.ndarray, " n"], probabilities: Float[np.ndarray, "n classes"]
) -> Int64[np.ndarray, " n"]:
    """Returns the class that the model is confident in for each image, -1 if there is none.

    Where it is confident in several, that is its most probable class.
    """
    confident = probabilities >= class_thresholds(labels, probabilities) - SLACK
    several, most = confident.sum(axis=1), probabilities.argmax(axis=1)
    return np.where(several > 1, most, np.where(several == 1, confident.argmax(axis=1), -1))


def confident_joint(
    labels: Int[np.ndarray, " n"], probabilities: Float[np.ndarray, "n classes"]
) -> Int64[np.ndarray, "label class"]:
    """Returns the number of images with each label that are confidently of each class.

    Args:
        labels: the label of each image.
        probabilities: of each class, by a model that was not trained on the image.
    """
    classes, found = probabilities.shape[1], confident_classes(labels, probabilities)
    pairs = labels[found >= 0].astype(np.int64) * classes + found[found >= 0]
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def is_doubted(labels: Int[np.ndarray, " n"], probabilities: Float[np.ndarray, "n classes"]) -> Bool[np.ndarray, " n"]:
    """Returns which images are confidently of another class than their label, and predicted to be of another.

    Takes what `confident_joint` takes.
    """
    found = confident_classes(labels, probabilities)
    return (found >= 0) & (found != labels) & (probabilities.argmax(axis=1) != labels)


def rank_doubted(
    labels: Int[np.ndarray, " n"], probabilities: Float[np.ndarray, "n classes"]
) -> Int64[np.ndarray, " k"]:
    """Returns the images whose label is doubted, those with the least probable label first.

    Takes what `confident_joint` takes.
    """
    doubted = np.flatnonzero(is_doubted(labels, probabilities))
    return doubted[np.argsort(label_probabilities(labels, probabilities)[doubted], kind="stable")]
