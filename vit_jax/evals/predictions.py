"""The head's predictions of all images, scored on the host: other labels, other classes, calibration."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from vit_jax import UserError, interop
from vit_jax.evals import scores
from vit_jax.evals.class_maps import read_class_map
from vit_jax.evals.real import read_real_labels, select_labels


def score_predictions(
    eval_config: ConfigDict,
    source: Any,
    logits: Float[np.ndarray, "n classes"],
    labels: Int[np.ndarray, " n *most"],
    loss: str,
) -> dict[str, float]:
    """Returns accuracy, top-5 accuracy, the calibration error, n and, with one label an image, `class_accuracy`.

    Images without labels are left out. `class_accuracy` is the mean of the accuracies of the classes.

    Args:
        eval_config: of the evaluation.
        source: of the images, `data.sources.Source`.
        logits: of the model's classes.
        labels: as the source has them.
        loss: of the training: softmax or sigmoid.

    Raises:
        UserError: see `map_predictions`.
    """
    logits, labels, _ = map_predictions(eval_config, source, logits, labels)
    metrics = {
        "accuracy": scores.top_k_accuracy(logits, labels),
        "top5": scores.top_k_accuracy(logits, labels, 5),
        "calibration_error": scores.calibration_error(scores.class_probabilities(logits, loss), labels),
    }
    if labels.ndim == 1:
        matrix = scores.confusion_matrix(logits.argmax(axis=1), labels, logits.shape[1])
        metrics["class_accuracy"] = float(np.nanmean(scores.class_accuracies(matrix)))
    return metrics | {"n": int((labels.reshape(len(labels), -1) >= 0).any(axis=1).sum())}


def format_predictions(
    eval_config: ConfigDict, source: Any, logits: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, " n *most"]
) -> str:
    """Returns the confusion matrix as CSV, with the accuracy of each class in the last column.

    Raises:
        UserError: images have several labels; or see `map_predictions`.
    """
    if eval_config.kind == "predictions":
        logits, labels, names = map_predictions(eval_config, source, logits, labels)
    else:
        names = source.class_names or [str(number) for number in range(logits.shape[1])]
    if labels.ndim > 1:
        raise UserError("a confusion matrix needs one label an image.")
    return scores.format_confusion(scores.confusion_matrix(logits.argmax(axis=1), labels, logits.shape[1]), names)


def map_predictions(
    eval_config: ConfigDict, source: Any, logits: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, " n *most"]
) -> tuple[Float[np.ndarray, "n shared"], Int[np.ndarray, " n *some"], Sequence[str]]:
    """Returns the logits, the labels and the names of the classes that count; -1 for images of other classes.

    Raises:
        UserError: the labels or the class map cannot be read or do not suit the images or the model.
    """
    names = source.class_names or [str(number) for number in range(logits.shape[1])]
    if eval_config.labels:
        files = [source.example_name(index) for index in range(len(source))]
        labels = select_labels(read_real_labels(eval_config.labels), files)
    if eval_config.class_map:
        class_map = read_class_map(eval_config.class_map, model_wnids(logits.shape[1]))
        logits, names = class_map.map_logits(logits), class_map.names
        labels = class_map.map_labels(labels, source.class_ids or source.class_names or ())
    return logits, labels, names


def model_wnids(num_classes: int) -> tuple[str, ...]:
    """Returns the WordNet ids of a model's classes.

    Raises:
        UserError: they are unknown.
    """
    wnids = interop.class_wnids(num_classes)
    if wnids is None:
        raise UserError(f"a class map needs a model with the 1,000 classes of ImageNet, not {num_classes:,}.")
    return wnids
