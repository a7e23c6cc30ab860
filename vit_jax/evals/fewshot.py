"""Few-shot regression: regularised least squares from frozen features to targets of -1 and 1 (section 4.1).

The paper leaves some details open. They are taken from other code of the authors (big_vision's `fewshot_lsr`): features
are whitened by mean and standard deviation of the few training examples, a constant feature of 100 is appended, and the
predicted class is the one with the largest output.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int
from ml_collections import ConfigDict

from vit_jax.evals.labelled_features import Examples, check_examples, measure_scale, permute_classes

CONSTANT = 100.0  # so large that the bias is hardly regularised
BLOCK = 2**22  # predictions in memory at once


class Regression(NamedTuple):
    """Linear predictions for several strengths of regularisation: `features @ weights[i] + bias[i]`.

    Attributes:
        classes: the label of each column of the predictions.
        weights: one matrix per strength.
        bias: one row per strength.
    """

    classes: Int[np.ndarray, " classes"]
    weights: Float64[np.ndarray, "l2 width classes"]
    bias: Float64[np.ndarray, "l2 classes"]


def fewshot(eval_config: ConfigDict, train: Examples, test: Examples) -> dict[str, float]:
    """Returns the accuracy of few-shot regression for each number of shots: mean and standard deviation over seeds."""
    accuracy = evaluate_fewshot(train, test, eval_config.shots, eval_config.l2, range(eval_config.seeds))
    return summarize_fewshot(accuracy, eval_config.shots, eval_config.l2)


def evaluate_fewshot(
    train: Examples, test: Examples, shots: Sequence[int], l2: Sequence[float], seeds: Sequence[int]
) -> Float64[np.ndarray, "shots l2 seeds"]:
    """Returns the accuracy on all test examples for every number of shots, strength of regularisation and seed.

    The seed decides the order of the examples of each class. `n` shots are the first `n` examples of each class, so
    that the examples of 5 shots contain the example of 1 shot. A class with fewer training examples contributes all of
    them. A class without training examples is never predicted, so that its test examples count as wrong.

    Raises:
        UserError: a split is empty or has features that are not finite.
    """
    check_examples(train, test)
    accuracy = np.empty((len(shots), len(l2), len(seeds)))
    for column, seed in enumerate(seeds):
        by_class = permute_classes(train.labels, seed)
        for row, count in enumerate(shots):
            rows = np.concatenate([of_class[:count] for of_class in by_class])
            regression = fit_regression(Examples(train.features[rows], train.labels[rows]), l2)
            accuracy[row, :, column] = measure_accuracy(regression, test)
    return accuracy


def summarize_fewshot(
    accuracy: Float64[np.ndarray, "shots l2 seeds"], shots: Sequence[int], l2: Sequence[float]
) -> dict[str, float]:
    """Returns the mean accuracy over seeds as `5shot`, and its standard deviation as `5shot_std`.

    The standard deviation is that of a sample (ddof 1) and is left out if there is only one seed. With several
    strengths of regularisation the names are `5shot_l2_1024` and `5shot_l2_1024_std`.
    """
    metrics = {}
    for of_shots, count in zip(accuracy, shots, strict=True):
        for values, strength in zip(of_shots, l2, strict=True):
            name = f"{count}shot" if len(l2) == 1 else f"{count}shot_l2_{strength:g}"
            metrics[name] = float(values.mean())
            if len(values) > 1:
                metrics[f"{name}_std"] = float(values.std(ddof=1))
    return metrics


def fit_regression(examples: Examples, l2: Sequence[float]) -> Regression:
    """Returns the solutions W = (X'X + l2 I)^-1 X'Y for all strengths, from one eigendecomposition in float64.

    X are the whitened features, Y the targets. X'X is decomposed or, with fewer examples than features, XX'. Whitened
    features sum to 0 over the examples, so that X'X has no cross terms with the constant feature. The weight of the
    constant therefore has a closed form, and the decomposition does not lose the digits that the constant's large
    square would cost. Directions without variance get no weight, so that l2 = 0 gives the least squares solution of the
    smallest norm.
    """
    mean, scale = measure_scale(examples.features)
    whitened = (examples.features - mean) / scale
    classes, labels = np.unique(examples.labels, return_inverse=True)
    targets = np.where(labels[:, None] == np.arange(len(classes)), 1.0, -1.0)
    count, width = whitened.shape
    dual = count < width
    values, vectors = np.linalg.eigh(whitened @ whitened.T if dual else whitened.T @ whitened)
    left = whitened.T @ vectors if dual else vectors
    right = vectors.T @ (targets if dual else whitened.T @ targets)
    varies = values > values.max(initial=0) * max(count, width) * np.finfo(np.float64).eps
    weights, bias = [], []
    for strength in l2:
        inverse = np.divide(1, values + strength, where=varies, out=np.zeros_like(values))
        weights.append(((left * inverse) @ right) / scale[:, None])
        shrinkage = count * CONSTANT**2 / (count * CONSTANT**2 + strength)
        bias.append(targets.mean(axis=0) * shrinkage - mean @ weights[-1])
    return Regression(classes, np.stack(weights), np.stack(bias))


def measure_accuracy(regression: Regression, test: Examples) -> Float64[np.ndarray, " l2"]:
    """Returns the accuracy of each strength. If several classes have the largest output, the first is predicted."""
    strengths, width, classes = regression.weights.shape
    weights = regression.weights.transpose(1, 0, 2).reshape(width, -1)
    rows = max(1, BLOCK // weights.shape[1])
    correct = np.zeros(strengths, np.int64)
    for start in range(0, len(test.labels), rows):
        features = test.features[start : start + rows]
        predictions = (features.astype(np.float64) @ weights).reshape(-1, strengths, classes) + regression.bias
        best = regression.classes[predictions.argmax(axis=-1)]
        correct += (best == test.labels[start : start + rows, None]).sum(axis=0)
    return correct / len(test.labels)
