"""Describes the models in files of timm and transformers, from the arrays and from the configurations beside them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_jax import UserError
from vit_jax.interop.archives import Archive
from vit_jax.interop.array_shapes import given_size
from vit_jax.interop.huggingface import huggingface_config, huggingface_layout
from vit_jax.interop.layout import Layout
from vit_jax.interop.model_description import ModelDescription
from vit_jax.interop.pytorch import PublishedConfig
from vit_jax.interop.timm import timm_bit_layout, timm_config, timm_layout
from vit_jax.models import BitSpec, ModelSpec

# The tables of timm's layout by the type of the model's spec, which is the form of a file, in the order in which they
# are tried.
TIMM_TABLES: dict[type, Any] = {BitSpec: timm_bit_layout, ModelSpec: timm_layout}


def describe_timm(archive: Archive, form: type, path: Path, given: Mapping[str, Any]) -> ModelDescription:
    """Returns the description of the model in a timm file.

    Raises:
        UserError: the number of heads is stated nowhere, or an array is missing that determines a field.
    """
    stated = timm_config.read_folder(path.parent)
    if form is ModelSpec and not stated.fields:
        stated = timm_config.read_name(path, timm_layout.width_of(archive))
    fields = TIMM_TABLES[form].infer_fields(archive, given_size(given), stated.resolution)
    if form is ModelSpec:
        fields = {"num_heads": given.get("num_heads") or stated.fields.get("num_heads")} | fields
        if not fields["num_heads"]:
            raise UserError(
                "the number of attention heads is not known: a timm file does not state it, and neither the file nor "
                f"its folder is named after a timm architecture of width {fields['width']}; give num_heads=N to "
                "vit_jax.load, or --num-heads=N to vit_jax.convert, which writes a file that states it"
            )
    return _description(fields, _for_form(stated, form), "bicubic")


def _for_form(stated: PublishedConfig, form: type) -> PublishedConfig:
    """Returns what a configuration states that a model of this form can have.

    A BiT has neither `fields` nor `sizes`: only the resolution, preprocessing, class names and loss remain.

    Raises:
        UserError: a BiT's images have another mean or standard deviation than 0.5.
    """
    if form is ModelSpec:
        return stated
    if {value for name in ("image_mean", "image_std") for value in stated.fields.get(name, ())} - {0.5}:
        raise UserError("vit_jax does not support a BiT whose image mean or std is not 0.5")
    return stated._replace(fields={}, sizes={})


def describe_huggingface(
    archive: Archive, form: huggingface_layout.Form, path: Path, given: Mapping[str, Any]
) -> ModelDescription:
    """Returns the description of the model in a file of transformers.

    Raises:
        UserError: num_heads, norm_epsilon or activation is stated nowhere, or an array that determines a field is
            missing.
    """
    stated = huggingface_config.read_folder(path.parent)
    fields = huggingface_layout.infer_fields(archive, form, given_size(given), stated.resolution)
    missing = [key for key in ("num_heads", "norm_epsilon", "activation") if key not in {**stated.fields, **given}]
    if missing:
        words = " ".join(f"{key}=" for key in missing)
        raise UserError(f"its config.json must be in the same folder; without it, give {words} to vit_jax.load")
    return _description(fields, stated, huggingface_layout.FAMILIES[form.family].resample)


def _description(fields: dict[str, Any], stated: PublishedConfig, resample: str) -> ModelDescription:
    """Returns the description of a model from the fields that follow from its arrays and from its configuration.

    `resample` is how its library resamples positions.

    Where both give a field, the configuration decides, except that an activation swiglu of the arrays remains.

    Raises:
        UserError: the configuration contradicts the arrays.
    """
    stated.check_sizes(_comparable(fields))
    gated = {"activation": "swiglu"} if fields.get("activation") == "swiglu" else {}
    fields = fields | stated.fields | gated
    if fields.get("pooling") in ("token", "token_gap"):  # these poolings have a class token in any case
        fields["class_token"] = "auto"
    count = fields["num_classes"]
    names = stated.class_names if stated.class_names and len(stated.class_names) == count else None
    return ModelDescription.of_fields(fields, stated.preprocess, names, stated.loss, resample)


def _comparable(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that a configuration must not contradict."""
    unknown = {"num_classes"} if not fields["num_classes"] else set()  # the file may lack its head
    unknown |= {"patch_size"} if fields.get("stem") == "resnet" else set()  # counted in pixels, not in features
    unknown |= {"resolution"} if fields.get("position") != "learned" else set()
    return {name: value for name, value in fields.items() if name not in unknown}


TIMM = Layout(
    suffixes=(".safetensors",),
    detect=lambda archive: next((form for form, table in TIMM_TABLES.items() if table.detect_layout(archive)), None),
    describe=describe_timm,
    read=lambda archive, form, spec, shapes: TIMM_TABLES[type(spec)].read_layout(archive, spec, shapes),
    write=lambda params, spec: TIMM_TABLES[type(spec)].to_layout(params, spec),
    describing_files=timm_config.describing_files,
)
HUGGINGFACE = Layout(
    suffixes=(".safetensors",),
    detect=huggingface_layout.detect_form,
    describe=describe_huggingface,
    read=huggingface_layout.read_layout,
    write=huggingface_layout.to_layout,
    describing_files=huggingface_config.describing_files,
)
