"""The layout of timm's BiT: one table, by which files are both read and written.

Source of the names: huggingface/pytorch-image-models, timm/models/resnetv2.py.
"""

import functools
from typing import Any

import numpy as np

from vit_jax.interop import google_bit, timm_config
from vit_jax.interop.archives import Archive
from vit_jax.interop.layout import Family, Leaf, ParameterTable, Size, convolutions, count_units
from vit_jax.interop.torch_tables import convolution, norm_leaves
from vit_jax.models import BitSpec

ROOT, HEAD = "stem.conv.weight", "head.fc."
UNIT = r"stages\.(\d{1,3})\.blocks\.(\d{1,3})\."


def infer_fields(arrays: Archive, names: None, given: Size | None, stated: Size | None) -> dict[str, Any]:
    """Returns the fields of the model whose arrays have these shapes; see `Family.fields`.

    The resolution is `given`, else `stated`, else 224, since no array depends on it.
    """
    head = f"{HEAD}weight"
    return {
        "stages": count_units(arrays, UNIT),
        "width": arrays.shape_of(ROOT)[0],
        "unit": "pre_activation",
        "border": "zeros",
        "num_classes": arrays.shape_of(head)[0] if head in arrays else 0,
        "resolution": given or stated or (224, 224),
    }


def parameter_table(spec: BitSpec, names: None) -> ParameterTable:
    """Returns our name -> the arrays of the layout that the parameter consists of, for the parameters of a model."""
    table = norm_leaves("norm", "norm.")
    table["root/conv/kernel"] = Leaf(ROOT, arrange=convolution)
    for stage, unit, suffix in convolutions(spec.stages):
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


FAMILY = Family(
    name="ResNetV2",
    spec=BitSpec,
    marks=(
        r"stem\.conv\.weight",
        r"stages\.0\.blocks\.0\.norm1\.weight",
        r"stages\.0\.blocks\.0\.conv1\.weight",
        r"norm\.weight",
    ),
    fields=infer_fields,
    table=parameter_table,
    unsupported=functools.partial(google_bit.unsupported, unit="pre_activation", border="zeros"),
    resample="bicubic",
    config=timm_config.describe_bit,
)
