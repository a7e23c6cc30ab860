"""The weights that a run starts from: loaded, checked and adapted to its model."""

import logging
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, data, errors_of, interop, without_queries
from vit_jax.config import FROM_WEIGHTS, check_config, fill_model
from vit_jax.model import Model
from vit_jax.program import Program
from vit_jax.tasks import Regress, Task


def take_model(config: ConfigDict) -> ConfigDict:
    """Returns the configuration with the model of the weights, if `model.name` is `init_from`; else unchanged.

    The fields of the model that decide its arrays become those of the weights where they have their defaults.

    Raises:
        UserError: there are no weights, or they cannot be read.
    """
    if config.model.name != FROM_WEIGHTS:
        return config
    check_config(config)
    with errors_of(f"init_from={without_queries(config.init_from)}"):
        model = interop.read_model(config.init_from)
    taken = config.copy_and_resolve_references()
    taken.model = fill_model(config.model, model.name, interop.config_fields(model))
    return taken


def load_init(
    source: str, config: ConfigDict, program: Program, class_names: tuple[str, ...] | None
) -> tuple[dict[str, Any], str, Model]:
    """Loads weights and adapts them to the model of a run.

    Args:
        source: the value of `config.init_from`.
        config: the configuration of the run.
        program: the program of the run.
        class_names: the names of the classes of the run's data, or None.

    Returns:
        Name of a parameter -> its value; a text that says what the weights are; and the model of the weights.

    Raises:
        UserError: the weights cannot be read, or do not suit the model.
    """
    shown = without_queries(source)
    with errors_of(f"init_from={shown}"):
        # FlexiViT weights are resized once, from the patch size that they were trained with, and only on request.
        asked: dict[str, Any] = {"resolution": "native"}
        if config.resample == "flexi":
            asked = {key: program.model.field(key) for key in ("patch_size", "resolution")}
        method = None if config.resample == "auto" else config.resample
        loaded, params = interop.load(source, resample=method, **asked)
        wanted = program.state.params
        check_range(loaded, config, config.keep_head)
        adapted = interop.adapt_parameters(loaded, params, program.model, wanted, config.keep_head, method)
        if config.keep_head:
            interop.check_class_order(loaded.class_names, class_names)
            check_answers(loaded, config, program.task)
            return adapted, f"{shown}, head included", loaded
        left = "; its head, for masked patches, and its [mask] embedding are left out"
        return adapted, shown + (left if loaded.field("head") == "patches" else ""), loaded


def check_answers(loaded: Model, config: ConfigDict, task: Task) -> None:
    """Raises UserError if the head of weights, which is kept, predicts classes and the run's numbers or vice versa, or
    numbers that are standardised otherwise.
    """
    learns = task.kind == "regress"
    if loaded.is_regression != learns and task.kind != "masked_patches":
        one, other = ("classes", "numbers") if learns else ("numbers", "classes")
        raise UserError(f"its head predicts {one}, but the run learns {other}; leave out --config.keep_head.")
    if isinstance(task, Regress):
        scale = loaded.target_scale or ((0.0, 1.0),) * task.num_classes
        if task.scale not in (None, scale):
            means, deviations = (",".join(map(repr, numbers)) for numbers in zip(*scale, strict=True))
            raise UserError(
                f"its head's numbers are standardised by other means and deviations; set --config.task.target_means="
                f"{means} and --config.task.target_deviations={deviations}, or leave out --config.keep_head."
            )


def check_range(loaded: Model, config: ConfigDict, uses_head: bool) -> None:
    """Compares the range of pixel values that weights were trained on with the range in a run.

    If the ranges differ, there is an error for weights that are used with their head, and a warning for others: those
    are trained further and adapt to the new range. Nothing is compared if the weights do not state their preprocessing.

    Args:
        loaded: the model of the weights.
        config: the configuration of the run.
        uses_head: whether the weights are used with their head.

    Raises:
        UserError: the ranges differ and `uses_head` is true.
    """
    pipes = [pipe for pipe in (loaded.preprocess, config.data.preprocess) if pipe is not None]
    theirs, ours = (f"value_range({low:g},{high:g})" for low, high in map(data.value_range_of, (pipes[0], pipes[-1])))
    if theirs == ours:
        return
    differ = f"its preprocessing ends with {theirs}, but data.preprocess of this run with {ours}"
    if uses_head:
        raise UserError(
            f"{differ}; make {theirs} the last op of data.preprocess and of evals.NAME.preprocess of every evaluation."
        )
    words = (
        "init_from=%s: %s; to use the range of the weights, end data.preprocess and the evals.NAME.preprocess of every "
        "evaluation with %s."
    )
    logging.getLogger(__name__).warning(words, config.init_from, differ, theirs)
