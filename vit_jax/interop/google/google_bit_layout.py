"""The layouts of BiT's files: the released .npz files, and those that big_vision writes for both forms of the model.

One table serves all: the names in which the layouts differ are data. Files are read and written by the same table.

Source of the names: google-research/big_transfer, bit_jax; google-research/big_vision, models/bit_paper.py and
models/bit.py.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from vit_jax import UserError
from vit_jax.interop import array_shapes, mapping
from vit_jax.interop.archives import Archive
from vit_jax.interop.mapping import Leaf
from vit_jax.models import BitSpec

NUMBERED = r"(standardized_conv2d)_\d+(?=/)"  # names in released files of VTAB's tasks
UNIT = r"block(\d{1,3})/unit(\d{1,3})/"  # stage and unit
OUTER = ("", "params/", "opt/target/")  # what may precede the names of a model in a file
Names: TypeAlias = tuple[tuple[str, str], ...]  # (our name of a layer, its name in the file)


@dataclasses.dataclass(frozen=True)
class BitForm:
    """The names in which the BiT files of one layout differ from those of the others, and the model that they hold.

    Attributes:
        name: the name of the layout, as `vit_jax.save` takes it.
        unit: the form of the model; see `BitSpec`.
        border: the border that the authors' code uses with these files; see `BitSpec`.
        prefix: the prefix of every name in the file.
        layers: the names of the layers outside of the units. The first is the convolution of the root.
        unit_name: the format of a unit's name in the file, from `stage` and `unit`.
        unit_layers: the names of the layers inside a unit.
        norm_kinds: the names of a norm's scale and bias in the file.
        norm_ones: how many leading dimensions of 1 the arrays of norms have.
        head_ones: how many leading dimensions of 1 the head's kernel has.
    """

    name: str
    unit: str
    border: str
    prefix: str
    layers: Names
    unit_name: str
    unit_layers: Names
    norm_kinds: tuple[str, str] = ("scale", "bias")
    norm_ones: int = 0
    head_ones: int = 0

    @property
    def root(self) -> str:
        """The name of the root's kernel in the file, without the prefix."""
        return f"{self.layers[0][1]}/kernel"

    @property
    def head(self) -> str:
        """The name of the head's kernel in the file, without the prefix."""
        return f"{dict(self.layers)['head']}/kernel"


