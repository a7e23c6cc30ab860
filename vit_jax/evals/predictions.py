"""Scores the head's predictions for all images, on the host: with other labels, other classes, and calibration."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int64
from ml_collections import ConfigDict

from vit_jax import UserError
from vit_jax.data.sources import Source
from vit_jax.evals import scores
from vit_jax.evals.class_maps import model_wnids, read_class_map
from vit_jax.evals.real import read_real_labels, select_labels
from vit_jax.model import Model

MOST_CLASSES = 2000  # a confusion matrix of more classes is not written whole


class Predictions(NamedTuple):
    """Logits and labels in the classes that an evaluation scores: the model's classes, or those of a class map.

    Attributes:
        logits: the logits of the scored classes.
        labels: numbers of scored classes; -1 for images of other classes, and for padding of several labels.
        names: the names of the scored classes.
        members: with a class map and one label per image, for each image all the model's classes that its label covers,
            padded with -1; else None.
    """

    logits: Float[np.ndarray, "n shared"]
    labels: Int[np.ndarray, " n *some"]
    names: Sequence[str]
    members: Int64[np.ndarray, "n most"] | None = None


def score_predictions(
    eval_config: ConfigDict,
    source: Source,
    model: Model,
    logits: Float[np.ndarray, "n classes"],
    labels: Int[np.ndarray, " n *most"],
) -> dict[str, float]:
    """Returns the metrics `accuracy`, `top5`, `calibration_error` and `n`, the number of images with a label.

    Images without a label of a scored class are left out. With one label per image there is `class_accuracy` too, the
    mean of the accuracies of the classes. With a class map and one label per image, `accuracy_all` and `top5_all` are
    the accuracies when the model chooses among all its classes, not only those of the map.

    Args:
        eval_config: the configuration of the evaluation.
        source: the images.
        model: the model that predicts.
        logits: the logits of the model's classes.
        labels: the labels in the source.

    Raises:
        UserError: no image has a label of a scored class, or see `map_predictions`.
    """
    counted = map_predictions(eval_config, source, model, logits, labels)
    present = scores.has_label(counted.labels)
    if not present.any():
        raise UserError("no image has a label that is one of the scored classes; choose another split.")
    hits = scores.top_k_hits(counted.logits, counted.labels, 1)[present]
    confidences = scores.top_confidences(counted.logits[present], model.loss)
    metrics = {
        "accuracy": float(hits.mean()),
        "top5": scores.top_k_accuracy(counted.logits, counted.labels, 5),
        "calibration_error": scores.calibration_error(confidences, hits),
    }
    if counted.labels.ndim == 1:
        metrics["class_accuracy"] = scores.mean_class_accuracy(hits, counted.labels[present])
    if counted.members is not None:
        metrics["accuracy_all"] = scores.top_k_accuracy(logits, counted.members)
        metrics["top5_all"] = scores.top_k_accuracy(logits, counted.members, 5)
    return metrics | {"n": int(present.sum())}


def check_predictions(eval_config: ConfigDict, source: Source, model: Model) -> None:
    """Raises the UserErrors of `map_predictions` that do not depend on the images, before anything is computed."""
    logits: np.ndarray = np.zeros((0, model.field("num_classes")), np.float32)
    map_predictions(eval_config, source, model, logits, np.zeros(0, np.int32))


def count_confusion(counted: Predictions) -> tuple[Int64[np.ndarray, "label prediction"] | None, str]:
    """Returns the confusion matrix and its text as CSV.

    With more than `MOST_CLASSES` classes the matrix is None, and the CSV lists only the cells that are not 0.

    Raises:
        UserError: images have several labels.
    """
    if counted.labels.ndim > 1:
        raise UserError("--save=confusion needs data with one label per image.")
    classes, predicted = counted.logits.shape[1], counted.logits.argmax(axis=1)
    if classes > MOST_CLASSES:
        return None, scores.format_cells(predicted, counted.labels, counted.names)
    matrix = scores.confusion_matrix(predicted, counted.labels, classes)
    return matrix, scores.format_confusion(matrix, counted.names)


def map_predictions(
    eval_config: ConfigDict,
    source: Source,
    model: Model,
    logits: Float[np.ndarray, "n classes"],
    labels: Int[np.ndarray, " n *most"],
) -> Predictions:
    """Returns logits and labels in the classes that an evaluation of the head scores.

    Takes the arguments of `score_predictions`. `logits` and `labels` may be of the first images of the source only.

    Raises:
        UserError: the file of labels or the class map cannot be read, or does not suit the images or the model.
    """
    names = model.class_names or source.class_names or [str(number) for number in range(logits.shape[1])]
    stated, mapped = (eval_config.labels, eval_config.class_map) if "labels" in eval_config else (None, None)
    if stated and mapped:
        raise UserError("labels (ReaL) and class_map cannot be combined; leave out one of them.")
    if stated:
        if logits.shape[1] != 1000 or model_wnids(model) is None:
            raise UserError("ReaL's labels are for models with the 1,000 classes of ImageNet; leave out labels.")
        files = [source.example_name(index) for index in range(len(logits))]
        return Predictions(logits, select_labels(read_real_labels(stated), files), names)
    if mapped and mapped != "order":
        class_map = read_class_map(mapped, model, source)
        kinds = [kind for kind in (source.class_ids, source.class_names) if kind]
        labels = class_map.map_labels(labels, *kinds)
        members = class_map.list_members(labels) if labels.ndim == 1 else None
        return Predictions(class_map.map_logits(logits), labels, class_map.names, members)
    return Predictions(logits, labels, names)
