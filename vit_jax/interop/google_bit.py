"""The layouts of BiT's files: the released .npz files, and those that big_vision writes for both forms of the model.

One table serves all: the names in which the layouts differ are data. Files are read and written by the same table.

Source of the names: google-research/big_transfer, bit_jax; google-research/big_vision, models/bit_paper.py and
models/bit.py.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from vit_jax.interop.archives import Archive
from vit_jax.interop.layout import Family, Leaf, ParameterTable, Size, count_units
from vit_jax.models import BitSpec

UNIT = r"block(\d{1,3})/unit(\d{1,3})/"  # stage and unit
LayerNames: TypeAlias = tuple[tuple[str, str], ...]  # (our name of a layer, its name in the file)


class Names(NamedTuple):
    """The names in which the BiT files of one layout differ from those of the others, and the model that they hold.

    Attributes:
        unit: the form of the model; see `BitSpec`.
        border: the border that the authors' code uses with these files; see `BitSpec`.
        layers: the names of the layers outside of the units. The first is the convolution of the root.
        unit_name: the format of a unit's name in the file, from `stage` and `unit`.
        unit_layers: the names of the layers inside a unit.
        norm_kinds: the names of a norm's scale and bias in the file.
        norm_ones: how many leading dimensions of 1 the arrays of norms have.
        head_ones: how many leading dimensions of 1 the head's kernel has.
    """

    unit: str
    border: str
    layers: LayerNames
    unit_name: str
    unit_layers: LayerNames
    norm_kinds: tuple[str, str] = ("scale", "bias")
    norm_ones: int = 0
    head_ones: int = 0

    @property
    def root(self) -> str:
        """The name of the root's kernel."""
        return f"{self.layers[0][1]}/kernel"

    @property
    def head(self) -> str:
        """The name of the head's kernel."""
        return f"{dict(self.layers)['head']}/kernel"


_UNIT = tuple((f"conv{i}", f"conv{i}") for i in (1, 2, 3, "_proj")) + tuple((f"norm{i}", f"gn{i}") for i in (1, 2, 3))
RELEASED_NAMES = Names(
    unit="pre_activation",
    border="zeros",
    layers=(("root/conv", "root_block/standardized_conv2d"), ("norm", "group_norm"), ("head", "head/conv2d")),
    unit_name="block{stage}/unit{unit:02}",
    unit_layers=(
        *((f"conv{i}", f"{letter}/standardized_conv2d") for i, letter in enumerate("abc", 1)),
        *((f"norm{i}", f"{letter}/group_norm") for i, letter in enumerate("abc", 1)),
        ("conv_proj", "a/proj/standardized_conv2d"),
    ),
    norm_kinds=("gamma", "beta"),
    head_ones=2,
)
PRE_NAMES = Names(
    unit="pre_activation",
    border="lowest",
    layers=(("root/conv", "root_block/conv_root"), ("norm", "norm-pre-head"), ("head", "head")),
    unit_name="block{stage}/unit{unit:02}",
    unit_layers=_UNIT,
    norm_ones=3,
)
POST_NAMES = Names(
    unit="post_activation",
    border="zeros",
    layers=(("root/conv", "conv_root"), ("root/norm", "gn_root"), ("head", "head")),
    unit_name="block{stage}/unit{unit}",
    unit_layers=(*_UNIT, ("norm_proj", "gn_proj")),
)


def parameter_table(spec: BitSpec, names: Names) -> ParameterTable:
    """Returns our name -> the arrays of a file that the parameter consists of, for the parameters of a model."""
    table: ParameterTable = {}
    for ours, theirs in _layers(spec, names):
        if "norm" in ours:
            for kind, their_kind in zip(("scale", "bias"), names.norm_kinds, strict=True):
                table[f"{ours}/{kind}"] = Leaf(f"{theirs}/{their_kind}", names.norm_ones)
        else:
            table[f"{ours}/kernel"] = Leaf(f"{theirs}/kernel")
    if spec.num_classes:
        table["head/kernel"] = Leaf(names.head, names.head_ones)
        table["head/bias"] = Leaf(names.head.replace("kernel", "bias"))
    return table


def _layers(spec: BitSpec, names: Names) -> Iterator[tuple[str, str]]:
    """Yields (our name, the name in the file) of every convolution and norm."""
    yield from ((ours, theirs) for ours, theirs in names.layers if ours != "head")
    for stage, units in enumerate(spec.stages, 1):
        for unit in range(1, units + 1):
            theirs = names.unit_name.format(stage=stage, unit=unit)
            for ours, layer in names.unit_layers:
                if unit == 1 or not ours.endswith("_proj"):
                    yield f"stage{stage}/unit{unit}/{ours}", f"{theirs}/{layer}"


def infer_fields(arrays: Archive, names: Names, given: Size | None, stated: Size | None) -> dict[str, Any]:
    """Returns the fields of the model whose arrays have these shapes; see `Family.fields`.

    The resolution is `given`, else 224, since no array depends on it.
    """
    return {
        "stages": count_units(arrays, UNIT),
        "width": arrays.shape_of(names.root)[-1],
        "unit": names.unit,
        "border": names.border,
        "num_classes": arrays.shape_of(names.head)[-1] if names.head in arrays else 0,
        "resolution": given or (224, 224),
    }


def unsupported(spec: BitSpec, unit: str, border: str) -> dict[str, bool]:
    """Returns what the BiTs of a layout, with this form and this border, have not -> whether this model has it."""
    has_other = (spec.unit, spec.border) != (unit, border) or bool(spec.later_parts)
    borders = [f"the border {spec.border}"] if spec.unit == "pre_activation" else []
    return {f"a BiT with {' and '.join([f'{spec.unit} units', *spec.later_parts, *borders])}": has_other}


RELEASED = Family(
    name="BiT as released",
    spec=BitSpec,
    marks=(r"root_block/standardized_conv2d(_\d+)?/kernel",),
    prefixes="(?:params/|opt/target/|)resnet/",
    ignores_others=True,
    names=RELEASED_NAMES,
    older_names=((r"(standardized_conv2d)_\d+(?=/)", r"\1"),),  # in released files of VTAB's tasks
    fields=infer_fields,
    table=parameter_table,
    unsupported=functools.partial(unsupported, unit="pre_activation", border="zeros"),
    prefix="resnet/",
)
PRE_ACTIVATION = dataclasses.replace(
    RELEASED,
    name="big_vision's bit_paper",
    marks=("root_block/conv_root/kernel",),
    prefixes="params/|opt/target/|",
    names=PRE_NAMES,
    older_names=(),
    unsupported=functools.partial(unsupported, unit="pre_activation", border="lowest"),
    prefix="params/",
)
POST_ACTIVATION = dataclasses.replace(
    PRE_ACTIVATION,
    name="big_vision's bit",
    marks=("conv_root/kernel",),
    names=POST_NAMES,
    unsupported=functools.partial(unsupported, unit="post_activation", border="zeros"),
)
