"""What a model is, as plain frozen values: nested here, flat keywords for users."""

import dataclasses
from typing import Any

from vit_jax import UserError, choose

POOLINGS = ("token", "gap", "map")
POSITIONS = ("learned", "sincos2d", "sincos2d_moco", "none")
STEMS = ("patches", "resnet")
ATTENTIONS = ("auto", "heads_first", "tokens_first")
MLPS = ("jit", "shard_map")
DTYPES = ("float32", "bfloat16")
REMATS = ("none", "dots", "full")
MOST_STAGES, MOST_UNITS = 8, 100  # of a ResNet; one of 200 layers has 4 and 66
LARGEST = 2**40  # of whole numbers


def _at_least_one(part: Any, name: str) -> None:
    if getattr(part, name) < 1:
        raise UserError(f"{name} must be at least 1, not {getattr(part, name)}.")


def resnet_stride(stages: tuple[int, ...]) -> int:
    """Returns the pixels, on a side, under one position of the feature map of a ResNet with such stages."""
    return 4 * 2 ** max(0, len(stages) - 1)


@dataclasses.dataclass(frozen=True)
class Stem:
    """How an image becomes tokens: square patches, of its pixels or of a ResNet's feature map, each projected linearly
    (equation 1 and "Hybrid Architecture" in section 3.1).
    """

    patch_size: int = 16  # pixels of the image on a side, whatever the patches are taken of
    stem: str = "patches"
    stages: tuple[int, ...] = ()  # units in each stage of the ResNet; none: it is its root only
    stem_width: int = 64  # channels of the ResNet's root

    def __post_init__(self):
        """Raises UserError for an unknown stem, or sizes that do not go together."""
        _at_least_one(self, "patch_size")
        choose("stem", self.stem, STEMS)
        if self.stem == "patches" and (self.stages or self.stem_width != 64):
            raise UserError("stages and stem_width are a ResNet's; give stem='resnet' as well.")
        if len(self.stages) > MOST_STAGES or sum(self.stages) > MOST_UNITS:
            raise UserError(f"a ResNet has at most {MOST_STAGES} stages and {MOST_UNITS} units in all.")
        if min(self.stages, default=1) < 1:
            raise UserError(f"each of the stages must have at least 1 unit, not {self.stages}.")
        if self.stem_width < 1 or self.stem_width % 32:
            raise UserError(f"stem_width must be a multiple of 32, the groups of its norms, not {self.stem_width}.")
        if self.patch_size % self.stride:
            size, stride = self.patch_size, self.stride
            raise UserError(f"patch_size must be a multiple of {stride}, the stem's stride, not {size}.")

    @property
    def stride(self) -> int:
        """Pixels of the image, on a side, under one position of what the patches are taken of."""
        return 1 if self.stem == "patches" else resnet_stride(self.stages)

    @property
    def channels(self) -> int:
        """Channels of what the patches are taken of."""
        if self.stem == "patches":
            return 3
        return self.stem_width * (2 ** (len(self.stages) + 1) if self.stages else 1)

    @property
    def kernel_size(self) -> int:
        """Positions of what the patches are taken of, on a side of one patch."""
        return self.patch_size // self.stride


@dataclasses.dataclass(frozen=True)
class Position:
    """How tokens know where they are (section 3.1, appendix D.4)."""

    position: str = "learned"
    resolution: int | tuple[int, int] = 224  # pixels on a side, or (height, width)

    def __post_init__(self):
        """Raises UserError for an unknown kind or a resolution that is not one or two sizes."""
        choose("position", self.position, POSITIONS)
        if min(self.image_size) < 1:
            raise UserError(f"resolution must be at least 1 pixel, not {self.resolution}.")

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.resolution if isinstance(self.resolution, tuple) else (self.resolution, self.resolution)


@dataclasses.dataclass(frozen=True)
class Attention:
    """Multi-head self-attention (appendix A) and the way it is computed."""

    attention: str = "auto"  # as the platform wants it that the model is lowered for
    num_heads: int = 12

    def __post_init__(self):
        """Raises UserError for an unknown implementation or no heads."""
        choose("attention", self.attention, ATTENTIONS)
        _at_least_one(self, "num_heads")


