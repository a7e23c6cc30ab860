"""The layouts of Google's published files: vision_transformer's npz (ViT, hybrids, AugReg) and big_vision's.

Both are one table, from our names to where their values lie, with the few names in which they differ as data: a file is
read by the table, written by the same table, and what it must hold follows from it.

Source of the names: google-research/vision_transformer, vit_jax/checkpoint.py and models; google-research/big_vision,
models/vit.py.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vit_jax import UserError
from vit_jax.interop import class_names, mapping
from vit_jax.interop.mapping import Leaf, Part, Stack
from vit_jax.models import ModelSpec, image_size, resnet_stride

POSITION = "Transformer/posembed_input/pos_embedding"


@dataclasses.dataclass(frozen=True)
class Layout:
    """What distinguishes one of the layouts from the others."""

    name: str  # for messages
    prefix: str  # of every name
    numbers: tuple[int, int, int, int]  # behind LayerNorm, MultiHeadDotProductAttention, LayerNorm and MlpBlock
    position: str  # the position table
    class_row: bool  # the position table has a row for the class token
    scanned: bool = False  # the blocks are stacked


GOOGLE = Layout("google", "", (0, 1, 2, 3), POSITION, class_row=True)
BIG_VISION = Layout("big_vision", "params/", (0, 0, 1, 0), "pos_embedding", class_row=False)


def detect(names: Mapping[str, Any]) -> Layout | None:
    """Returns the layout that names of arrays are of, or None."""
    blocks = [re.match(r"(params/|opt/target/|)Transformer/encoderblock", name) for name in names]
    prefix = max((match[1] for match in blocks if match), default=None, key=len)
    if prefix is None:
        return None
    own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    google = any(re.match(r"Transformer/encoderblock_\d+/MlpBlock_3/", name) for name in own)
    base = GOOGLE if google else BIG_VISION
    scanned = any(name.startswith("Transformer/encoderblock/") for name in own)
    inside = google or POSITION in own  # the latter in big_vision's older files
    return dataclasses.replace(
        base, prefix=prefix, scanned=scanned, position=POSITION if inside else "pos_embedding", class_row=inside
    )


def places(spec: ModelSpec, layout: Layout) -> mapping.Table:
    """Returns where the parameters of a model lie in a layout."""
    norm1, attention, norm2, mlp = layout.numbers
    names: mapping.Table = {}

    def put(ours: str, theirs: str, kinds: tuple[str, ...] = ("kernel", "bias")) -> None:
        names.update({f"{ours}/{kind}": Leaf(f"{theirs}/{kind}") for kind in kinds})

    def put_norm(ours: str, theirs: str) -> None:
        put(ours, theirs, ("scale", "bias"))

    if spec.stem.kind == "resnet":
        put("stem/root/conv", "conv_root", ("kernel",))
        put_norm("stem/root/norm", "gn_root")
        for stage, unit, number in _convolutions(spec):
            ours, theirs = f"stem/stage{stage}/unit{unit}", f"block{stage}/unit{unit}"
            sep = "_" if number == "proj" else ""
            put(f"{ours}/conv{sep}{number}", f"{theirs}/conv{sep}{number}", ("kernel",))
            put_norm(f"{ours}/norm{sep}{number}", f"{theirs}/gn{sep}{number}")
    put("embed", "embedding")
    if spec.class_rows:
        names["cls"] = Leaf("cls", ones=2)
    if spec.position.kind == "learned":
        names["position"] = Leaf(layout.position, ones=1)

    blocks = "encoder/blocks"
    put_norm(f"{blocks}/norm1", f"LayerNorm_{norm1}")
    put_norm(f"{blocks}/norm2", f"LayerNorm_{norm2}")
    for dense in (0, 1):
        put(f"{blocks}/mlp/dense{dense + 1}", f"MlpBlock_{mlp}/Dense_{dense}")
    heads = f"MultiHeadDotProductAttention_{attention}"
    put(f"{blocks}/attention/out", f"{heads}/out")
    for kind, axis in (("kernel", 2), ("bias", 1)):  # behind the layer axis
        parts = [Leaf(f"{heads}/{part}/{kind}") for part in ("query", "key", "value")]
        names[f"{blocks}/attention/qkv/{kind}"] = Stack(axis, parts)
    for name in [name for name in names if name.startswith(blocks)]:
        names[name] = _layers(names[name], spec.depth, layout.scanned)
    put_norm("encoder/norm", "Transformer/encoder_norm")

    if spec.head.pooling == "map":
        names["map_head/probe"] = Leaf("MAPHead_0/probe", ones=2)
        for part in ("query", "key", "value", "out"):
            put(f"map_head/attention/{part}", f"MAPHead_0/MultiHeadDotProductAttention_0/{part}")
        put_norm("map_head/norm", "MAPHead_0/LayerNorm_0")
        for dense in (0, 1):
            put(f"map_head/mlp/dense{dense + 1}", f"MAPHead_0/MlpBlock_0/Dense_{dense}")
    if spec.head.pre_logits:
        put("pre_logits", "pre_logits")
    if spec.head.num_classes:
        put("head", "head")
    return names


def _convolutions(spec: ModelSpec) -> Iterator[tuple[int, int, str]]:
    """Yields (stage, unit, number) of every convolution of the stages."""
    for stage, units in enumerate(spec.stem.stages, 1):
        for unit in range(1, units + 1):
            yield from ((stage, unit, number) for number in (("1", "2", "3", "proj") if unit == 1 else "123"))


def _layers(part: Part, depth: int, scanned: bool) -> Part:
    """Returns where the stacked values lie of what `part` tells for one block."""

    def of(part: Part, block: str, less: int) -> Part:
        if isinstance(part, Stack):
            return Stack(part.axis - less, [of(one, block, less) for one in part.parts])
        return Leaf(f"Transformer/{block}/{part.name}")

    if scanned:
        return of(part, "encoderblock", 0)
    return Stack(0, [of(part, f"encoderblock_{index}", 1) for index in range(depth)])


def read(archive: mapping.Archive, layout: Layout, spec: ModelSpec, shapes: mapping.Shapes) -> dict[str, np.ndarray]:
    """Returns the parameters of a model by our names; `shapes` are theirs.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    less = _folded(layout, spec)
    if less:
        shapes = shapes | {"position": (shapes["position"][0] - 1, spec.width)}
    params = mapping.read(archive, places(spec, layout), shapes, layout.prefix)
    if less:
        params["position"] = np.pad(params["position"], ((1, 0), (0, 0)))
    return params


