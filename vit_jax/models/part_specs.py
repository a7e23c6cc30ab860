"""The parts of a model's description: stem, tokens before the patches, positions, attention, blocks and head.

`row` names the row of config/fields.py that has the default and the meaning of a field, and its flat keyword; the type
lists the accepted words as a `Literal`. A field that no configuration has is declared here.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from vit_jax import UserError, refuse
from vit_jax.models.resnet_stages import check_stages, resnet_stride
from vit_jax.models.spec_fields import image_size, row

# The forms of each are in one dict: STEMS, EPSILONS, POSITIONS, ROTARIES, POOLINGS, ACTIVATIONS, BLOCKS,
# STOCHASTIC_DEPTHS; of what changes no result, in `execution`: ATTENTIONS, MLPS and REMAT_POLICIES.
StemKind = Literal["patches", "resnet"]
StemEpsilons = Literal["released", "timm"]
ClassToken = Literal["auto", "always"]
DepthSchedule = Literal["linear", "constant"]
PositionKind = Literal["learned", "learned2d", "relative", "sincos2d", "sincos2d_moco", "none"]
PositionPlace = Literal["stem", "blocks", "shared"]
PositionOwner = Literal["model", "encoder", "block"]
RelativeTables = Literal["block", "head", "model"]
PositionRows = Literal["all", "class", "patches"]
Rotary = Literal["none", "axial"]
AttentionPattern = Literal["full", "local", "local2d", "strided", "fixed"]
AttentionKind = Literal["auto", "heads_first", "tokens_first", "fused", "cudnn"]
HeadKind = Literal["image", "patches"]
Pooling = Literal["token", "gap", "map", "token_gap"]
FinalNorm = Literal["tokens", "pooled"]
BlockKind = Literal["standard", "axial"]
Activation = Literal["gelu_tanh", "gelu", "swiglu"]
MlpKind = Literal["auto", "jit", "shard_map", "fused"]
Remat = Literal["none", "dots", "mlp", "attention", "full"]
Dtype = Literal["float32", "bfloat16"]
GradDtype = Literal["auto", "float32"]

LEARNED_POSITIONS: tuple[PositionKind, ...] = ("learned", "learned2d", "relative")  # made for one grid of patches
ADDED_POSITIONS: tuple[PositionKind, ...] = ("learned", "learned2d")  # of these, those that are added to tokens
PLACE_OWNERS: dict[PositionPlace, PositionOwner] = {"stem": "model", "blocks": "block", "shared": "encoder"}
CLASS_POOLINGS: tuple[Pooling, ...] = ("token", "token_gap")  # which read the class token


def check_least(part: object, least: int, *names: str) -> None:
    """Raises UserError if a field of these names is below `least`."""
    for name in names:
        if getattr(part, name) < least:
            bound = f"at least {least}" if least else "0 or more"
            raise UserError(f"{name} must be {bound}, not {getattr(part, name)}.")


@dataclass(frozen=True)
class StemSpec:
    """How an image becomes tokens: square patches, of its pixels or of a ResNet's feature map, each projected linearly
    (equation 1 and "Hybrid Architecture" in section 3.1).
    """

    patch_size: int = 16  # pixels of the image on a side, also where the patches are those of a feature map
    kind: StemKind = field(default="patches", metadata={"keyword": "stem"})
    stages: tuple[int, ...] = row("model.stages", ())  # empty: the ResNet is only its root
    width: int = field(default=64, metadata={"keyword": "stem_width"})  # channels of the ResNet's root
    epsilons: StemEpsilons = row("model.stem_epsilons")
    bias: bool = row("model.embed_bias")
    pre_norm: bool = row("model.pre_norm")
    mean: tuple[float, ...] = row("model.image_mean")
    std: tuple[float, ...] = row("model.image_std")

    def __post_init__(self):
        """Raises UserError for sizes that contradict each other."""
        check_least(self, 1, "patch_size")
        refuse(
            (
                self.kind == "patches" and (self.stages or self.width != 64 or self.epsilons != "released"),
                "stages, stem_width and stem_epsilons are fields of a ResNet; give stem='resnet' as well.",
            ),
            (
                len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0,
                "image_mean and image_std must have a value for red, green and blue; std above 0.",
            ),
        )
        check_stages(self.stages, self.width, "stem_width")
        if self.patch_size % self.stride:
            raise UserError(
                f"patch_size must be a multiple of {self.stride}, the stem's stride, not {self.patch_size}."
            )

    @property
    def stride(self) -> int:
        """Pixels of the image, on a side, under one position of the stem's output."""
        return 1 if self.kind == "patches" else resnet_stride(self.stages)

    @property
    def channels(self) -> int:
        """Channels of the stem's output."""
        if self.kind == "patches":
            return 3
        return self.width * (2 ** (len(self.stages) + 1) if self.stages else 1)

    @property
    def kernel_size(self) -> int:
        """Positions of the stem's output, on a side, in one patch."""
        return self.patch_size // self.stride


@dataclass(frozen=True)
class PrefixSpec:
    """The learned tokens before those of the patches: a class token (section 3.1), then registers (2309.16588)."""

    class_token: ClassToken = row("model.class_token")
    registers: int = row("model.registers")

    def __post_init__(self):
        """Raises UserError for a negative number."""
        check_least(self, 0, "registers")


