"""The ViTs in Google's published .npz files: those of vision_transformer (ViT, hybrids, AugReg) and of big_vision.

One table serves both: our name -> the arrays of the file. The few names in which the layouts differ are data. A file
states neither its model nor the preprocessing of its images: both are inferred from its arrays.

Source of the names: google-research/vision_transformer, vit_jax/checkpoint.py and models; google-research/big_vision,
models/vit.py.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_jax import UserError
from vit_jax.interop.archives import Archive
from vit_jax.interop.google_bit import UNIT
from vit_jax.interop.layout import (
    Family,
    Leaf,
    ParameterTable,
    Size,
    Stack,
    convolutions,
    count_units,
    image_sizes,
    matches,
    no_image_size,
    of_blocks,
    required_defaults,
)
from vit_jax.models import ModelSpec, resnet_stride

POSITION = "Transformer/posembed_input/pos_embedding"
BLOCKS = "encoder/blocks"  # prefix of our names
QKV = ("query", "key", "value")
# Fields that the files of these layouts state by their arrays or names. All other fields are as in the first ViTs.
STATED = ("width", "depth", "mlp_dim", "num_heads", "pooling", "position", "position_rows", "stages", "stem")


class Names(NamedTuple):
    """The names in which the files of one layout, or older files of it, differ from those of the other."""

    layout: str
    numbers: tuple[int, int, int, int]  # numbers after LayerNorm, MultiHeadDotProductAttention, LayerNorm, MlpBlock
    position: str  # the name of the position table
    scanned: bool = False  # the blocks are stacked


GOOGLE_NAMES = Names("google", (0, 1, 2, 3), POSITION)
BIG_VISION_NAMES = Names("big_vision", (0, 0, 1, 0), "pos_embedding")


def parameter_table(spec: ModelSpec, names: Names) -> ParameterTable:
    """Returns our name -> the arrays of a file that the parameter consists of, for the parameters of a model."""
    table = _stem_table(spec) if spec.stem.kind == "resnet" else {}
    table |= _leaves("embed", "embedding")
    if spec.class_rows:
        table["cls"] = Leaf("cls", ones=2)
    if spec.position.kind == "learned":
        table["position"] = Leaf(names.position, ones=1)
    numbered = [f"Transformer/encoderblock_{index}/" for index in range(spec.depth)]
    blocks = "Transformer/encoderblock/" if names.scanned else numbered
    table |= {name: of_blocks(part, blocks) for name, part in _block_table(names).items()}
    table |= _norm_leaves("encoder/norm", "Transformer/encoder_norm")
    if spec.head.pooling == "map":
        table["map_head/probe"] = Leaf("MAPHead_0/probe", ones=2)
        for part in (*QKV, "out"):
            table |= _leaves(f"map_head/attention/{part}", f"MAPHead_0/MultiHeadDotProductAttention_0/{part}")
        table |= _norm_leaves("map_head/norm", "MAPHead_0/LayerNorm_0")
        table |= _mlp_leaves("map_head/mlp", "MAPHead_0/MlpBlock_0")
    if spec.head.pre_logits:
        table |= _leaves("pre_logits", "pre_logits")
    if spec.head.num_classes:
        table |= _leaves("head", "head")
    return table


def _leaves(ours: str, theirs: str, kinds: tuple[str, ...] = ("kernel", "bias")) -> ParameterTable:
    return {f"{ours}/{kind}": Leaf(f"{theirs}/{kind}") for kind in kinds}


def _norm_leaves(ours: str, theirs: str) -> ParameterTable:
    return _leaves(ours, theirs, ("scale", "bias"))


def _mlp_leaves(ours: str, theirs: str) -> ParameterTable:
    return _leaves(f"{ours}/dense1", f"{theirs}/Dense_0") | _leaves(f"{ours}/dense2", f"{theirs}/Dense_1")


def _stem_table(spec: ModelSpec) -> ParameterTable:
    table = _leaves("stem/root/conv", "conv_root", ("kernel",)) | _norm_leaves("stem/root/norm", "gn_root")
    for stage, unit, suffix in convolutions(spec.stem.stages):
        ours, theirs = f"stem/stage{stage}/unit{unit}", f"block{stage}/unit{unit}"
        table |= _leaves(f"{ours}/conv{suffix}", f"{theirs}/conv{suffix}", ("kernel",))
        table |= _norm_leaves(f"{ours}/norm{suffix}", f"{theirs}/gn{suffix}")
    return table


def _block_table(names: Names) -> ParameterTable:
    """Returns the table of one block: our name of a stacked parameter -> the arrays of a single block."""
    norm1, attention, norm2, mlp = names.numbers
    table = _norm_leaves(f"{BLOCKS}/norm1", f"LayerNorm_{norm1}") | _norm_leaves(
        f"{BLOCKS}/norm2", f"LayerNorm_{norm2}"
    )
    table |= _mlp_leaves(f"{BLOCKS}/mlp", f"MlpBlock_{mlp}")
    heads = f"MultiHeadDotProductAttention_{attention}"
    table |= _leaves(f"{BLOCKS}/attention/out", f"{heads}/out")
    return table | {
        f"{BLOCKS}/attention/qkv/{kind}": Stack(axis, [Leaf(f"{heads}/{part}/{kind}") for part in QKV])
        for kind, axis in (("kernel", 1), ("bias", 0))
    }


def unsupported(spec: ModelSpec, layout: str) -> dict[str, bool]:
    """Returns feature that no model of the layout has -> whether this model has it.

    Raises:
        UserError: all that the layout cannot hold is the shape of the grid of patches.
    """
    is_google, position = layout == "google", spec.position
    features = {
        f"position embeddings of type {position.kind}": position.kind
        not in (("learned",) if is_google else ("learned", "sincos2d")),
        f"position_rows {position.rows}": position.rows not in (("all",) if is_google else ("all", "patches")),
        f"pooling {spec.head.pooling}": spec.head.pooling
        not in (("token", "gap") if is_google else ("token", "gap", "map")),
        "hybrid models (ResNet stem)": spec.stem.kind == "resnet" and not is_google,
    }
    rows, columns = spec.grid
    if rows != columns and position.kind == "learned" and not any(features.values()):
        if not is_google:
            raise UserError(
                "the big_vision layout supports position embeddings for square images only, not for "
                f"{rows}x{columns} patches; use --layout=ours"
            )
        if (side := math.isqrt(rows * columns)) ** 2 == rows * columns:
            raise UserError(
                f"the google layout does not store the patch grid, so {rows}x{columns} patches would be read as "
                f"{side}x{side}; use --layout=ours"
            )
    return features


def infer_fields(arrays: Archive, names: Names, given: Size | None, stated: Size | None) -> dict[str, Any]:
    """Returns the fields of the model whose arrays have these shapes; see `Family.fields`.

    Learned positions are taken for those of square images where possible, and of the size `given` only elsewhere.

    Raises:
        UserError: an array is missing that determines a field, or the positions fit neither a square nor `given`.
    """
    fields = _shape_fields(arrays, names)
    patch_size = fields["patch_size"]
    if fields["position"] != "learned":
        default = max(1, 224 // patch_size) * patch_size
        return fields | {"resolution": given or (default, default)}
    rows = arrays.shape_of(names.position)[-2]
    class_tokens = int(fields["pooling"] == "token")
    kinds = {"all": class_tokens} if names.layout == "google" else {"patches": 0, "all": class_tokens}
    # The published files are of square images: the given resolution is used only where that is impossible.
    for _, stored in image_sizes(rows, kinds, patch_size, (None, given)):
        return fields | {"resolution": stored}
    if not class_tokens and any(image_sizes(rows, {"class token": 1}, patch_size, (None,))):
        cls = arrays.name_in_file("cls")
        raise UserError(f"{cls} is missing, but one of the {rows} position embeddings is for a class token")
    raise no_image_size(rows)


def _shape_fields(arrays: Archive, names: Names) -> dict[str, Any]:
    """Returns the fields of the model that the arrays tell, all but its resolution."""

    def size(name: str, axis: int) -> int:
        return arrays.shape_of(name)[axis]

    _, attention, _, mlp = names.numbers
    block = "Transformer/" + ("encoderblock" if names.scanned else "encoderblock_0")
    query = f"{block}/MultiHeadDotProductAttention_{attention}/query/kernel"
    dense = f"{block}/MlpBlock_{mlp}/Dense_0/kernel"
    learned = names.layout == "google" or names.position in arrays
    arrays.check_present(["embedding/kernel", query, dense, *([names.position] if learned else [])])
    stages = count_units(arrays, UNIT)
    hybrid = "conv_root/kernel" in arrays
    numbers = matches(arrays, r"Transformer/encoderblock_(\d+)/")
    tanh_layer = "pre_logits/kernel" in arrays
    fields: dict[str, Any] = {
        "width": size("embedding/kernel", -1),
        "depth": size(query, 0) if names.scanned else len(numbers),
        "mlp_dim": size(dense, -1),
        "num_heads": size(query, -2),
        "num_classes": size("head/kernel", -1) if "head/kernel" in arrays else 0,
        "pooling": "token" if "cls" in arrays else "map" if "MAPHead_0/probe" in arrays else "gap",
        "pre_logits": tanh_layer,
        "representation_size": size("pre_logits/kernel", -1) if tanh_layer else 0,
        "position": "learned" if learned else "sincos2d",
        "patch_size": size("embedding/kernel", 0) * (resnet_stride(stages) if hybrid else 1),
    }
    if hybrid:
        fields |= {"stem": "resnet", "stages": stages, "stem_width": size("conv_root/kernel", -1)}
    return fields


def google_pipe(fields: Mapping[str, Any]) -> str:
    """Returns the pipe of operations of vision_transformer's evaluation (vit_jax/input_pipeline.py)."""
    height, width = fields["resolution"]
    return f"resize(({height},{width}))|value_range(-1,1)"


