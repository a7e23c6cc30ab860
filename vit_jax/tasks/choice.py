"""Which task a configuration describes, and which one a model has learnt."""

import re

from ml_collections import ConfigDict

from vit_jax import UserError, refuse
from vit_jax.config import REGRESSION_LOSSES
from vit_jax.data import ClassFacts
from vit_jax.model import Model
from vit_jax.tasks.class_weights import make_class_weights, make_log_priors
from vit_jax.tasks.classify import Classify
from vit_jax.tasks.distill import Distill
from vit_jax.tasks.masked_patches import TARGETS, MaskedPatches
from vit_jax.tasks.regress import Regress
from vit_jax.tasks.task import Task


def make_task(
    config: ConfigDict,
    model: Model,
    num_classes: int,
    max_labels: int | None = None,
    classes: ClassFacts | None = None,
) -> Task:
    """Returns the task that `config.task` describes.

    Args:
        config: the configuration of the run.
        model: the model, whatever its head is for.
        num_classes: the number of classes of the data, or of the numbers to learn.
        max_labels: the most labels of an image in multi-label data; None: every image has one label.
        classes: what the training data state of their classes; None: they are not open, and nothing is trained.

    Raises:
        UserError: softmax is used with a single class, or with several labels an image; `mixed_labels=one` is used with
            another loss than sigmoid or with label smoothing, or logit adjustment with sigmoid; a file of class weights
            is wrong; one of two heads would not be trained; masked patches do not suit the model or the preprocessing,
            or fields of classification are set for them.
    """
    if config.task.kind == "masked_patches":
        return _make_masked_patches(config, model)
    if config.task.kind == "regress":
        scale = tuple(zip(config.task.target_means or (), config.task.target_deviations or (), strict=True))
        return Regress(num_classes, config.task.loss, config.task.huber_delta, scale or None)
    refuse(
        (
            max_labels and config.task.loss != "sigmoid",
            "data with several labels per image needs --config.task.loss=sigmoid.",
        ),
        (
            config.task.loss == "softmax" and num_classes < 2,
            f"the data has {num_classes} class(es), but softmax needs two or more; if the data is a folder, check that "
            "--config.data.source names the folder that contains one folder per class.",
        ),
        (
            config.task.mixed_labels == "one" and (config.task.loss != "sigmoid" or config.task.label_smoothing),
            "task.mixed_labels=one makes every target 0 or 1: set --config.task.loss=sigmoid and "
            "--config.task.label_smoothing=0.",
        ),
        (
            config.task.logit_adjustment and config.task.loss != "softmax",
            "task.logit_adjustment shifts the logits of a softmax: set --config.task.loss=softmax, or use "
            "--config.task.class_weights.",
        ),
    )
    fields = {
        "num_classes": num_classes,
        "loss": config.task.loss,
        "label_smoothing": config.task.label_smoothing,
        "mixup": config.task.mixup,
        "mixup_probability": config.task.mixup_probability,
        "cutmix": config.task.cutmix,
        "mixed_labels": config.task.mixed_labels,
        "focal_gamma": config.task.focal_gamma,
        "class_weights": make_class_weights(config, num_classes, classes),
        "log_priors": make_log_priors(config, classes),
        "multi_label": max_labels is not None,
    }
    if config.task.kind == "classify":
        return Classify(**fields)
    if model.field("distilled_head") and config.task.teacher_weight in (0, 1):
        raise UserError(
            f"task.teacher_weight={config.task.teacher_weight:g} trains one of the two heads of model.distilled_head "
            "alone; choose a value above 0 and below 1, or set --config.model.distilled_head=False."
        )
    return Distill(
        **fields,
        teacher_weight=config.task.teacher_weight,
        teacher_targets=config.task.teacher_targets,
        temperature=config.task.temperature,
        two_heads=bool(model.field("distilled_head")),
    )


def _make_masked_patches(config: ConfigDict, model: Model) -> MaskedPatches:
    target, masked, swapped = config.task.target, config.task.masked, config.task.swapped
    if model.field("stem") != "patches":
        hybrid = f"{model.name} has no patches of pixels, which task.kind=masked_patches needs"
        raise UserError(f"{hybrid}; choose a ViT without a ResNet.")
    size = model.field("patch_size")
    labelled = {"loss": "softmax", "label_smoothing": 0, "mixup": 0, "cutmix": 0, "mixed_labels": "share"}
    labelled |= {"class_weights": None, "focal_gamma": 0, "logit_adjustment": 0}
    refuse(
        (
            not TARGETS[target].outputs(size),
            f"task.target={target} needs patches of a multiple of 4 pixels, not {size}.",
        ),
        (
            not re.search(r"value_range\(-1(\.0*)?,1(\.0*)?\)$", config.data.preprocess.replace(" ", "")),
            "task.kind=masked_patches needs pixels from -1 to 1: end data.preprocess with value_range(-1,1), and give "
            "another mean or standard deviation as model.image_mean and model.image_std.",
        ),
        (masked + swapped > 1, f"task.masked={masked} and task.swapped={swapped} are together more than 1."),
        (
            any(config.task[field] != value for field, value in labelled.items()),
            f"task.kind=masked_patches uses no labels: leave {', '.join(f'task.{field}' for field in labelled)} at "
            "their defaults.",
        ),
    )
    return MaskedPatches(size, target, config.task.corrupted, masked, swapped)


def task_of_model(model: Model) -> Task:
    """Returns the task of a model whose run is not known, as its head shows it.

    The task is classification or regression by the loss that the model states, or masked patch prediction as in the
    paper.

    Raises:
        UserError: the model predicts patches, but no target has as many outputs.
    """
    if model.field("head") == "patches":
        size, outputs = model.field("patch_size"), model.field("num_classes")
        names = [name for name, target in TARGETS.items() if outputs and target.outputs(size) == outputs]
        if not names:
            unfit = f"{model.name} has {outputs} outputs for a patch"
            raise UserError(f"{unfit}, but no task.target has this number of outputs.")
        return MaskedPatches(size, names[0])
    if model.loss in REGRESSION_LOSSES:
        return Regress(model.field("num_classes"), model.loss, scale=model.target_scale)
    return Classify(model.field("num_classes"), model.loss, multi_label=model.multi_label)
