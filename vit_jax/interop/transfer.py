"""Adapts pre-trained weights to another task and resolution, as the paper does before fine-tuning (section 3.2)."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax import UserError, models, tell, tree
from vit_jax.config import Affects, model_fields
from vit_jax.model import Model
from vit_jax.models import without_adapters

# Fields of config.model in which source and target must agree: always, and only if the head is kept.
CONFIG_FIELDS, HEAD_FIELDS = (tuple(model_fields(affects)) for affects in (Affects.WEIGHTS, Affects.HEAD))
HEADS = {"image": "classes of images", "patches": "masked patches", None: "classes of images"}
# In a config, only the name of the model states these.
NAME_FIELDS = ("patch_size", "block", "stem", "stem_width")

FOR_SHELLS = str.maketrans("", "", " ()")  # a shell would read the parentheses of several numbers


def adapt_parameters(
    source: Model,
    params: dict[str, Any],
    target: Model,
    wanted: dict[str, Any],
    keep_head: bool = False,
    method: str | None = None,
) -> dict[str, Any]:
    """Returns name -> parameter, for the parameters that `target` takes over from `source`: all but the head. Position
    embeddings are resampled to the target's grid of patches; their row of the class token is unchanged.

    Args:
        source: the model of the parameters.
        params: the parameters of `source`.
        target: the model to initialise.
        wanted: the shapes of the parameters of `target`.
        keep_head: whether to take over the head too.
        method: the method of resampling, see `models.resample_positions`; None: that of `source`.

    Raises:
        UserError: the models differ in more than head and resolution. The message names the flags that help, or every
            array that differs.
    """
    if source.values.keys() != target.values.keys():
        raise UserError(
            f"the checkpoint contains a {source.name}, not a {target.name}; to match it, set "
            f"--config.model.name={source.name}"
        )
    if target.field("distilled_head") and not source.field("registers"):
        raise UserError(
            f"the checkpoint contains a {source.name} without a distillation token, which model.distilled_head needs: "
            "start from a distilled model, or set --config.model.distilled_head=False --config.model.registers=0"
        )
    config_fields = CONFIG_FIELDS + HEAD_FIELDS if keep_head else CONFIG_FIELDS
    differ = [key for key in NAME_FIELDS + config_fields if _differs(key, source.field(key), target.field(key))]
    if differ:
        differences = ", ".join(f"{key} {source.field(key)}, not {target.field(key)}" for key in differ)
        if differ == ["patch_size"] and source.field("stem") == "patches":
            differences += " (--config.resample=flexi resizes the patches, as FlexiViT does)"
        raise UserError(f"the checkpoint contains a model with {differences}; {_remedy(source, target, config_fields)}")
    if keep_head and source.field("head") != target.field("head"):
        raise UserError(
            f"the checkpoint's head is for {HEADS[source.field('head')]}, but this run needs one for "
            f"{HEADS[target.field('head')]}; without --config.keep_head the run starts with a new head."
        )
    old_classes, new_classes = source.field("num_classes"), target.field("num_classes")
    if keep_head and old_classes != new_classes:
        raise UserError(
            f"the checkpoint's head has {old_classes:,} classes, not {new_classes:,}; without --config.keep_head the "
            "run starts with a new head."
        )
    leaves, rest = (
        {name: leaf for name, leaf in tree.flatten(all).items() if keep_head or not models.is_head(name)}
        for all in (params, without_adapters(wanted))
    )
    leaves = resample(source, leaves, target, method)
    if wrong := tree.differences(leaves, rest):
        remedy = f"; {_remedy(source, target, config_fields)}" if source.name != target.name else ""
        raise UserError(f"a {target.name} cannot start from this checkpoint: {'; '.join(wrong)}{remedy}")
    return leaves


def resample(source: Model, params: dict[str, Any], target: Model, method: str | None = None) -> dict[str, Any]:
    """Returns the parameters of a model for the resolution and the patch size of another one.

    If positions change, a line on standard error says how.

    Args:
        source: the model of the parameters.
        params: name -> parameter.
        target: the same model at another resolution or with another patch size.
        method: how positions are resampled, see `models.resample_positions`; None: `source.resample`.
    """
    method = method or source.resample
    resampled = models.resample_parameters(params, source.spec, target.spec, method)
    if any(np.shape(resampled[name]) != np.shape(params[name]) for name in params if name != "embed/kernel"):
        old, new = (f"{height}x{width}" for height, width in (source.image_size, target.image_size))
        tell(f"{target.name}: positions resampled from {old} to {new} pixels ({method})")
    return resampled


def check_class_order(old: Sequence[str] | None, new: Sequence[str] | None) -> None:
    """Compares `old`, the class names of a head, with `new`, those of the data.

    Logs a warning if the names differ but no class is known to have moved: the classes may be the same in other words.

    Raises:
        UserError: a name that both contain has another index in each.
    """
    if not old or not new or list(old) == list(new):
        return
    indices = {name: index for index, name in enumerate(new)}
    moved = [(index, name) for index, name in enumerate(old) if indices.get(name, index) != index]
    if moved:
        index, name = moved[0]
        raise UserError(
            f"class {name!r} has label {index} in the checkpoint's head, but label {indices[name]} in the data; give "
            "the classes of the data the order of those in the head."
        )
    words = ", ".join(old[:3]), ", ".join(new[:3])
    logging.getLogger(__name__).warning(
        "the classes of the head are %s, ...; those of the data are %s, ...: check that they are the same.", *words
    )


def config_fields(source: Model) -> dict[str, Any]:
    """Returns field of `config.model` -> value with which a run can start from a model. The name is left out."""
    return {name: source.field(name) for name in CONFIG_FIELDS if name in source.values}


def _differs(key: str, old: Any, new: Any) -> bool:
    """Returns whether a field says that the models differ. The initial value of LayerScale does not matter."""
    return bool(old) != bool(new) if key == "layer_scale" else old != new


def _remedy(source: Model, target: Model, fields: tuple[str, ...]) -> str:
    """Returns a sentence on the flags that make the target like the source, or on the fields that no flag sets."""
    if unnamed := [f"{key} {source.field(key)}" for key in NAME_FIELDS if key in source.fields]:
        return f"no field of config.model sets {', '.join(unnamed)}"

    def differs(key: str) -> bool:  # under the source's name; the target keeps what its config states besides
        return target.fields[key] != source.field(key) if key in target.fields else key in source.fields

    flags = [f"name={source.name}"] if source.name != target.name else []
    flags += [f"{key}={source.field(key)}".translate(FOR_SHELLS) for key in fields if differs(key)]
    return f"to match it, set {' '.join(f'--config.model.{flag}' for flag in flags)}"
