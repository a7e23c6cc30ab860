"""The layout of timm's BiT: one table, by which files are both read and written.

Source of the names: huggingface/pytorch-image-models, timm/models/resnetv2.py.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax import UserError
from vit_jax.interop import array_shapes, mapping
from vit_jax.interop.archives import Archive
from vit_jax.interop.mapping import Leaf, ParameterTable
from vit_jax.interop.pytorch import convolution, norm_leaves
from vit_jax.models import BitSpec

ROOT, HEAD = "stem.conv.weight", "head.fc."
UNIT = r"stages\.(\d{1,3})\.blocks\.(\d{1,3})\."


def detect_layout(names: Mapping[str, Any]) -> bool:
    """Returns whether arrays with these names have this layout."""
    return {ROOT, "stages.0.blocks.0.norm1.weight", "stages.0.blocks.0.conv1.weight", "norm.weight"} <= set(names)


def infer_fields(
    archive: Mapping[str, Any], given: tuple[int, int] | None = None, stated: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Returns the fields of the model whose arrays have these shapes.

    Args:
        archive: the arrays of a file, by timm's names.
        given: (height, width) of the images as the user states it, or None.
        stated: (height, width) of the images in the configuration beside the file, or None. Without both it is 224, as
            no array depends on it.
    """
    head = f"{HEAD}weight"
    return {
        "stages": array_shapes.count_units(archive, UNIT),
        "width": array_shapes.shape_of(archive, ROOT)[0],
        "unit": "pre_activation",
        "border": "zeros",
        "num_classes": array_shapes.shape_of(archive, head)[0] if head in archive else 0,
        "resolution": given or stated or (224, 224),
    }


def read_layout(archive: Archive, spec: BitSpec, shapes: mapping.Shapes) -> dict[str, Any]:
    """Returns our name -> parameter of a model; `shapes` are the shapes of the parameters.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    return mapping.read_parameters(archive, parameter_table(spec), shapes, prefix="")


def to_layout(params: dict[str, Any], spec: BitSpec) -> dict[str, np.ndarray]:
    """Returns the arrays of a file in this layout.

    Raises:
        UserError: the layout cannot express the model.
    """
    if (spec.unit, spec.border) != ("pre_activation", "zeros") or spec.later_parts:
        what = f"a BiT with {' and '.join([f'{spec.unit} units', *spec.later_parts, f'the border {spec.border}'])}"
        raise UserError(f"the timm layout does not support {what}; {mapping.OTHER_LAYOUT}")
    return mapping.file_views(parameter_table(spec), params, prefix="")


def parameter_table(spec: BitSpec) -> ParameterTable:
    """Returns our name -> the arrays of the layout that the parameter consists of, for the parameters of a model."""
    table = norm_leaves("norm", "norm.")
    table["root/conv/kernel"] = Leaf(ROOT, arrange=convolution)
    for stage, unit, suffix in mapping.convolutions(spec.stages):
        ours, theirs = f"stage{stage}/unit{unit}", f"stages.{stage - 1}.blocks.{unit - 1}."
        if suffix == "_proj":
            table[f"{ours}/conv_proj/kernel"] = Leaf(f"{theirs}downsample.conv.weight", arrange=convolution)
        else:
            table |= convolution_leaves(ours, theirs, suffix, f"conv{suffix}", f"norm{suffix}")
    if spec.num_classes:
        table["head/kernel"] = Leaf(f"{HEAD}weight", arrange=_convolution_of_points)
        table["head/bias"] = Leaf(f"{HEAD}bias")
    return table


def convolution_leaves(ours: str, theirs: str, suffix: str, conv: str, norm: str) -> ParameterTable:
    """Returns the table of one convolution of a ResNet and of its norm.

    Args:
        ours: our name of the unit.
        theirs: the prefix of the unit's names in the file.
        suffix: the end of our names of the convolution and of the norm.
        conv: the name of the convolution in the file.
        norm: the name of the norm in the file.
    """
    kernel = Leaf(f"{theirs}{conv}.weight", arrange=convolution)
    return {f"{ours}/conv{suffix}/kernel": kernel} | norm_leaves(f"{ours}/norm{suffix}", f"{theirs}{norm}.")


def _convolution_of_points(kernel: np.ndarray) -> np.ndarray:
    """Returns a view [outputs, inputs, 1, 1] of a kernel [inputs, outputs]."""
    return kernel.T[..., None, None]
