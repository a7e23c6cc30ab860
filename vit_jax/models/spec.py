"""The specification of a ViT as frozen dataclasses. They are nested; users give all fields by flat keyword."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from vit_jax import UserError, refuse
from vit_jax.models.part_specs import (
    CLASS_POOLINGS,
    LEARNED_POSITIONS,
    AttentionSpec,
    BlockSpec,
    Dtype,
    GradDtype,
    HeadSpec,
    PositionSpec,
    PrefixSpec,
    Remat,
    StemSpec,
    check_least,
)
from vit_jax.models.spec_fields import row


def _check_parts(spec: "ModelSpec") -> None:
    """Raises UserError for parts that do not suit each other."""
    position, attention, is_axial = spec.position, spec.attention, spec.block.kind == "axial"
    refuse(
        (
            spec.width % attention.num_heads,
            f"width {spec.width} is not divisible by num_heads {attention.num_heads}.",
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
            position.rotary == "axial" and spec.head_dim % 4,
            f"rotary axial needs heads of a multiple of 4 channels, not {spec.head_dim}.",
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
            "position than relative.",
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
        if self.head.pre_logits and self.head.kind == "image":
            return self.head.representation_size or self.width
        return self.width * (2 if self.head.pooling == "token_gap" else 1)

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
