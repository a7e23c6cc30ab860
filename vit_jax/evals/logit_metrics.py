"""Scores the head's predictions for all images, on the host: with other labels, other classes, and calibration.

The other labels are ReaL, reassessed labels of ImageNet's validation images (Beyer et al., arXiv 2006.07159): an image
may have several, any of which counts as correct, or none, and is then left out. `class_maps` has the other classes.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int32, Int64
from ml_collections import ConfigDict

from vit_jax import UserError, printable
from vit_jax.data.sources import Source
from vit_jax.evals import scores
from vit_jax.evals.class_maps import model_wnids, read_class_map
from vit_jax.model import Model
from vit_jax.storage import read_json

FILE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")


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
    metrics = score_mapped(counted, model.loss)
    if counted.members is not None:
        metrics["accuracy_all"] = scores.top_k_accuracy(logits, counted.members)
        metrics["top5_all"] = scores.top_k_accuracy(logits, counted.members, 5)
    return metrics


def score_mapped(counted: Predictions, loss: str) -> dict[str, float]:
    """Returns the metrics of `score_predictions`, but for those of a class map; `loss` is the loss of the logits.

    Raises:
        UserError: no image has a label of a scored class.
    """
    present = scores.has_label(counted.labels)
    if not present.any():
        raise UserError("no image has a label that is one of the scored classes; choose another split.")
    hits = scores.top_k_hits(counted.logits, counted.labels, 1)[present]
    confidences = scores.top_confidences(counted.logits[present], loss)
    metrics = {
        "accuracy": float(hits.mean()),
        "top5": scores.top_k_accuracy(counted.logits, counted.labels, 5),
        "calibration_error": scores.calibration_error(confidences, hits),
    }
    if counted.labels.ndim == 1:
        metrics["class_accuracy"] = scores.mean_class_accuracy(hits, counted.labels[present])
    return metrics | {"n": int(present.sum())}


def check_predictions(eval_config: ConfigDict, source: Source, model: Model) -> None:
    """Raises the UserErrors of `map_predictions` that do not depend on the images, before anything is computed."""
    logits: np.ndarray = np.zeros((0, model.field("num_classes")), np.float32)
    map_predictions(eval_config, source, model, logits, np.zeros(0, np.int32))


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


def read_real_labels(path: str | os.PathLike) -> Int32[np.ndarray, "images most"]:
    """Returns the labels of the validation images, in the order of the numbers in their file names, padded with -1.

    Args:
        path: `real.json`, local or remote, as its authors publish it: a list with the list of labels of each image.

    Raises:
        UserError: the file cannot be read, or has another form.
    """
    lists = read_json(str(path))
    valid = isinstance(lists, list) and all(
        isinstance(labels, list) and all(type(label) is int and 0 <= label < 1000 for label in labels)
        for labels in lists
    )
    if not valid or not any(lists):
        raise UserError(f"{path} holds no ReaL labels: a list of lists of classes from 0 to 999 is expected.")
    padded: np.ndarray = np.full((len(lists), max(map(len, lists))), -1, np.int32)
    for row, labels in zip(padded, lists, strict=True):
        row[: len(labels)] = labels
    return padded


def select_labels(
    labels: Int32[np.ndarray, "images most"], files: Sequence[str | os.PathLike]
) -> Int32[np.ndarray, "n most"]:
    """Returns the labels of the images with these file names, padded with -1.

    Args:
        labels: the labels of all images; row 0 is `ILSVRC2012_val_00000001.JPEG`.
        files: names or paths of the images.

    Raises:
        UserError: a file is not named like that, or its number is greater than the number of rows.
    """
    rows = []
    for file in files:
        match = FILE_NAME.fullmatch(Path(file).name)
        if not match or not 1 <= int(match[1]) <= len(labels):
            raise UserError(
                f"{printable(Path(file).name, 100)} is not one of the {len(labels):,} images with ReaL labels; they "
                "are named ILSVRC2012_val_00000001.JPEG and so on."
            )
        rows.append(int(match[1]) - 1)
    return labels[rows]
