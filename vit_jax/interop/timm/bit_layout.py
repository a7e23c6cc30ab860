"""The layout of timm's BiT: one table, by which files are both read and written.

Source of the names: huggingface/pytorch-image-models, timm/models/resnetv2.py.
"""

import collections
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax import UserError
from vit_jax.interop import mapping
from vit_jax.interop.archives import Archive
from vit_jax.interop.mapping import Leaf, ParameterTable
from vit_jax.interop.pytorch import convolution, norm_leaves
from vit_jax.models import BitSpec

ROOT, HEAD = "stem.conv.weight", "head.fc."
UNIT = r"stages\.(\d{1,3})\.blocks\.(\d{1,3})\."


def detect_layout(names: Mapping[str, Any]) -> bool:
    """Tells whether names of arrays belong to the layout."""
    return {ROOT, "stages.0.blocks.0.norm1.weight", "stages.0.blocks.0.conv1.weight", "norm.weight"} <= set(names)


def infer_fields(archive: Mapping[str, Any], resolution: Any = None) -> dict[str, Any]:
    """Returns the fields of the model whose arrays have these shapes.

    Args:
        archive: with timm's names.
        resolution: of the images, if the user states it; else 224, since no array depends on it.
    """
    matches = (re.match(UNIT, name) for name in archive)
    counts = collections.Counter(int(stage) for stage, _ in {match.groups() for match in matches if match})
    head = f"{HEAD}weight"
    return {
        "stages": tuple(counts[stage] for stage in sorted(counts)),
        "width": _outputs(archive, ROOT),
        "unit": "pre_activation",
        "border": "zeros",
        "num_classes": _outputs(archive, head),
        "resolution": resolution or (224, 224),
    }


def _outputs(archive: Mapping[str, Any], name: str) -> int:
    """Returns the first size of an array; 0 for an array without sizes, or none."""
    return archive[name].shape[0] if name in archive and archive[name].shape else 0


def read_layout(archive: Archive, spec: BitSpec, shapes: mapping.Shapes) -> dict[str, Any]:
    """Returns the parameters of a model by our names; `shapes` are theirs.

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
    """Returns the arrays of the layout that the parameters of a model consist of."""
    table = norm_leaves("norm", "norm.")
    table["root/conv/kernel"] = Leaf(ROOT, arrange=convolution)
    for stage, units in enumerate(spec.stages):
        for unit in range(units):
            ours, theirs = f"stage{stage + 1}/unit{unit + 1}", f"stages.{stage}.blocks.{unit}."
            for number in (1, 2, 3):
                table[f"{ours}/conv{number}/kernel"] = Leaf(f"{theirs}conv{number}.weight", arrange=convolution)
                table |= norm_leaves(f"{ours}/norm{number}", f"{theirs}norm{number}.")
            if unit == 0:
                table[f"{ours}/conv_proj/kernel"] = Leaf(f"{theirs}downsample.conv.weight", arrange=convolution)
    if spec.num_classes:
        table["head/kernel"] = Leaf(f"{HEAD}weight", arrange=_convolution_of_points)
        table["head/bias"] = Leaf(f"{HEAD}bias")
    return table


def _convolution_of_points(kernel: np.ndarray) -> np.ndarray:
    """Returns a view [outputs, inputs, 1, 1] of a kernel [inputs, outputs]."""
    return kernel.T[..., None, None]