def arrays(params: dict[str, np.ndarray], spec: ModelSpec, layout: Layout) -> dict[str, np.ndarray]:
    """Returns the arrays of a file in this layout.

    Raises:
        UserError: the layout cannot express the model.
    """
    positions = ("learned",) if layout.name == "google" else ("learned", "sincos2d")
    if spec.position.kind not in positions:
        raise UserError(f"the {layout.name} layout has no positions {spec.position.kind}")
    if spec.position.kind == "learned" and spec.grid[0] != spec.grid[1]:
        rows, columns = spec.grid
        if layout.name == "big_vision":
            raise UserError(
                f"the big_vision layout holds the positions of square images only, not of {spec.grid} patches"
            )
        if math.isqrt(rows * columns) ** 2 == rows * columns:
            side = math.isqrt(rows * columns)
            raise UserError(
                f"the google layout does not say that there are {rows}x{columns} patches, and they would be read as "
                f"{side}x{side}"
            )
    if spec.head.pooling == "map" and layout.name == "google":
        raise UserError("the google layout has no attention pooling")
    if spec.stem.kind == "resnet" and layout.name == "big_vision":
        raise UserError("the big_vision layout has no hybrids")
    if _folded(layout, spec):
        first, rest = np.split(params["position"], [1])
        params = params | {"cls": params["cls"] + first[0], "position": rest}
    return mapping.split(places(spec, layout), params, layout.prefix)


def _folded(layout: Layout, spec: ModelSpec) -> bool:
    """Tells whether the class token's position is part of the class token: that sum is all that a model sees."""
    return bool(spec.class_rows) and spec.position.kind == "learned" and not layout.class_row