_UNIT = tuple((f"conv{i}", f"conv{i}") for i in (1, 2, 3, "_proj")) + tuple((f"norm{i}", f"gn{i}") for i in (1, 2, 3))
RELEASED = BitForm(
    name="google",
    unit="pre_activation",
    border="zeros",
    prefix="resnet/",
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
BIG_VISION_PRE = BitForm(
    name="big_vision",
    unit="pre_activation",
    border="lowest",
    prefix="params/",
    layers=(("root/conv", "root_block/conv_root"), ("norm", "norm-pre-head"), ("head", "head")),
    unit_name="block{stage}/unit{unit:02}",
    unit_layers=_UNIT,
    norm_ones=3,
)
BIG_VISION_POST = BitForm(
    name="big_vision",
    unit="post_activation",
    border="zeros",
    prefix="params/",
    layers=(("root/conv", "conv_root"), ("root/norm", "gn_root"), ("head", "head")),
    unit_name="block{stage}/unit{unit}",
    unit_layers=(*_UNIT, ("norm_proj", "gn_proj")),
)
BIT_FORMS = (RELEASED, BIG_VISION_PRE, BIG_VISION_POST)


def detect_form(names: Mapping[str, Any]) -> BitForm | None:
    """Returns the form of arrays with these names, with the prefix of the file; None: they have another layout."""
    plain = {_unnumbered(name) for name in names}
    for form in BIT_FORMS:
        own = "" if form.prefix in OUTER else form.prefix
        for prefix in (outer + own for outer in OUTER):
            if prefix + form.root in plain:
                return dataclasses.replace(form, prefix=prefix)
    return None


def parameter_table(spec: BitSpec, form: BitForm, names: Iterable[str] = ()) -> mapping.ParameterTable:
    """Returns our name -> the arrays of a file that the parameter consists of, for the parameters of a model.

    Args:
        spec: the spec of the model.
        form: the form of the file.
        names: the names of the arrays in a file that is read. Numbers in them (`NUMBERED`) are kept in the table.
    """
    actual = {_unnumbered(name).removeprefix(form.prefix): name.removeprefix(form.prefix) for name in names}
    table: mapping.ParameterTable = {}
    for ours, theirs in _layers(spec, form):
        kinds, ones = {"kernel": "kernel"}, 0
        if "norm" in ours:
            kinds, ones = dict(zip(("scale", "bias"), form.norm_kinds, strict=True)), form.norm_ones
        for kind, their_kind in kinds.items():
            name = f"{theirs}/{their_kind}"
            table[f"{ours}/{kind}"] = Leaf(actual.get(name, name), ones)
    if spec.num_classes:
        table["head/kernel"] = Leaf(form.head, form.head_ones)
        table["head/bias"] = Leaf(form.head.replace("kernel", "bias"))
    return table


def _layers(spec: BitSpec, form: BitForm) -> Iterator[tuple[str, str]]:
    """Yields (our name, the name in the file) of every convolution and norm."""
    yield from ((ours, theirs) for ours, theirs in form.layers if ours != "head")
    for stage, units in enumerate(spec.stages, 1):
        for unit in range(1, units + 1):
            for ours, theirs in form.unit_layers:
                if unit == 1 or not ours.endswith("_proj"):
                    yield (
                        f"stage{stage}/unit{unit}/{ours}",
                        f"{form.unit_name.format(stage=stage, unit=unit)}/{theirs}",
                    )


def read_layout(archive: Archive, form: BitForm, spec: BitSpec, shapes: mapping.Shapes) -> dict[str, Any]:
    """Returns our name -> parameter of a model; `shapes` are the shapes of the parameters.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    return mapping.read_parameters(archive, parameter_table(spec, form, archive), shapes, form.prefix)


def to_layout(params: dict[str, Any], spec: BitSpec, form: BitForm) -> dict[str, np.ndarray]:
    """Returns the arrays of a file of the form that `choose_form` returned."""
    return mapping.file_views(parameter_table(spec, form), params, form.prefix)


def choose_form(spec: BitSpec, name: str) -> BitForm:
    """Returns the form of the layout `name` that can express a model.

    Raises:
        UserError: there is none.
    """
    for form in BIT_FORMS:
        if (form.name, form.unit, form.border) == (name, spec.unit, spec.border) and not spec.later_parts:
            return form
    border = [f"the border {spec.border}"] if spec.unit == "pre_activation" else []
    what = " and ".join([f"{spec.unit} units", *spec.later_parts, *border])
    raise UserError(
        f"the {name} layout does not support a BiT with {what}; {mapping.OTHER_LAYOUT}, which supports every model"
    )


def infer_fields(archive: Archive, form: BitForm, given: tuple[int, int] | None = None) -> dict[str, Any]:
    """Returns the fields of the model whose arrays have these shapes.

    Args:
        archive: the arrays of a file.
        form: what `detect_form` returned.
        given: (height, width) of the images as the user states it; None: 224, since no array depends on it.

    Raises:
        UserError: an array from which a field is inferred has too few dimensions.
    """
    headers = {_unnumbered(name).removeprefix(form.prefix): archive[name] for name in archive}
    return {
        "stages": array_shapes.count_units(headers, UNIT),
        "width": array_shapes.shape_of(headers, form.root)[-1],
        "unit": form.unit,
        "border": form.border,
        "num_classes": array_shapes.shape_of(headers, form.head)[-1] if form.head in headers else 0,
        "resolution": given or (224, 224),
    }


def _unnumbered(name: str) -> str:
    return re.sub(NUMBERED, r"\1", name)
