"""BiT (arXiv 1912.11370): a ResNet with GroupNorm and standardised convolutions, in the two forms of its authors.

The pre-activation form is that of the released files; its arithmetic is that of google-research/big_vision,
models/bit_paper.py. The post-activation form has the units of the hybrids (`resnet.py`). With attention in these units
it is the ViT paper's AxialResNet (`axial_resnet.py`), or one of the ResNets that came before it: `stand_alone.py`,
`augmented.py`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models import axial_resnet, resnet
from vit_jax.models.augmented import augment
from vit_jax.models.bit_spec import COARSE_STAGE, BitRemat, BitSpec, Border, RootKind, UnitKind
from vit_jax.models.layers import classifier
from vit_jax.models.operations import PlainOps
from vit_jax.models.resnet import FeatureMap, Kernel, Stage, StdConv, StridedMap
from vit_jax.models.stand_alone import AttentionRoot, attend_nearby
from vit_jax.sharding import constrain

Images: TypeAlias = Float[Array, "batch height width 3"]  # pixels

KERNEL_EPSILON, NORM_EPSILON = 1e-10, 1e-5  # of the pre-activation form, as released

BORDERS: dict[Border, float] = {"zeros": 0.0, "lowest": -math.inf}


def standardise(kernel: Kernel) -> Kernel:
    """Returns (w - mean) / sqrt(variance + 1e-10), both of each filter."""
    centred = kernel - kernel.mean((0, 1, 2))
    return centred / jnp.sqrt((centred * centred).mean((0, 1, 2)) + KERNEL_EPSILON)


def conv(filters: int, size: int, name: str, stride: int = 1) -> StdConv:
    """Returns a convolution of the pre-activation form, padded by half of its kernel on each side."""
    return StdConv(filters, size, stride, padding=size // 2, standardise=standardise, name=name)


def norm(x: FeatureMap, name: str) -> FeatureMap:
    """Returns `x` after GroupNorm and ReLU. The variance is computed as the mean of (x - mean)²."""
    return nn.relu(resnet.group_norm(x, name, epsilon=NORM_EPSILON, fast_variance=False))


class PreActivationRoot(nn.Module):
    """A 7x7 convolution and 3x3 max pooling, each with stride 2. It has no norm, as the first unit begins with one."""

    spec: BitSpec

    @nn.compact
    def __call__(self, x: FeatureMap) -> StridedMap:
        """Returns the root's channels at a quarter of the rows and columns."""
        x = conv(self.spec.width, 7, "conv", stride=2)(x)
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=BORDERS[self.spec.border])
        return nn.max_pool(x, (3, 3), (2, 2), "VALID")


class PreActivationUnit(nn.Module):
    """A residual bottleneck: three times norm, ReLU and convolution. The sum is not activated.

    If the residual is projected, the projection gets the normalised and activated input, as in the second version of
    ResNets.
    """

    width: int
    stride: int = 1
    se_reduction: int = 0  # 0: no squeeze-and-excitation
    ops: PlainOps = PlainOps()

    @nn.compact
    def __call__(self, x: FeatureMap) -> StridedMap:
        """Returns `4 * width` channels."""
        residual, wide = x, 4 * self.width
        x = norm(x, "norm1")
        if self.stride > 1 or residual.shape[-1] != wide:
            residual = conv(wide, 1, "conv_proj", self.stride)(x)
        x = norm(conv(self.width, 1, "conv1")(x), "norm2")
        x = norm(conv(self.width, 3, "conv2", self.stride)(x), "norm3")
        return residual + resnet.recalibrate(conv(wide, 1, "conv3")(x), self.se_reduction, self.ops)


def augmented_fields(stage: int) -> dict[str, Any]:
    """Returns the fields that add attention to the units of a stage; none for stage 1, which has no attention."""
    return {"spatial": functools.partial(augment, pooling=1 + (stage == COARSE_STAGE))} if stage > 1 else {}


class Form(NamedTuple):
    """The parts in which the forms differ."""

    root: Callable[..., nn.Module]
    unit: type[nn.Module]
    last: Callable[[FeatureMap, str], FeatureMap]  # after the units
    unit_fields: Callable[[int], dict[str, Any]]  # number of a stage, from 1 -> fields of its units


def post_activation(
    unit_fields: Callable[[int], dict[str, Any]], epsilons: resnet.Epsilons = resnet.EPSILONS["released"]
) -> Form:
    """Returns a form with the root and the units of the hybrids.

    Args:
        unit_fields: number of a stage, from 1 -> fields of its units; `spatial` replaces their 3x3 convolution.
        epsilons: those of the root.
    """
    return Form(
        lambda spec, name: resnet.Root(spec.width, epsilons, name=name), resnet.Unit, lambda x, name: x, unit_fields
    )


AXIAL = {"spatial": axial_resnet.attend_axially, "epsilons": axial_resnet.EPSILONS}
FORMS: dict[UnitKind, Form] = {
    "pre_activation": Form(PreActivationRoot, PreActivationUnit, norm, lambda stage: {}),
    "post_activation": post_activation(lambda stage: {}),
    "axial": post_activation(lambda stage: AXIAL, axial_resnet.EPSILONS),
    "stand_alone": post_activation(lambda stage: {"spatial": attend_nearby}),
    "augmented": post_activation(augmented_fields),
}
ROOTS: dict[RootKind, Callable[[BitSpec], nn.Module]] = {
    "convolution": lambda spec: FORMS[spec.unit].root(spec, name="root"),
    "attention": lambda spec: AttentionRoot(spec.width, name="root"),
}

# What is computed again in the backward pass: nothing, or all units.
REMATS: dict[BitRemat, Callable[[type[nn.Module]], type[nn.Module]]] = {"none": lambda unit: unit, "full": nn.remat}


class BiT(nn.Module):
    """The whole model: root, stages, the mean over the feature map, head."""

    spec: BitSpec
    ops: PlainOps

    @nn.compact
    def __call__(
        self, images: Images, capture: tuple[str, ...] = ()
    ) -> tuple[Float[Array, "batch classes"], dict[str, Array]]:
        """Returns the logits in float32 and all intermediates, whatever `capture` names; see `Model.apply`."""
        spec = self.spec
        spec.check_images(images.shape[1:3])
        form = FORMS[spec.unit]
        unit: Callable[..., nn.Module] = REMATS[spec.remat](form.unit)
        x = constrain(images.astype(spec.dtype), resnet.DIMENSIONS)
        x = ROOTS[spec.root](spec)(x)
        out = {"root": x}
        for index, units in enumerate(spec.stages):
            name, fields = f"stage{index + 1}", form.unit_fields(index + 1)
            own = functools.partial(unit, se_reduction=spec.se_reduction, ops=self.ops, **fields)
            x = Stage(units, spec.width * 2**index, 2 if index else 1, unit=own, name=name)(x)
            out[name] = x
        x = form.last(x, "norm")
        out["tokens"] = x.reshape(x.shape[0], -1, x.shape[-1])
        x = out["pre_logits"] = constrain(x.mean((1, 2), dtype=jnp.float32), ("batch", "width"))
        if spec.num_classes:
            x = classifier(spec.num_classes, spec.head_std, spec.head_bias, "head", self.ops)(x)
            x = constrain(x, ("batch", "classes"))
        return x, out
