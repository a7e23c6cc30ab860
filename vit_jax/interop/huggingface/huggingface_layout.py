"""The layouts of transformers' vision models: one table, by which files are both read and written.

The families are ViT, DeiT, Dinov2 (with and without registers) and the vision tower of Siglip. A file has either the
bare model or a model with a classifier; a DeiT may have two classifiers. What no array states (heads, epsilon,
activation) is in `config.json` beside the file. The names of the arrays are in `huggingface.huggingface_array_names`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax import UserError
from vit_jax.interop import mapping
from vit_jax.interop.archives import Archive
from vit_jax.interop.huggingface.huggingface_array_names import (
    CLASSIFIERS,
    DEIT,
    DINOV2,
    DINOV2_WITH_REGISTERS,
    FAMILIES,
    IN_MEMORY,
    MASK_TOKEN,
    SIGLIP,
    VIT,
)
from vit_jax.interop.mapping import ParameterTable
from vit_jax.interop.pytorch import Names, RenamedArchive, model_leaves, torch_fields
from vit_jax.model import Model
from vit_jax.models import BitSpec, ModelSpec


class Form(NamedTuple):
    """The form of a file: the family of its model, and the kind of its names."""

    family: str  # a key of FAMILIES, which is the model_type in config.json
    prefix: str  # the prefix of all arrays but the classifier's
    in_memory: bool = False  # whether the names are those of a model in memory, which `save_pretrained` changes

    @property
    def names(self) -> Names:
        """The names of the arrays of a model with one classifier."""
        names = IN_MEMORY[self.family] if self.in_memory else FAMILIES[self.family].names
        return names.under(self.prefix)


def detect_form(names: Mapping[str, Any]) -> Form | None:
    """Returns the form of a file whose arrays have these names, or None."""
    for name in names:
        if name.endswith(f"{SIGLIP.patches}weight") and not name.startswith("text_model."):
            return Form("siglip_vision_model", name.removesuffix(f"{SIGLIP.patches}weight"))
    for name in names:
        if name.endswith(f"{VIT.patches}weight"):
            prefix = name.removesuffix(f"{VIT.patches}weight")
            if f"{prefix}{DINOV2.blocks}0.{DINOV2.norms[0]}weight" in names:
                registers = f"{prefix}{DINOV2_WITH_REGISTERS.registers}" in names
                family = "dinov2_with_registers" if registers else "dinov2"
            else:
                family = "deit" if f"{prefix}{DEIT.registers}" in names else "vit"
            other = IN_MEMORY[family]
            return Form(family, prefix, f"{prefix}{other.blocks}0.{other.attention[0]}weight" in names)
    return None


def choose_form(spec: ModelSpec | BitSpec) -> Form:
    """Returns the form in which a model is written: the first family to which it belongs.

    Raises:
        UserError: the model belongs to no family. The message names what the nearest family lacks.
    """
    if isinstance(spec, BitSpec):
        raise UserError(f"the huggingface layout does not support a BiT; {mapping.OTHER_LAYOUT}")
    value = Model("", spec).field
    differ = {
        family: [f"{field} {value(field)}" for field, allowed in rules.requires.items() if value(field) not in allowed]
        for family, rules in FAMILIES.items()
    }
    family = min(differ, key=lambda family: len(differ[family]))
    classes, pooling = bool(spec.head.num_classes), spec.head.pooling
    height, width = spec.position.image_size
    plain, dinov2 = family in ("vit", "deit"), family.startswith("dinov2")
    unsupported = dict.fromkeys(differ[family], True) | {
        "a head of patches": spec.head.kind == "patches",
        "a tanh layer before a classifier": plain and classes and spec.head.pre_logits,
        "a classifier of the class token alone after LayerScale": dinov2 and classes and pooling == "token",
        "class token and mean without a classifier": dinov2 and not classes and pooling == "token_gap",
        f"layer_scale 0 in a {family}": dinov2 and not spec.block.layer_scale,
        # The code of the other families takes positions for those of a square grid.
        f"images of {height}x{width} pixels in a {family}": not plain and height != width,
    }
    mapping.refuse("huggingface", unsupported)
    return Form(family, FAMILIES[family].prefix if classes or family == "siglip_vision_model" else "")


def infer_fields(
    file: Archive, form: Form, given: tuple[int, int] | None = None, stated: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Returns the fields that follow from the arrays: all but num_heads, norm_epsilon and activation.

    Args:
        file: the arrays of a file of this form.
        form: what `detect_form` returned.
        given: (height, width) of the images as the user states it, or None; see `torch_fields.infer_positions`.
        stated: (height, width) of the images in the configuration beside the file, or None.

    Raises:
        UserError: an array is missing that determines a field, or the positions fit no image size.
    """
    archive = renamed(file, form)
    distilled = f"{CLASSIFIERS[True]['distilled_head']}weight" in archive
    names = form.names._replace(heads=CLASSIFIERS[distilled])
    if f"{form.prefix}pre_layrnorm.weight" in archive:
        raise UserError(
            "it is the image encoder of a CLIP, whose tokens are normalised before the first block (pre_layrnorm), "
            "and whose files vit_jax does not read"
        )
    fields = torch_fields.infer_fields(archive, names, always=(names.position, f"{names.patches}bias"))
    both = form.family.startswith("dinov2") and fields["num_classes"]
    fields["pooling"] = "map" if names.cls not in archive else "token_gap" if both else "token"
    return fields | torch_fields.infer_positions(archive, names, fields, given, stated)


def renamed(file: Archive, form: Form) -> RenamedArchive:
    """Returns a file's arrays without those that the model does not need. The names stay as they are."""
    unused = [f"{form.prefix}{MASK_TOKEN}", r".*\.position_ids", r"text_model\..*", r"logit_(scale|bias)"]
    if any(f"{names['head']}weight" in file for names in CLASSIFIERS.values()):
        unused.append(rf"{form.prefix}{VIT.pre_logits}(weight|bias)")
    return RenamedArchive(file, (), "|".join(unused))


def read_layout(file: Archive, form: Form, spec: ModelSpec, shapes: mapping.Shapes) -> dict[str, Any]:
    """Returns our name -> parameter of a model; `shapes` are the shapes of the parameters.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    return mapping.read_parameters(renamed(file, form), parameter_table(spec, form), shapes, prefix="")


def to_layout(params: dict[str, Any], spec: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of a file in the layout of the family to which the model belongs.

    Raises:
        UserError: no family computes the model.
    """
    form = choose_form(spec)
    if spec.class_rows and spec.position.rows == "patches":  # then the class token's position is zero
        params = params | {"position": np.pad(np.asarray(params["position"]), ((1, 0), (0, 0)))}
    arrays = mapping.file_views(parameter_table(spec, form), params, prefix="")
    if form.family.startswith("dinov2"):  # its classes have the mask token, though only their training uses it
        arrays[f"{form.prefix}{MASK_TOKEN}"] = np.zeros((1, spec.width), np.float32)
    return arrays


def parameter_table(spec: ModelSpec, form: Form) -> ParameterTable:
    """Returns our name -> the arrays of the layout that the parameter consists of, for the parameters of a model."""
    return model_leaves(spec, form.names._replace(heads=CLASSIFIERS[spec.head.distilled]))