@dataclass(frozen=True)
class PositionSpec:
    """How tokens know their place in the image (section 3.1, appendix D.4)."""

    kind: PositionKind = row("model.position")
    resolution: int | tuple[int, int] = row("resolution")  # pixels on a side, or (height, width)
    rows: PositionRows = row("model.position_rows")
    place: PositionPlace = row("model.position_place")
    std: float = row("model.position_std")
    relative_tables: RelativeTables = row("model.relative_tables")
    relative_clip: int = row("model.relative_clip")
    rotary: Rotary = row("model.rotary")
    rotary_grid: int = row("model.rotary_grid")

    def __post_init__(self):
        """Raises UserError for a resolution below one pixel, or fields of another kind of positions."""
        image_size(self.resolution)
        refuse(
            (
                self.place != "stem" and self.kind not in ADDED_POSITIONS,
                f"position_place={self.place} needs position={' or '.join(ADDED_POSITIONS)}; with "
                f"position={self.kind} set position_place=stem.",
            ),
            (
                self.kind != "relative" and (self.relative_tables, self.relative_clip) != ("block", 0),
                "relative_tables and relative_clip are fields of position='relative'; give that as well.",
            ),
            (not 0 <= self.std < math.inf, f"position_std must be 0 or more, not {self.std}."),
            (
                self.rotary_grid < 0 or (self.rotary_grid and self.rotary == "none"),
                f"rotary_grid={self.rotary_grid} must be 0 or more, and 0 without rotary='axial'.",
            ),
        )
        check_least(self, 0, "relative_clip")

    @property
    def is_relative(self) -> bool:
        """Whether relative positions are added to the scores of the attention before their softmax."""
        return self.kind == "relative"

    @property
    def owner(self) -> PositionOwner:
        """Which module has the parameters: the model, the encoder (all blocks share them) or each block."""
        if self.is_relative:
            return "encoder" if self.relative_tables == "model" else "block"
        return PLACE_OWNERS[self.place]

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return image_size(self.resolution)


@dataclass(frozen=True)
class AttentionSpec:
    """Multi-head self-attention (appendix A) and how it is computed."""

    kind: AttentionKind = row("model.attention")
    num_heads: int = row("model.num_heads", 12)
    qk_norm: bool = row("model.qk_norm")
    pattern: AttentionPattern = row("model.attention_pattern")
    window: int = row("model.attention_window")

    def __post_init__(self):
        """Raises UserError for no heads, a window without a pattern, or local2d without a window."""
        check_least(self, 1, "num_heads")
        refuse(
            (
                self.window < 0 or (self.window and self.pattern == "full"),
                f"attention_window={self.window} must be 0 or more, and 0 for attention_pattern full.",
            ),
            (
                self.pattern == "local2d" and not self.window,
                "attention_pattern local2d needs attention_window, the side of a block in patches.",
            ),
        )

    @property
    def is_sparse(self) -> bool:
        """Whether a patch attends to some of the patches only."""
        return self.pattern != "full"


@dataclass(frozen=True)
class BlockSpec:
    """The parts of the blocks besides attention (section 3.1, appendix B.1). Rates are probabilities."""

    # standard: every token attends to all. axial: two blocks take the place of one; in the first a patch attends to its
    # row, in the second to its column (Axial-ViT, appendix D.6).
    kind: BlockKind = field(default="standard", metadata={"keyword": "block"})
    norm_epsilon: float = row("model.norm_epsilon")
    activation: Activation = row("model.activation")
    layer_scale: float = row("model.layer_scale")
    dropout_rate: float = row("model.dropout_rate")
    stochastic_depth: float = row("model.stochastic_depth")
    stochastic_depth_schedule: DepthSchedule = row("model.stochastic_depth_schedule")
    mlp: MlpKind = row("model.mlp")  # auto: what `for_device` chooses, otherwise jit

    def __post_init__(self):
        """Raises UserError for a value out of its range."""
        for name in ("dropout_rate", "stochastic_depth"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}.")
        refuse(
            (not 0 < self.norm_epsilon < 1, f"norm_epsilon must be above 0 and below 1, not {self.norm_epsilon}."),
            (not 0 <= self.layer_scale < math.inf, f"layer_scale must be 0 or more, not {self.layer_scale}."),
        )


@dataclass(frozen=True)
class HeadSpec:
    """From tokens to logits: pooling, the pre-training head's tanh layer, the linear classifier (section 3.1)."""

    num_classes: int = 1000  # 0: no classifier, the logits are the pooled representation
    # image: one row of logits for the image, from its pooled representation. patches: one for every patch, from its
    # token; patches of such a model may be masked (masked patch prediction).
    kind: HeadKind = field(default="image", metadata={"keyword": "head"})
    pooling: Pooling = row("model.pooling")
    final_norm: FinalNorm = row("model.final_norm")
    pre_logits: bool = row("model.pre_logits")
    representation_size: int = row("model.representation_size", 0)  # 0: the model's width
    bias: float = row("model.head_bias")
    std: float = row("model.head_std")
    distilled: bool = row("model.distilled_head")

    def __post_init__(self):
        """Raises UserError for a negative number, or values that contradict each other."""
        check_least(self, 0, "num_classes", "representation_size")
        plain = (self.kind, self.pooling, self.final_norm, self.pre_logits) == ("image", "token", "tokens", False)
        refuse(
            (
                self.representation_size and not self.pre_logits,
                "representation_size is the width of the pre_logits layer; give pre_logits=True as well.",
            ),
            (
                self.kind == "patches" and self.final_norm == "pooled",
                "head=patches needs final_norm=tokens, not final_norm=pooled.",
            ),
            (
                self.distilled and not plain,
                "distilled_head is a second classifier beside that of the class token: it needs head=image, "
                "pooling=token, final_norm=tokens and pre_logits=False.",
            ),
        )
