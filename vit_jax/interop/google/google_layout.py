"""The layouts of Google's published files: the .npz files of vision_transformer (ViT, hybrids, AugReg) and big_vision.

One table serves both: our name -> the arrays of the file. The few names in which the layouts differ are data. Files are
read and written by the same table, which also states what a file must contain. A file states neither its model nor the
preprocessing of its images: both are inferred from its arrays.

Source of the names: google-research/vision_transformer, vit_jax/checkpoint.py and models; google-research/big_vision,
models/vit.py.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax import UserError
from vit_jax.interop import array_shapes, mapping
from vit_jax.interop.archives import Archive
from vit_jax.interop.google.google_bit_layout import UNIT
from vit_jax.interop.mapping import OTHER_LAYOUT, Leaf, Stack
from vit_jax.models import ModelSpec, resnet_stride

POSITION = "Transformer/posembed_input/pos_embedding"
BLOCKS = "encoder/blocks"  # prefix of our names
QKV = ("query", "key", "value")
# Fields that the files of these layouts state by their arrays or names. All other fields are as in the first ViTs.
STATED = ("width", "depth", "mlp_dim", "num_heads", "pooling", "position", "position_rows", "stages", "stem")


@dataclasses.dataclass(frozen=True)
class GoogleForm:
    """The names in which the ViT files of one layout, or older files of it, differ from those of the other."""

    name: str  # for messages
    prefix: str  # the prefix of every name in the file
    numbers: tuple[int, int, int, int]  # numbers after LayerNorm, MultiHeadDotProductAttention, LayerNorm, MlpBlock
    position: str  # the name of the position table
    scanned: bool = False  # the blocks are stacked


GOOGLE = GoogleForm("google", "", (0, 1, 2, 3), POSITION)
BIG_VISION = GoogleForm("big_vision", "params/", (0, 0, 1, 0), "pos_embedding")


def detect_form(names: Mapping[str, Any]) -> GoogleForm | None:
    """Returns the form of arrays with these names, its fields as in the file; None: they have another layout."""
    blocks = [re.match(r"(params/|opt/target/|)Transformer/encoderblock", name) for name in names]
    prefix = max((match[1] for match in blocks if match), default=None, key=len)
    if prefix is None:
        return None
    own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    google = any(re.match(r"Transformer/encoderblock_\d+/MlpBlock_3/", name) for name in own)
    base = GOOGLE if google else BIG_VISION
    scanned = any(name.startswith("Transformer/encoderblock/") for name in own)
    position = POSITION if POSITION in own else base.position  # older files of big_vision have POSITION
    return dataclasses.replace(base, prefix=prefix, scanned=scanned, position=position)


def parameter_table(spec: ModelSpec, form: GoogleForm) -> mapping.ParameterTable:
    """Returns our name -> the arrays of a file that the parameter consists of, for the parameters of a model."""
    table = _stem_table(spec) if spec.stem.kind == "resnet" else {}
    table |= _leaves("embed", "embedding")
    if spec.class_rows:
        table["cls"] = Leaf("cls", ones=2)
    if spec.position.kind == "learned":
        table["position"] = Leaf(form.position, ones=1)
    numbered = [f"Transformer/encoderblock_{index}/" for index in range(spec.depth)]
    blocks = "Transformer/encoderblock/" if form.scanned else numbered
    table |= {name: mapping.of_blocks(part, blocks) for name, part in _block_table(form).items()}
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


def _leaves(ours: str, theirs: str, kinds: tuple[str, ...] = ("kernel", "bias")) -> mapping.ParameterTable:
    return {f"{ours}/{kind}": Leaf(f"{theirs}/{kind}") for kind in kinds}


def _norm_leaves(ours: str, theirs: str) -> mapping.ParameterTable:
    return _leaves(ours, theirs, ("scale", "bias"))


def _mlp_leaves(ours: str, theirs: str) -> mapping.ParameterTable:
    return _leaves(f"{ours}/dense1", f"{theirs}/Dense_0") | _leaves(f"{ours}/dense2", f"{theirs}/Dense_1")


def _stem_table(spec: ModelSpec) -> mapping.ParameterTable:
    table = _leaves("stem/root/conv", "conv_root", ("kernel",)) | _norm_leaves("stem/root/norm", "gn_root")
    for stage, unit, suffix in mapping.convolutions(spec.stem.stages):
        ours, theirs = f"stem/stage{stage}/unit{unit}", f"block{stage}/unit{unit}"
        table |= _leaves(f"{ours}/conv{suffix}", f"{theirs}/conv{suffix}", ("kernel",))
        table |= _norm_leaves(f"{ours}/norm{suffix}", f"{theirs}/gn{suffix}")
    return table


def _block_table(form: GoogleForm) -> mapping.ParameterTable:
    """Returns the table of one block: our name of a stacked parameter -> the arrays of a single block."""
    norm1, attention, norm2, mlp = form.numbers
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


def read_layout(archive: Archive, form: GoogleForm, spec: ModelSpec, shapes: mapping.Shapes) -> dict[str, Any]:
    """Returns our name -> parameter of a model; `shapes` are the shapes of the parameters.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    folded = _is_class_row_folded(form, spec)
    if folded and (position := form.prefix + form.position) in archive:  # older files of big_vision have the row
        folded = archive[position].shape[-2:-1] != shapes["position"][:1]
    if folded:
        shapes = shapes | {"position": (shapes["position"][0] - 1, spec.width)}
    params = mapping.read_parameters(archive, parameter_table(spec, form), shapes, form.prefix)
    if folded:
        params["position"] = np.pad(params["position"], ((1, 0), (0, 0)))
    return params