@dataclasses.dataclass(frozen=True)
class Head:
    """What reads the tokens: pooling, the pre-training head's tanh layer, the linear classifier (section 3.1)."""

    num_classes: int = 1000  # 0: no classifier, the logits are the pooled representation
    pooling: str = "token"
    pre_logits: bool = False
    representation_size: int = 0  # width of the tanh layer; 0: the model's
    head_bias: float = 0.0

    def __post_init__(self):
        """Raises UserError for an unknown pooling, a negative number, or the width of a layer that is not there."""
        choose("pooling", self.pooling, POOLINGS)
        for name in ("num_classes", "representation_size"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must be 0 or more, not {getattr(self, name)}.")
        if self.representation_size and not self.pre_logits:
            raise UserError("representation_size is the width of the pre_logits layer; give pre_logits=True as well.")


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A Vision Transformer, complete. Widths are in channels, rates are probabilities."""

    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    stem: Stem = Stem()
    position: Position = Position()
    attention: Attention = Attention()
    head: Head = Head()
    dropout_rate: float = 0.0
    stochastic_depth: float = 0.0  # rate of dropping a branch in the last block, rising linearly from 0
    dtype: str = "float32"  # of the activations; parameters, softmax, statistics and logits are float32
    mlp: str = "jit"
    remat: str = "none"
    scan: bool = False

    def __post_init__(self):
        """Raises UserError for values that do not go together."""
        for name in ("width", "depth", "mlp_dim"):
            _at_least_one(self, name)
        for name in ("dropout_rate", "stochastic_depth"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}.")
        choose("dtype", self.dtype, DTYPES)
        choose("mlp", self.mlp, MLPS)
        choose("remat", self.remat, REMATS)
        if self.width % self.attention.num_heads:
            raise UserError(f"width {self.width} is not divisible by num_heads {self.attention.num_heads}.")
        position = self.position.position
        if position in ("sincos2d", "sincos2d_moco") and (self.width % 4 or self.width < 8):
            raise UserError(f"position {position} needs a width of 8 or more divisible by 4, not {self.width}.")
        self.grid_of(self.position.image_size)

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.width // self.attention.num_heads

    @property
    def class_rows(self) -> int:
        """Tokens before the patches: 1 with a class token, else 0."""
        return int(self.head.pooling == "token")

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches at `resolution`."""
        return self.grid_of(self.position.image_size)

    def grid_of(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Returns (rows, columns) of patches of an image of (height, width) pixels.

        Raises:
            UserError: the patch size does not divide the image.
        """
        patch = self.stem.patch_size
        height, width = image_size
        if height % patch or width % patch or min(height, width) < patch:
            near = max(patch, round(height / patch) * patch)
            raise UserError(
                f"patches of {patch} pixels do not tile {height}x{width} images; resolution {near} would do."
            )
        return height // patch, width // patch


def flatten(spec: ModelSpec) -> dict[str, Any]:
    """Returns every field of a spec and of its parts by its own name: names are unique over all parts."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(spec):
        value: Any = getattr(spec, field.name)
        if _is_part(value):
            flat |= dataclasses.asdict(value)
        else:
            flat[field.name] = value
    return flat


def replace(spec: ModelSpec, **flat: Any) -> ModelSpec:
    """Returns a spec with fields replaced, wherever in it they lie.

    Args:
        spec: the spec to start from.
        **flat: values by field name; None leaves the field as it is.

    Raises:
        UserError: no such field, a value of another type, or values that do not go together.
    """
    known = flatten(spec)
    for name in flat:
        choose("model field", name, known)
    given = {name: _typed(name, value, known[name]) for name, value in flat.items() if value is not None}
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(spec):
        value: Any = getattr(spec, field.name)
        if _is_part(value):
            inner = {part.name: given[part.name] for part in dataclasses.fields(value) if part.name in given}
            changes[field.name] = dataclasses.replace(value, **inner)
        elif field.name in given:
            changes[field.name] = given[field.name]
    changed = dataclasses.replace(spec, **changes)
    if changed.head.representation_size == changed.width:  # one model, one spec
        changed = dataclasses.replace(changed, head=dataclasses.replace(changed.head, representation_size=0))
    return changed


def image_size(resolution: Any) -> tuple[int, int]:
    """Returns (height, width) in pixels of a resolution as a user gives it.

    Raises:
        UserError: it is not one or two sizes.
    """
    return Position(resolution=_typed("resolution", resolution, 0)).image_size


def _typed(name: str, value: Any, example: Any) -> Any:
    """Returns a value as JSON, NumPy or a config gave it, in the type of the field."""
    if hasattr(value, "tolist"):  # of NumPy
        value = value.tolist()
    if name == "resolution" and isinstance(value, tuple | list):
        if len(value) != 2:
            raise UserError(f"resolution must be one size or (height, width), not {value!r}.")
        height, width = (_typed(name, side, 0) for side in value)
        return height if height == width else (height, width)
    if isinstance(example, tuple):
        if not isinstance(value, tuple | list):
            raise UserError(f"{name} must be a list of whole numbers, not {value!r}.")
        return tuple(_typed(name, each, 0) for each in value)
    kind = int if name == "resolution" else type(example)
    accepted = {int: int, float: int | float, str: str, bool: bool}[kind]
    whole = kind is int and isinstance(value, float) and value.is_integer()
    if (not isinstance(value, accepted) and not whole) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{name} must be {_article(kind)}, not {value!r}.")
    if kind is int and abs(value) > LARGEST:
        raise UserError(f"{name} must be at most {LARGEST:,}.")
    return kind(value)


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "a string", bool: "True or False"}[kind]


def _is_part(value: Any) -> bool:
    return dataclasses.is_dataclass(value)
