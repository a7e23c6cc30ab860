"""The specification of a BiT (arXiv 1912.11370) or a ResNet with attention as a frozen dataclass; the named sizes."""

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from vit_jax import UserError, choose, refuse
from vit_jax.models.flat_keywords import image_size, row
from vit_jax.models.resnet_stages import check_stages, resnet_stride
from vit_jax.models.spec import Dtype, check_least

# The forms of each are in one dict: FORMS, ROOTS, BORDERS and REMATS.
UnitKind = Literal["pre_activation", "post_activation", "axial", "stand_alone", "augmented"]
RootKind = Literal["convolution", "attention"]
Border = Literal["zeros", "lowest"]
BitRemat = Literal["none", "full"]

# Number of layers in a name (the convolutions on the longest path, and the head) -> units in each stage. 50 to 200 are
# those of the papers; 14 is for tests.
UNITS: dict[int, tuple[int, ...]] = {
    14: (1, 1, 1, 1),
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
# The same for ResNets with stand-alone attention (arXiv 1906.05909, section 4.1).
STAND_ALONE_UNITS: dict[int, tuple[int, ...]] = {26: (1, 2, 4, 1), 38: (2, 3, 5, 2), 50: UNITS[50]}
ROOT_WIDTH = 64  # channels of the root at width factor 1
COARSE_STAGE = 2  # the stage, from 1, in which the attention of augmented units has half of the rows and columns
NEIGHBOURS = 4  # places on one side of a query of stand-alone attention, itself included


@dataclass(frozen=True)
class BitSpec:
    """A ResNet with GroupNorm and standardised convolutions: the baseline of the ViT paper (section 4.1).

    Its fields are flat keywords of `vit_jax.create`. Widths are in channels.
    """

    family: ClassVar = "BiT"
    stages: tuple[int, ...] = row("model.stages", UNITS[50])
    width: int = row("model.width", ROOT_WIDTH)  # of the root; the features have 4 * 2**(stages - 1) times as many
    unit: UnitKind = row("model.unit", "pre_activation")
    se_reduction: int = row("model.se_reduction", 0)
    root: RootKind = row("model.root", "convolution")
    border: Border = row("model.border", "zeros")
    # Pixels on a side, or (height, width); any image will do, unless units have positions for this size.
    resolution: int | tuple[int, int] = row("resolution")
    num_classes: int = 1000  # 0: no classifier, the logits are the pooled features
    head_bias: float = row("model.head_bias")
    head_std: float = row("model.head_std")
    dtype: Dtype = row("model.dtype", "float32")  # of the gradients, too
    remat: BitRemat = row("model.remat")

    def __post_init__(self):
        """Raises UserError for values that contradict each other."""
        check_stages(self.stages, self.width, "width")
        check_least(self, 0, "num_classes")
        sides = self.image_size
        refuse(
            (not self.stages, "a BiT must have at least 1 stage."),
            (
                not 0 <= self.se_reduction <= 4 * self.width,
                f"se_reduction must be at most {4 * self.width}, the channels of a unit, or 0 for none.",
            ),
            (
                any(side % self.tile for side in sides),
                f"the attention stem needs images of a multiple of {self.tile} pixels, not {sides}.",
            ),
        )

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return image_size(self.resolution)

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of the feature map at `resolution`."""
        height, width = self.image_size
        stride = resnet_stride(self.stages)
        return -(-height // stride), -(-width // stride)

    @property
    def has_sized_parameters(self) -> bool:
        """Whether the shapes of parameters depend on `resolution`."""
        return self.unit in ("axial", "augmented")

    def check_images(self, size: tuple[int, ...]) -> None:
        """Raises UserError if the parameters do not fit images of the size (height, width)."""
        if self.has_sized_parameters and size != self.image_size:
            given, own = ("{}x{}".format(*each) for each in (size, self.image_size))
            raise UserError(
                f"images of {given} pixels do not fit a model of resolution {own}; vit_jax.load(PATH, resolution=...) "
                f"resamples the positions of its {self.unit} units."
            )

    def line_length(self, stage: int, unit: int, axis: int) -> int:
        """Returns the length L of an axis for which a unit has positions: 2 L - 1 offsets.

        That is the length of the feature map that the unit attends to, or `NEIGHBOURS` for stand-alone attention.

        Args:
            stage: the number of the stage, from 1.
            unit: the number of the unit in its stage, from 1. The first unit has the stride of the stage: axial units
                attend before it, augmented units after it.
            axis: 0: height, 1: width.
        """
        if self.unit == "stand_alone":
            return NEIGHBOURS
        later = self.unit == "axial" and unit == 1
        stride = resnet_stride((1,) * max(1, stage - later))
        if self.unit == "augmented" and stage == COARSE_STAGE:
            stride *= 2
        return -(-self.image_size[axis] // stride)

    @property
    def traits(self) -> list[str]:
        """Phrases for people to read that describe the units and the parts that no BiT has."""
        return [f"{self.unit} units", *self.later_parts]

    @property
    def later_parts(self) -> list[str]:
        """The parts that no BiT has, besides its units, as phrases."""
        squeezed = [f"squeeze-and-excitation (reduction {self.se_reduction})"] if self.se_reduction else []
        return squeezed + (["an attention stem"] if self.root == "attention" else [])

    @property
    def tile(self) -> int:
        """The number of pixels of which both sides of an image must be a multiple."""
        return 4 if self.root == "attention" else 1

    @property
    def sizes(self) -> dict[str, Any]:
        """The fields that determine how large the model is."""
        return {"stages": self.stages, "width": self.width}

    @property
    def feature_width(self) -> int:
        """Width of `pre_logits`, the features that evaluations learn from."""
        return self.width * 2 ** (len(self.stages) + 1)

    @property
    def split_sizes(self) -> dict[str, int]:
        """Dimension of the parameters that a mesh axis must divide -> its size: there are none."""
        return {}

    @property
    def canonical(self) -> "BitSpec":
        """The spec with the default `border` where the field changes nothing, so that equal models have equal specs."""
        pooled = self.unit == "pre_activation" and self.root == "convolution"
        return self if pooled else replace(self, border="zeros")

    @property
    def quick_to_trace(self) -> "BitSpec":
        """A spec with the same parameters that is traced quickly: this one."""
        return self


def resnets() -> dict[str, dict[str, Any]]:
    """Returns name -> the fields it stands for, of the ResNets with attention or with squeeze-and-excitation."""
    kinds: dict[str, tuple[dict[int, tuple[int, ...]], dict[str, Any]]] = {
        "AxialResNet": (UNITS, {"unit": "axial"}),
        "SASA-ResNet": (STAND_ALONE_UNITS, {"unit": "stand_alone"}),
        "AA-ResNet": (UNITS, {"unit": "augmented"}),
        "SE-ResNet": (UNITS, {"unit": "post_activation", "se_reduction": 16}),
    }
    return {
        f"{kind}-{layers}": {"stages": units, "width": ROOT_WIDTH} | fields
        for kind, (sizes, fields) in kinds.items()
        for layers, units in sizes.items()
    }


def bit_names() -> list[str]:
    """Returns the names to suggest for a mistyped one: those of common BiTs and of all other ResNets."""
    return [*(f"BiT-R{layers}x{factor}" for layers in UNITS for factor in (1, 2, 3, 4)), *resnets()]


def bit_fields(name: str) -> dict[str, Any]:
    """Returns the fields that a name stands for: `BiT-R<layers>x<width factor>`, a name of `resnets`, or `BiT`.

    The fields of `BiT`, which states no size, are None.

    Raises:
        UserError: no BiT has this name.
    """
    if name in resnets():
        return resnets()[name]
    match = re.fullmatch(r"BiT(?:-R([1-9]\d{0,2})x([1-9]\d{0,2}))?", name)
    layers, factor = match.groups() if match else ("0", "0")
    if layers is None:
        return {"stages": None, "width": None}
    if int(layers) not in UNITS:
        choose("model", name, bit_names(), where="vit_jax/models/bit_spec.py")
    return {"stages": UNITS[int(layers)], "width": ROOT_WIDTH * int(factor)}


def bit_name(values: dict[str, Any]) -> str:
    """Returns the name that stands for these values of the fields; `BiT` if no name does."""
    for name, fields in resnets().items():
        if all(values.get(field) == value for field, value in fields.items()):
            return name
    layers = next((layers for layers, units in UNITS.items() if units == values["stages"]), None)
    factor, rest = divmod(values["width"], ROOT_WIDTH)
    return f"BiT-R{layers}x{factor}" if layers and not rest else "BiT"