def infer(found: mapping.Archive, layout: Layout, resolution: Any = None) -> tuple[Layout, dict[str, Any]]:
    """Returns the layout, complete, and the fields of the model that arrays of these shapes are of.

    Args:
        found: headers by name.
        layout: as detected.
        resolution: of the images, if known; else the positions are taken for those of square ones.

    Raises:
        UserError: an array is missing that tells a field, or the positions are not those of square images.
    """

    def size(name: str, axis: int) -> int:
        shape = found[layout.prefix + name].shape
        if len(shape) < 2:
            raise UserError(f"{layout.prefix + name} is {list(shape)}, which tells nothing of the model")
        return shape[axis]

    given = None if resolution is None else image_size(resolution)
    own = {name.removeprefix(layout.prefix) for name in found if name.startswith(layout.prefix)}
    block = "Transformer/" + ("encoderblock" if layout.scanned else "encoderblock_0")
    _, attention, _, mlp = layout.numbers
    query = f"{block}/MultiHeadDotProductAttention_{attention}/query/kernel"
    learned = layout.name == "google" or layout.position in own
    telling = ["embedding/kernel", query, f"{block}/MlpBlock_{mlp}/Dense_0/kernel"]
    telling += [layout.position] if learned else []
    if missing := [f"missing {layout.prefix + name}" for name in telling if name not in own]:
        raise UserError(f"{'; '.join(missing)}: they tell what the model is")
    numbered = {match[0] for name in own if (match := re.match(r"Transformer/encoderblock_\d+/", name))}
    units = {match.groups() for name in own if (match := re.match(r"block(\d{1,3})/unit(\d{1,3})/", name))}
    counts = collections.Counter(int(stage) for stage, _ in units)
    stages = tuple(counts[stage] for stage in sorted(counts))
    patch_size = size("embedding/kernel", 0) * (resnet_stride(stages) if "conv_root/kernel" in own else 1)
    fields: dict[str, Any] = {
        "width": size("embedding/kernel", -1),
        "depth": size(query, 0) if layout.scanned else len(numbered),
        "mlp_dim": size(f"{block}/MlpBlock_{mlp}/Dense_0/kernel", -1),
        "num_heads": size(query, -2),
        "num_classes": size("head/kernel", -1) if "head/kernel" in own else 0,
        "pooling": "token" if "cls" in own else "map" if "MAPHead_0/probe" in own else "gap",
        "pre_logits": "pre_logits/kernel" in own,
        "representation_size": size("pre_logits/kernel", -1) if "pre_logits/kernel" in own else 0,
        "position": "learned" if learned else "sincos2d",
        "patch_size": patch_size,
    }
    if "conv_root/kernel" in own:
        fields |= {"stem": "resnet", "stages": stages, "stem_width": size("conv_root/kernel", -1)}
    if not learned:
        return layout, fields | {"resolution": given or (_near(224, patch_size),) * 2}
    rows, cls = size(layout.position, -2), int(fields["pooling"] == "token")
    with_class = [True] if layout.name == "google" else [False, True]
    # The published files are of square images: only what cannot be is taken for the resolution given.
    for images, class_row in itertools.product((None, given), with_class):
        grid = _grid(rows - cls * class_row, patch_size, images)
        if grid:
            stored = tuple(side * patch_size for side in grid)
            return dataclasses.replace(layout, class_row=class_row), fields | {"resolution": stored}
    if not cls and _grid(rows - 1, patch_size, None):
        raise UserError(f"missing {layout.prefix}cls: one of its {rows} position rows is that of a class token")
    raise UserError(
        f"its {rows} position rows are not those of square images; give resolution=(height, width) in pixels"
    )


def use(fields: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Returns how a published model is used, which its file does not say: keywords of `vit_jax.create`.

    Preprocessing is what the authors evaluate with: fine-tuned models of vision_transformer (vit_jax/input_pipeline.py)
    see the whole image, those of big_vision (configs/load_and_eval.py) the centre; which one cannot say of another
    shape than a square. So many classes as ImageNet and ImageNet-21k have are taken for theirs; the latter was learned
    by a sigmoid.
    """
    height, width = fields["resolution"]
    cropped = layout.name == "big_vision" and height == width
    sized = (
        f"resize_small({max(height // 7 * 8, height)})|central_crop({height})"
        if cropped
        else f"resize(({height},{width}))"
    )
    names = class_names.class_names(fields["num_classes"])
    loss = "sigmoid" if names and len(names) > 1000 else "softmax"
    return {"preprocess": f"{sized}|value_range(-1,1)", "class_names": names, "loss": loss}


def _near(resolution: int, patch_size: int) -> int:
    return max(1, resolution // patch_size) * patch_size


def _grid(rows: int, patch_size: int, size: tuple[int, int] | None) -> tuple[int, int] | None:
    """Returns the (rows, columns) of patches, if so many are those of images of this size or, without one, square."""
    side = math.isqrt(max(rows, 0))
    grid = (size[0] // patch_size, size[1] // patch_size) if size else (side, side)
    return grid if rows > 0 and grid[0] * grid[1] == rows else None