def to_layout(params: dict[str, Any], spec: ModelSpec, form: GoogleForm) -> dict[str, np.ndarray]:
    """Returns the arrays of a file of this form.

    Raises:
        UserError: the layout cannot express the model.
    """
    mapping.refuse(form.name, _unsupported(spec, form))
    if spec.position.kind == "learned" and spec.grid[0] != spec.grid[1]:
        rows, columns = spec.grid
        if form.name == "big_vision":
            raise UserError(
                "the big_vision layout supports position embeddings for square images only, not for "
                f"{rows}x{columns} patches; {OTHER_LAYOUT}"
            )
        if math.isqrt(rows * columns) ** 2 == rows * columns:
            side = math.isqrt(rows * columns)
            raise UserError(
                f"the google layout does not store the patch grid, so {rows}x{columns} patches would be read as "
                f"{side}x{side}; {OTHER_LAYOUT}"
            )
    if _is_class_row_folded(form, spec):
        first, rest = np.split(params["position"], [1])
        params = params | {"cls": params["cls"] + first[0], "position": rest}
    return mapping.file_views(parameter_table(spec, form), params, form.prefix)


def _unsupported(spec: ModelSpec, form: GoogleForm) -> dict[str, bool]:
    """Returns feature that no model of the layout has -> whether this model has it."""
    position = spec.position.kind
    positions = ("learned",) if form.name == "google" else ("learned", "sincos2d")
    unsupported = {f"position embeddings of type {position}": position not in positions}
    unsupported |= mapping.unstated_values(spec, STATED)
    rows = ("all",) if form.name == "google" else ("all", "patches")
    unsupported[f"position_rows {spec.position.rows}"] = spec.position.rows not in rows
    return unsupported | {
        "class token and mean pooled together": spec.head.pooling == "token_gap",
        "attention pooling": spec.head.pooling == "map" and form.name == "google",
        "hybrid models (ResNet stem)": spec.stem.kind == "resnet" and form.name == "big_vision",
    }


def _is_class_row_folded(form: GoogleForm, spec: ModelSpec) -> bool:
    """Returns whether the layout has one sum in place of class token and position. A model only uses the sum."""
    return bool(spec.position_rows) and spec.position.kind == "learned" and form.name == "big_vision"