def big_vision_pipe(fields: Mapping[str, Any]) -> str:
    """Returns the pipe of operations of big_vision's evaluation (configs/load_and_eval.py).

    It takes the centre of the image, which is defined for square images only: others are resized whole.
    """
    height, width = fields["resolution"]
    if height != width:
        return google_pipe(fields)
    return f"resize_small({max(height // 7 * 8, height)})|central_crop({height})|value_range(-1,1)"


GOOGLE = Family(
    name="ViT of vision_transformer",
    spec=ModelSpec,
    marks=(r"Transformer/encoderblock_\d+/MlpBlock_3/.*",),
    prefixes="params/|opt/target/|",
    ignores_others=True,
    names=GOOGLE_NAMES,
    fields=infer_fields,
    table=parameter_table,
    requires=required_defaults(STATED) | {"stem": ("patches", "resnet")},
    unsupported=functools.partial(unsupported, layout="google"),
)
BIG_VISION = dataclasses.replace(
    GOOGLE,
    name="ViT of big_vision",
    marks=("Transformer/encoderblock.*",),
    names=BIG_VISION_NAMES,
    older_names=((f"^{POSITION}$", BIG_VISION_NAMES.position),),
    unsupported=functools.partial(unsupported, layout="big_vision"),
    position_rows=lambda spec: 0,  # the class token's position is added to the class token
    prefix="params/",
)
BIG_VISION_SCANNED = dataclasses.replace(
    BIG_VISION,
    marks=("Transformer/encoderblock/.*",),
    names=BIG_VISION_NAMES._replace(scanned=True),
    is_written=False,
)
