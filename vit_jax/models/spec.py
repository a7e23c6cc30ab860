"""The specification of a ViT as frozen dataclasses: its parts, then the whole. Users give all fields by flat keyword.

`row` names the row of config/fields.py that has the default and the meaning of a field, and its flat keyword; the type
lists the accepted words as a `Literal`. A field that no configuration has is declared here.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from vit_jax import UserError, refuse
from vit_jax.config import FIELDS
from vit_jax.models.flat_keywords import image_size, row
from vit_jax.models.resnet_stages import check_stages, resnet_stride

# The forms of each are in one dict: STEMS, EPSILONS, POSITIONS, ROTARIES, POOLINGS, ACTIVATIONS, NORMS, BLOCKS,
# STOCHASTIC_DEPTHS; of what changes no result, in `execution`: ATTENTIONS, MLPS and REMAT_POLICIES.
StemKind = Literal["patches", "resnet"]
StemEpsilons = Literal["released", "timm"]
ClassToken = Literal["auto", "always"]
DepthSchedule = Literal["linear", "constant"]
PositionKind = Literal["learned", "learned2d", "relative", "relative_bias", "sincos2d", "sincos2d_moco", "none"]
PositionPlace = Literal["stem", "blocks", "shared"]
PositionOwner = Literal["model", "encoder", "block"]
RelativeTables = Literal["block", "head", "model"]
PositionRows = Literal["all", "class", "patches"]
Rotary = Literal["none", "axial", "axial_xy", "centred"]
BiasedProjections = Literal["all", "query_value", "none"]
AttentionPattern = Literal["full", "local", "local2d", "strided", "fixed"]
AttentionKind = Literal["auto", "heads_first", "tokens_first", "fused", "cudnn"]
HeadKind = Literal["image", "patches"]
Pooling = Literal["token", "gap", "map", "token_gap"]
FinalNorm = Literal["tokens", "pooled"]
BlockKind = Literal["standard", "axial"]
Activation = Literal["gelu_tanh", "gelu", "quick_gelu", "swiglu"]
NormKind = Literal["layer", "rms"]
MlpKind = Literal["auto", "jit", "shard_map", "fused"]
Remat = Literal["none", "dots", "mlp", "attention", "full"]
Dtype = Literal["float32", "bfloat16"]
GradDtype = Literal["auto", "float32"]

ROTARY_THETA: float = FIELDS["model.rotary_theta"].default
RELATIVE_POSITIONS: tuple[PositionKind, ...] = ("relative", "relative_bias")
LEARNED_POSITIONS: tuple[PositionKind, ...] = ("learned", "learned2d", *RELATIVE_POSITIONS)  # made for one grid
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
    rotary_theta: float = row("model.rotary_theta")

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
                self.rotary_grid < 0 or (self.rotary_grid and self.rotary not in ("axial", "axial_xy")),
                f"rotary_grid={self.rotary_grid} must be 0 or more, and 0 without rotary='axial' or 'axial_xy'.",
            ),
            (not 1 < self.rotary_theta < math.inf, f"rotary_theta must be above 1, not {self.rotary_theta}."),
            (
                self.rotary == "none" and self.rotary_theta != ROTARY_THETA,
                "rotary_theta is a field of rotary='axial', 'axial_xy' and 'centred'; give one of these as well.",
            ),
        )
        check_least(self, 0, "relative_clip")

    @property
    def is_relative(self) -> bool:
        """Whether relative positions are added to the scores of the attention before their softmax."""
        return self.kind in RELATIVE_POSITIONS

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
    qkv_bias: BiasedProjections = row("model.qkv_bias")
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
    norm: NormKind = row("model.norm")
    norm_epsilon: float = row("model.norm_epsilon")
    dense_bias: bool = row("model.dense_bias")
    activation: Activation = row("model.activation")
    mlp_norm: bool = row("model.mlp_norm")
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
    map_heads: int = row("model.map_heads")
    map_mlp_dim: int = row("model.map_mlp_dim")
    map_prefix: bool = row("model.map_prefix")
    final_norm: FinalNorm = row("model.final_norm")
    pre_logits: bool = row("model.pre_logits")
    representation_size: int = row("model.representation_size", 0)  # 0: the model's width
    projection: int = row("model.projection")
    bias: float = row("model.head_bias")
    std: float = row("model.head_std")
    distilled: bool = row("model.distilled_head")

    def __post_init__(self):
        """Raises UserError for a negative number, or values that contradict each other."""
        check_least(self, 0, "num_classes", "representation_size", "projection", "map_heads", "map_mlp_dim")
        plain = (self.kind, self.pooling, self.final_norm, self.pre_logits) == ("image", "token", "tokens", False)
        refuse(
            (
                self.pooling != "map" and (self.map_heads or self.map_mlp_dim or self.map_prefix),
                "map_heads, map_mlp_dim and map_prefix are fields of pooling='map'; give that as well.",
            ),
            (
                self.representation_size and not self.pre_logits,
                "representation_size is the width of the pre_logits layer; give pre_logits=True as well.",
            ),
            (
                self.projection and (self.pre_logits or self.kind == "patches" or self.distilled),
                "projection follows the pooling of one head: it needs pre_logits=False, head=image and "
                "distilled_head=False.",
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


def _check_parts(spec: "ModelSpec") -> None:
    """Raises UserError for parts that do not suit each other."""
    position, attention, is_axial = spec.position, spec.attention, spec.block.kind == "axial"
    refuse(
        (
            spec.width % attention.num_heads,
            f"width {spec.width} is not divisible by num_heads {attention.num_heads}.",
        ),
        (
            spec.head.map_heads and spec.width % spec.head.map_heads,
            f"width {spec.width} is not divisible by map_heads {spec.head.map_heads}.",
        ),
        (
            position.kind in ("sincos2d", "sincos2d_moco") and (spec.width % 4 or spec.width < 8),
            f"position {position.kind} needs a width of 8 or more divisible by 4, not {spec.width}.",
        ),
        (
            position.kind == "learned2d" and spec.width % 2,
            f"position learned2d needs an even width, half for each axis, not {spec.width}.",
        ),
        (
            position.rotary != "none" and spec.head_dim % 4,
            f"rotary {position.rotary} needs heads of a multiple of 4 channels, not {spec.head_dim}.",
        ),
        (
            is_axial and attention.is_sparse,
            f"axial blocks have a pattern of their own; leave attention_pattern full, not {attention.pattern}.",
        ),
        (
            spec.head.distilled and not spec.prefix.registers,
            "distilled_head reads the first register, but there is none; set registers=1.",
        ),
        (
            is_axial and spec.prefix_rows,
            "axial blocks have no place for a class token or registers: set pooling to gap or map, class_token to auto "
            "and registers to 0.",
        ),
        (
            is_axial and (position.owner != "model" or position.rotary != "none"),
            "axial blocks get positions at the stem only: set position_place=stem, rotary=none and another "
            "position than relative and relative_bias.",
        ),
    )


@dataclass(frozen=True)
class ModelSpec:
    """The complete specification of a Vision Transformer. Widths are in channels."""

    family: ClassVar = "ViT"
    width: int = row("model.width", 768)
    depth: int = row("model.depth", 12)
    mlp_dim: int = row("model.mlp_dim", 3072)
    stem: StemSpec = StemSpec()
    prefix: PrefixSpec = PrefixSpec()
    position: PositionSpec = PositionSpec()
    attention: AttentionSpec = AttentionSpec()
    block: BlockSpec = BlockSpec()
    head: HeadSpec = HeadSpec()
    dtype: Dtype = row("model.dtype", "float32")
    grad_dtype: GradDtype = row("optim.grad_dtype")
    remat: Remat = row("model.remat")
    scan: bool = row("model.scan")

    def __post_init__(self):
        """Raises UserError for values that contradict each other."""
        check_least(self, 1, "width", "depth", "mlp_dim")
        _check_parts(self)
        rows, columns = self.grid
        largest = max(rows, columns) if self.attention.pattern == "local2d" else rows * columns
        if self.attention.window > largest:
            raise UserError(f"attention_window must be at most {largest}, not {self.attention.window}.")

    @property
    def canonical(self) -> "ModelSpec":
        """The spec with defaults in place of values that change nothing, so that equal models have equal specs."""
        head, prefix, position = self.head, self.prefix, self.position
        if head.representation_size == self.width:
            head = replace(head, representation_size=0)
        if not head.num_classes:
            head = replace(head, distilled=False)
        if head.map_heads == self.attention.num_heads:
            head = replace(head, map_heads=0)
        if head.map_mlp_dim == self.mlp_dim:
            head = replace(head, map_mlp_dim=0)
        if head.pooling in CLASS_POOLINGS:
            prefix = replace(prefix, class_token="auto")
        if position.kind not in LEARNED_POSITIONS:
            position = replace(position, rows="all", std=PositionSpec.std)
        elif self.position_rows == self.prefix_rows:
            position = replace(position, rows="all")
        return replace(self, head=head, prefix=prefix, position=position)

    @property
    def quick_to_trace(self) -> "ModelSpec":
        """A spec with the same parameters that is traced faster: one block is traced instead of every block."""
        return replace(self, scan=True, remat="none")

    @property
    def sizes(self) -> dict[str, Any]:
        """The fields that determine how large the model is."""
        return {
            "width": self.width,
            "depth": self.depth,
            "mlp_dim": self.mlp_dim,
            "num_heads": self.attention.num_heads,
        }

    @property
    def feature_width(self) -> int:
        """Width of `pre_logits`, the features that evaluations learn from."""
        if self.head.projection:
            return self.head.projection
        if self.head.pre_logits and self.head.kind == "image":
            return self.head.representation_size or self.width
        return self.width * (2 if self.head.pooling == "token_gap" else 1)

    @property
    def map_spec(self) -> "ModelSpec":
        """The spec of the attention and of the MLP of attention pooling; see `pooling.AttentionPooling`."""
        attention = replace(self.attention, num_heads=self.head.map_heads or self.attention.num_heads)
        position = PositionSpec("none", self.position.resolution)
        return replace(self, mlp_dim=self.head.map_mlp_dim or self.mlp_dim, attention=attention, position=position)

    @property
    def split_sizes(self) -> dict[str, int]:
        """Dimension of the parameters that a mesh axis must divide -> its size."""
        return {"heads": self.attention.num_heads, "mlp": self.mlp_dim}

    @property
    def traits(self) -> list[str]:
        """Phrases for people to read that describe the positions, the pooling and the head."""
        head = self.head
        tanh_layer = f"a tanh layer of width {head.representation_size}" if head.representation_size else "a tanh layer"
        place = {"stem": "", "blocks": " in every block", "shared": " shared by every block"}[self.position.place]
        words = [f"{self.position.kind} positions{place}", f"{head.pooling} pooling"]
        words += ["a distillation token with a head"] if head.distilled else []
        return words + ([tanh_layer] if head.pre_logits else [])

    @property
    def tile(self) -> int:
        """The number of pixels of which both sides of an image must be a multiple."""
        return self.stem.patch_size

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.width // self.attention.num_heads

    @property
    def kernel_dtype(self) -> Dtype:
        """The dtype of the kernels' gradients. A kernel is cast to it first, and then to that of the activations."""
        return self.dtype if self.grad_dtype == "auto" else self.grad_dtype

    @property
    def has_sized_parameters(self) -> bool:
        """Whether the positions have parameters that are for one `resolution` only; True for clipped relative ones."""
        return self.position.kind in LEARNED_POSITIONS

    @property
    def class_rows(self) -> int:
        """The number of class tokens, 1 or 0. The class token is the first token."""
        return int(self.head.pooling in CLASS_POOLINGS or self.prefix.class_token == "always")

    @property
    def prefix_rows(self) -> int:
        """The number of tokens before the patches: the class token and the registers."""
        return self.class_rows + self.prefix.registers

    @property
    def position_rows(self) -> int:
        """The number of rows that a table of positions has for tokens before the patches."""
        return {"all": self.prefix_rows, "class": self.class_rows, "patches": 0}[self.position.rows]

    @property
    def tokens(self) -> int:
        """The number of tokens of an image of the size `resolution`."""
        return self.prefix_rows + math.prod(self.grid)

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches at `resolution`.

        Raises:
            UserError: the patch size does not divide the image.
        """
        patch, (height, width) = self.stem.patch_size, self.position.image_size
        if height % patch or width % patch or min(height, width) < patch:
            near = max(patch, round(height / patch) * patch)
            raise UserError(
                f"patches of {patch} pixels do not tile {height}x{width} images; resolution {near} would fit."
            )
        return height // patch, width // patch
