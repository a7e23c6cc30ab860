"""What a BiT is (arXiv 1912.11370), or an AxialResNet, as plain frozen values, and the named sizes."""

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from vit_jax import UserError, choose
from vit_jax.models.part_specs import Dtype
from vit_jax.models.resnet_stages import check_stages, resnet_stride
from vit_jax.models.spec_fields import image_size

# The implementations of each are in one dict: FORMS, BORDERS and REMATS.
UnitKind = Literal["pre_activation", "post_activation", "axial"]
Border = Literal["zeros", "lowest"]
BitRemat = Literal["none", "full"]

# Layers in a name, the convolutions on the longest path and the head -> units in each stage. 50 to 200 are those of the
# papers; 14 is for tests.
UNITS = {
    14: (1, 1, 1, 1),
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
ROOT_WIDTH = 64  # channels of the root at width factor 1
BIT_NAMES = (
    *(f"BiT-R{layers}x{factor}" for layers in UNITS for factor in (1, 2, 3, 4)),
    *(f"AxialResNet-{layers}" for layers in UNITS),
)


@dataclass(frozen=True)
class BitSpec:
    """A ResNet with GroupNorm and standardised convolutions: the baseline of the ViT paper (section 4.1).

    Its fields are flat keywords of `vit_jax.create`. Widths are in channels.
    """

    family: ClassVar = "BiT"
    stages: tuple[int, ...] = UNITS[50]  # units in each
    width: int = ROOT_WIDTH  # of the root; the features have 4 * 2**(stages - 1) times as many
    # Of the two forms by the same authors, the released one, or that of the hybrids and of big_vision's recipes; or the
    # latter with axial attention for each 3x3 convolution.
    unit: UnitKind = "pre_activation"
    # Around the images in the max pooling of a pre-activation root: zeros, as the released weights were trained, or
    # the lowest number, as in big_vision. After the other root's ReLU it makes no difference.
    border: Border = "zeros"
    # Pixels on a side, or (height, width); any image will do, unless axial units have positions for this size.
    resolution: int | tuple[int, int] = 224
    num_classes: int = 1000  # 0: no classifier, the logits are the pooled features
    head_bias: float = 0.0  # initial value
    dtype: Dtype = "float32"  # of the activations and of the gradients; parameters and statistics are float32
    remat: BitRemat = "none"

    def __post_init__(self):
        """Raises UserError for values that contradict each other."""
        check_stages(self.stages, self.width, "width")
        if not self.stages:
            raise UserError("a BiT must have at least 1 stage.")
        if self.num_classes < 0:
            raise UserError(f"num_classes must be 0 or more, not {self.num_classes}.")
        image_size(self.resolution)

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
        return self.unit == "axial"

    def check_images(self, size: tuple[int, ...]) -> None:
        """Raises UserError for images of a (height, width) that the parameters are not for."""
        if self.has_sized_parameters and size != self.image_size:
            given, own = ("{}x{}".format(*each) for each in (size, self.image_size))
            raise UserError(
                f"images of {given} pixels do not fit a model of resolution {own}; vit_jax.load(PATH, resolution=...) "
                "resamples the positions of its axial units."
            )

    def line_length(self, stage: int, unit: int, axis: int) -> int:
        """Returns the positions on an axis (0: height, 1: width) of the feature map that a unit attends to.

        Args:
            stage: from 1.
            unit: from 1; the first of a stage has its stride after the attention.
            axis: of the map.
        """
        stride = resnet_stride((1,) * max(1, stage - (unit == 1)))
        return -(-self.image_size[axis] // stride)

    @property
    def traits(self) -> list[str]:
        """What else distinguishes the model, in words."""
        return [f"{self.unit} units"]

    @property
    def tile(self) -> int:
        """The pixels on a side of which images must be a multiple."""
        return 1

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
        """Dimension of a parameter -> its size, where a mesh axis must divide it."""
        return {}

    @property
    def simplified(self) -> "BitSpec":
        """The spec without values that say what is so anyway."""
        return self if self.unit == "pre_activation" else replace(self, border="zeros")

    @property
    def soonest_traced(self) -> "BitSpec":
        """The spec, of those with the same parameters, whose trace takes the least time."""
        return self


def bit_fields(name: str) -> dict[str, Any]:
    """Returns the fields of a name: `BiT-R<layers>x<width factor>`; `AxialResNet-<layers>`; or `BiT`, whose
    size is None.

    Raises:
        UserError: no BiT has this name.
    """
    axial = re.fullmatch(r"AxialResNet-([1-9]\d{0,2})", name)
    if axial and int(axial[1]) in UNITS:
        return {"stages": UNITS[int(axial[1])], "width": ROOT_WIDTH, "unit": "axial"}
    found = re.fullmatch(r"BiT(?:-R([1-9]\d{0,2})x([1-9]\d{0,2}))?", name)
    layers, factor = found.groups() if found else ("0", "0")
    if layers is None:
        return {"stages": None, "width": None}
    if int(layers) not in UNITS:
        choose("model", name, BIT_NAMES, where="vit_jax/models/bit_spec.py")
    return {"stages": UNITS[int(layers)], "width": ROOT_WIDTH * int(factor)}


def bit_name(stages: tuple[int, ...], width: int, unit: UnitKind) -> str:
    """Returns the name of the models of this size; `BiT` if none has it."""
    layers = next((layers for layers, units in UNITS.items() if units == stages), None)
    if unit == "axial" and layers and width == ROOT_WIDTH:
        return f"AxialResNet-{layers}"
    return f"BiT-R{layers}x{width // ROOT_WIDTH}" if layers and width % ROOT_WIDTH == 0 else "BiT"
