"""Which task a configuration describes, and which one a model has learnt."""

from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError
from vit_jax.tasks.classify import Classify
from vit_jax.tasks.task import Task


def make_task(config: ConfigDict, num_classes: int, max_labels: int | None = None) -> Task:
    """Returns the objective that `config.task` describes.

    Args:
        config: of the run.
        num_classes: of the data.
        max_labels: of an image in multi-label data.

    Raises:
        UserError: softmax is used with a single class, or with several labels an image.
    """
    if max_labels and config.task.loss != "sigmoid":
        raise UserError("data with several labels per image needs --config.task.loss=sigmoid.")
    if config.task.loss == "softmax" and num_classes < 2:
        raise UserError(
            f"the data has {num_classes} class(es), but softmax needs two or more; if the data is a folder, check that "
            "--config.data.source names the folder that contains one folder per class."
        )
    return Classify(
        num_classes=num_classes,
        loss=config.task.loss,
        label_smoothing=config.task.label_smoothing,
        mixup=config.task.mixup,
        mixup_probability=config.task.mixup_probability,
        cutmix=config.task.cutmix,
    )


def task_of_model(model: Any) -> Task:
    """Returns the task of a model whose run is not known: classification by the loss that the model states."""
    return Classify(model.field("num_classes"), model.loss)
