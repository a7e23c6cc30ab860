"""The parts of a model's description: stem, tokens before the patches, positions, attention, blocks and head.

A field declares everything about itself in one place: its default; its type, which as a `Literal` lists the accepted
words; and its flat keyword, where that differs from its name.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from vit_jax import UserError, refuse
from vit_jax.models.resnet_stages import check_stages, resnet_stride
from vit_jax.models.spec_fields import image_size

# The implementations of each are in one dict: STEMS, EPSILONS, POSITIONS, ROTARIES, ATTENTIONS, POOLINGS, ACTIVATIONS,
# MLPS, BLOCKS, STOCHASTIC_DEPTHS and REMAT_POLICIES.
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
CHIP_KERNELS = ("fused", "cudnn")  # implementations that a chip may execute wrongly
PLAIN_FORMS = {"attention": "tokens_first", "mlp": "jit"}  # field -> what replaces them


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
    stages: tuple[int, ...] = ()  # units in each stage of the ResNet; empty: the ResNet is only its root
    width: int = field(default=64, metadata={"keyword": "stem_width"})  # channels of the ResNet's root
    # Of the ResNet's norms and of the standardisation of its weights: as the authors released it, or timm's.
    epsilons: StemEpsilons = field(default="released", metadata={"keyword": "stem_epsilons"})
    bias: bool = field(default=True, metadata={"keyword": "embed_bias"})  # of the projection
    pre_norm: bool = False  # a LayerNorm of all tokens with their positions, before the first block (CLIP, 2103.00020)
    # Red, green and blue values in [0, 1] become (value - mean) / std; the default leaves images in [-1, 1] as given.
    mean: tuple[float, ...] = field(default=(0.5, 0.5, 0.5), metadata={"keyword": "image_mean"})
    std: tuple[float, ...] = field(default=(0.5, 0.5, 0.5), metadata={"keyword": "image_std"})

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

    class_token: ClassToken = "auto"  # auto: where the pooling reads it; always: also where it does not
    registers: int = 0

    def __post_init__(self):
        """Raises UserError for a negative number."""
        check_least(self, 0, "registers")


@dataclass(frozen=True)
class PositionSpec:
    """How tokens know their place in the image (section 3.1, appendix D.4)."""

    kind: PositionKind = field(default="learned", metadata={"keyword": "position"})
    resolution: int | tuple[int, int] = 224  # pixels on a side, or (height, width)
    # Which tokens have a learned row. all: every token. class: the class token and the patches. patches: the patches
    # alone, as if the positions were added before the other tokens join.
    rows: PositionRows = field(default="all", metadata={"keyword": "position_rows"})
    # Where learned positions are added (Table 8). stem: to the output of the stem. blocks: to the input of every block,
    # with a table for each block. shared: to the input of every block, with one table for all blocks.
    place: PositionPlace = field(default="stem", metadata={"keyword": "position_place"})
    # Standard deviation of the initial values. The default is the authors' for learned positions at the stem. The paper
    # states none for other positions.
    std: float = field(default=0.02, metadata={"keyword": "position_std"})
    # The paper does not say which relative tables there are. block: one for each block. head: one for each head of each
    # block. model: one for all blocks.
    relative_tables: RelativeTables = "block"
    # The largest offset with a row of its own. Farther offsets share the row of the largest. 0: every offset has a row
    # of its own. The paper mentions no clipping.
    relative_clip: int = 0
    rotary: Rotary = "none"  # axial: queries and keys of patches are rotated by row and column as well (EVA-02)
    rotary_grid: int = 0  # patches on a side to which rows and columns are scaled for the rotation; 0: not scaled

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

    # auto: the fastest form for the platform
    kind: AttentionKind = field(default="auto", metadata={"keyword": "attention"})
    num_heads: int = 12
    qk_norm: bool = False  # a LayerNorm of each query and of each key, whose parameters the heads share
    # Which patches attend to which (models/attention_pattern.py). Not in the paper, whose section 2 discusses them.
    pattern: AttentionPattern = field(default="full", metadata={"keyword": "attention_pattern"})
    # Patches of a block, on a side for local2d; 0: as many as in a row of patches.
    window: int = field(default=0, metadata={"keyword": "attention_window"})

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
    """What is inside the blocks besides attention (section 3.1, appendix B.1). Rates are probabilities."""

    # standard: every token attends to all. axial: two blocks take the place of one; in the first a patch attends to its
    # row, in the second to its column (Axial-ViT, appendix D.6).
    kind: BlockKind = field(default="standard", metadata={"keyword": "block"})
    norm_epsilon: float = 1e-6  # of every LayerNorm
    activation: Activation = "gelu_tanh"  # of the MLP; gelu: exact; swiglu: gated, of two projections (2002.05202)
    layer_scale: float = 0.0  # initial value of the factor of each channel of a branch (LayerScale); 0: no factors
    dropout_rate: float = 0.0
    stochastic_depth: float = 0.0  # probability of dropping a branch in the last block
    # Over the blocks. linear: from 0 in the first to the probability above in the last. constant: the same in all.
    stochastic_depth_schedule: DepthSchedule = "linear"
    # auto: what `for_device` chooses, otherwise jit. fused: one kernel with the norm and the residual, in blocks that
    # allow it.
    mlp: MlpKind = "auto"

    def __post_init__(self):
        """Raises UserError for a value out of its range."""
        for name in ("dropout_rate", "stochastic_depth"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}.")
        refuse(
            (not 0 < self.norm_epsilon < 1, f"norm_epsilon must be above 0 and below 1, not {self.norm_epsilon}."),
            (not 0 <= self.layer_scale < math.inf, f"layer_scale must be 0 or more, not {self.layer_scale}."),
        )

    @property
    def allows_fused_mlp(self) -> bool:
        """Whether the MLP's branch has nothing but LayerNorm, dense layers and the approximate GELU: no dropout, no
        stochastic depth, no LayerScale. Only then one kernel computes it with its residual.
        """
        dropped = self.dropout_rate or self.stochastic_depth
        return self.activation == "gelu_tanh" and self.kind == "standard" and not (self.layer_scale or dropped)


@dataclass(frozen=True)
class HeadSpec:
    """From tokens to logits: pooling, the pre-training head's tanh layer, the linear classifier (section 3.1)."""

    num_classes: int = 1000  # 0: no classifier, the logits are the pooled representation
    # image: one row of logits for the image, from its pooled representation. patches: one for every patch, from its
    # token; patches of such a model may be masked (masked patch prediction).
    kind: HeadKind = field(default="image", metadata={"keyword": "head"})
    pooling: Pooling = "token"
    final_norm: FinalNorm = "tokens"  # what the last LayerNorm normalises: the tokens before the pooling, or its result
    pre_logits: bool = False
    representation_size: int = 0  # width of the tanh layer; 0: the model's width
    bias: float = field(default=0.0, metadata={"keyword": "head_bias"})  # initial value
    std: float = field(default=0.0, metadata={"keyword": "head_std"})  # standard deviation of the initial kernel
    # A second classifier, of the first register, which is then DeiT's distillation token (2012.12877). The logits are
    # the mean of both.
    distilled: bool = field(default=False, metadata={"keyword": "distilled_head"})

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
