"""The head's predictions of all images, scored on the host: other labels, other classes, calibration."""

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
from vit_jax.models import Model

MOST_CLASSES = 2000  # of a confusion matrix that is written whole


class Predictions(NamedTuple):
    """What is scored.

    Attributes:
        logits: of the classes that count.
        labels: -1 for images of other classes, and for what pads.
        names: of the classes that count.
        members: with a class map, all labels of each image among the model's own classes; else None.
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
    """Returns accuracy, top-5 accuracy, the calibration error, n and, with one label an image, `class_accuracy`.

    Images without labels are left out. `class_accuracy` is the mean of the accuracies of the classes. With a class map,
    `accuracy_all` and `top5_all` are those of predictions among all classes of the model.

    Args:
        eval_config: of the evaluation.
        source: of the images.
        model: that predicts.
        logits: of the model's classes.
        labels: as the source has them.

    Raises:
        UserError: no image has a label of a class that counts; or see `map_predictions`.
    """
    counted = map_predictions(eval_config, source, model, logits, labels)
    present = scores.has_label(counted.labels)
    if not present.any():
        raise UserError("none of the images has a label of a class that counts; choose another split.")
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
    """Raises UserError, before anything is computed, if `map_predictions` would."""
    logits: np.ndarray = np.zeros((0, model.field("num_classes")), np.float32)
    map_predictions(eval_config, source, model, logits, np.zeros(0, np.int32))


def count_confusion(counted: Predictions) -> tuple[Int64[np.ndarray, "label prediction"] | None, str]:
    """Returns the confusion matrix, and the same as CSV; of many classes only the cells that are not 0, as CSV.

    Raises:
        UserError: images have several labels.
    """
    if counted.labels.ndim > 1:
        raise UserError("a confusion matrix needs one label an image.")
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
    """Returns the logits, labels and classes that count in an evaluation of the head, of the first images of a source.

    The arguments are those of `score_predictions`.

    Raises:
        UserError: the labels or the class map cannot be read or do not suit the images or the model.
    """
    names = model.class_names or source.class_names or [str(number) for number in range(logits.shape[1])]
    stated, mapped = (eval_config.labels, eval_config.class_map) if "labels" in eval_config else (None, None)
    if stated and mapped:
        raise UserError("ReaL's labels are of ImageNet's classes; leave out class_map, or labels.")
    if stated:
        if logits.shape[1] != 1000 or model_wnids(model) is None:
            raise UserError("ReaL's labels are for models with the 1,000 classes of ImageNet.")
        files = [source.example_name(index) for index in range(len(logits))]
        return Predictions(logits, select_labels(read_real_labels(stated), files), names)
    if mapped and mapped != "order":
        class_map = read_class_map(mapped, model, source)
        kinds = [kind for kind in (source.class_ids, source.class_names) if kind]
        labels = class_map.map_labels(labels, *kinds)
        members = class_map.list_members(labels) if labels.ndim == 1 else None
        return Predictions(class_map.map_logits(logits), labels, class_map.names, members)
    return Predictions(logits, labels, names)