def infer_fields(archive: Mapping[str, Any], form: GoogleForm, given: tuple[int, int] | None = None) -> dict[str, Any]:
    """Returns the fields of the model whose arrays have these shapes.

    Args:
        archive: the arrays of a file.
        form: what `detect_form` returned.
        given: (height, width) of the images as the user states it, or None. Learned positions are taken for those of
            square images where possible, and of this size only elsewhere.

    Raises:
        UserError: an array is missing that determines a field, or the positions fit neither a square nor `given`.
    """
    fields = _shape_fields(archive, form)
    patch_size = fields["patch_size"]
    if fields["position"] != "learned":
        default = max(1, 224 // patch_size) * patch_size
        return fields | {"resolution": given or (default, default)}
    rows = array_shapes.shape_of(archive, form.prefix + form.position)[-2]
    class_tokens = int(fields["pooling"] == "token")
    kinds = {"all": class_tokens} if form.name == "google" else {"patches": 0, "all": class_tokens}
    # The published files are of square images: the given resolution is used only where that is impossible.
    for _, stored in array_shapes.image_sizes(rows, kinds, patch_size, (None, given)):
        return fields | {"resolution": stored}
    if not class_tokens and any(array_shapes.image_sizes(rows, {"class token": 1}, patch_size, (None,))):
        raise UserError(f"{form.prefix}cls is missing, but one of the {rows} position embeddings is for a class token")
    raise UserError(
        f"its {rows} position embeddings do not form a square grid; give resolution=(height, width) to vit_jax.load, "
        "or --resolution=HEIGHTxWIDTH to vit_jax.convert"
    )


def _shape_fields(archive: Mapping[str, Any], form: GoogleForm) -> dict[str, Any]:
    """Returns the fields of the model that the arrays tell, all but its resolution."""
    names = {name.removeprefix(form.prefix) for name in archive if name.startswith(form.prefix)}

    def size(name: str, axis: int) -> int:
        return array_shapes.shape_of(archive, form.prefix + name)[axis]

    _, attention, _, mlp = form.numbers
    block = "Transformer/" + ("encoderblock" if form.scanned else "encoderblock_0")
    query = f"{block}/MultiHeadDotProductAttention_{attention}/query/kernel"
    dense = f"{block}/MlpBlock_{mlp}/Dense_0/kernel"
    learned = form.name == "google" or form.position in names
    needed = ["embedding/kernel", query, dense, *([form.position] if learned else [])]
    if missing := [f"{form.prefix}{name}" for name in needed if name not in names]:
        raise UserError(f"the model cannot be inferred, since arrays are missing: {', '.join(missing)}")
    stages = array_shapes.count_units(names, UNIT)
    hybrid = "conv_root/kernel" in names
    numbers = array_shapes.matches(names, r"Transformer/encoderblock_(\d+)/")
    tanh_layer = "pre_logits/kernel" in names
    fields: dict[str, Any] = {
        "width": size("embedding/kernel", -1),
        "depth": size(query, 0) if form.scanned else len(numbers),
        "mlp_dim": size(dense, -1),
        "num_heads": size(query, -2),
        "num_classes": size("head/kernel", -1) if "head/kernel" in names else 0,
        "pooling": "token" if "cls" in names else "map" if "MAPHead_0/probe" in names else "gap",
        "pre_logits": tanh_layer,
        "representation_size": size("pre_logits/kernel", -1) if tanh_layer else 0,
        "position": "learned" if learned else "sincos2d",
        "patch_size": size("embedding/kernel", 0) * (resnet_stride(stages) if hybrid else 1),
    }
    if hybrid:
        fields |= {"stem": "resnet", "stages": stages, "stem_width": size("conv_root/kernel", -1)}
    return fields


def evaluation_pipe(fields: dict[str, Any], layout: str) -> str:
    """Returns the pipe of operations of the authors' evaluation of a model in a layout.

    vision_transformer (vit_jax/input_pipeline.py) resizes the whole image. big_vision (configs/load_and_eval.py) takes
    the centre of the image, which is defined for square images only: others are resized whole.
    """
    height, width = fields["resolution"]
    cropped = layout == "big_vision" and height == width
    sized = (
        f"resize_small({max(height // 7 * 8, height)})|central_crop({height})"
        if cropped
        else f"resize(({height},{width}))"
    )
    return f"{sized}|value_range(-1,1)"
