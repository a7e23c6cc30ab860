"""The ViTs in files of PyTorch's libraries: the names of their arrays, the table, and the fields that they tell."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from vit_jax.interop.archives import Archive
from vit_jax.interop.layout import Leaf, ParameterTable, Size, Stack, image_sizes, matches, no_image_size, of_blocks
from vit_jax.models import BIASED, ModelSpec

LAYER_SCALE = 1e-5  # initial value of DeiT-III and DINOv2: a file has only the trained factors
MlpNames: TypeAlias = tuple[tuple[str, ...], str]  # the layers that widen, which are one or two; the layer that narrows


class MapNames(NamedTuple):
    """The names of the arrays of attention pooling."""

    prefix: str  # the prefix of the names below and of the MLP's
    probe: str
    projections: tuple[str, str, str]  # of query, key and value; those with the same name are one array
    out: str
    norm: str


class Names(NamedTuple):
    """The names of a ViT's arrays in a layout.

    The names of layers and norms are the prefixes of `weight` and `bias`. The names inside a block are without the
    block's name.
    """

    patches: str
    cls: str
    registers: str
    position: str
    blocks: str  # prefix; the index of the block follows
    norms: tuple[str, str]
    attention: tuple[str, ...]  # query, key and value: three layers, or one for all
    out: str
    layer_scales: tuple[str, str]
    dense: MlpNames
    gated: MlpNames  # with SwiGLU
    norm: str
    map_head: MapNames
    pre_logits: str
    heads: Mapping[str, str]  # our name of a head -> its name
    qk_norms: tuple[str, str] = ("", "")
    pooled_norm: str = ""
    position_ones: int = 1  # leading dimensions of 1 that the array of the positions has
    cls_ones: int = 2
    pre_norm: str = ""
    projection: str = ""
    mlp_norm: str = ""
    relative_bias: str = ""
    # Of query, key and value, where not all have a bias and it is not named as usual.
    biases: tuple[str, str, str] | None = None
    # Whether patches are projected by a linear layer, with their channels last; and whether the positions are a grid.
    flat_patches: bool = False
    position_grid: bool = False
    # Whether queries and keys are rotated in pairs of channel i and i + head_dim / 2, not of neighbours as ours.
    rotates_halves: bool = False


def linear(kernel: np.ndarray) -> np.ndarray:
    """Returns a view [outputs, inputs] of a kernel [inputs, *outputs]."""
    return kernel.reshape(len(kernel), -1, copy=False).T


def merging_linear(kernel: np.ndarray) -> np.ndarray:
    """Returns a view [outputs, inputs] of a kernel [*inputs, outputs]."""
    return kernel.reshape(-1, kernel.shape[-1], copy=False).T


def convolution(kernel: np.ndarray) -> np.ndarray:
    """Returns a view [outputs, inputs, rows, columns] of a kernel [rows, columns, inputs, outputs]."""
    return kernel.transpose(3, 2, 0, 1)


def flat(bias: np.ndarray) -> np.ndarray:
    """Returns a view of a bias with one axis."""
    return bias.reshape(-1, copy=False)


def halves_linear(kernel: np.ndarray) -> np.ndarray:
    """Returns a view [heads, 2, pairs, inputs] of a kernel [inputs, heads, head_dim]: first the first of each pair."""
    return np.moveaxis(halves(kernel), 0, -1)


def halves(bias: np.ndarray) -> np.ndarray:
    """Returns a view [..., heads, 2, pairs] of an array [..., heads, head_dim], in which pairs are neighbours."""
    return bias.reshape(*bias.shape[:-1], -1, 2, copy=False).swapaxes(-1, -2)


def dense_leaves(ours: str, *theirs: str) -> ParameterTable:
    """Returns the table of a linear layer whose outputs may have several axes.

    `ours` is our name of the layer and `theirs` the prefix of its names in the file, here and in the functions below.
    Several prefixes are those of layers with the same inputs, which are stacked in our layer.
    """
    kinds = (("kernel", 1, "weight", linear), ("bias", 0, "bias", flat))
    table: ParameterTable = {}
    for kind, axis, name, arrange in kinds:
        leaves = [Leaf(f"{part}{name}", arrange=arrange) for part in theirs]
        table[f"{ours}/{kind}"] = Stack(axis, leaves) if len(leaves) > 1 else leaves[0]
    return table


def merging_leaves(ours: str, theirs: str) -> ParameterTable:
    """Returns the table of a linear layer whose inputs have several axes."""
    return {f"{ours}/kernel": Leaf(f"{theirs}weight", arrange=merging_linear), f"{ours}/bias": Leaf(f"{theirs}bias")}


def norm_leaves(ours: str, theirs: str) -> ParameterTable:
    """Returns the table of a LayerNorm or GroupNorm."""
    return {f"{ours}/scale": Leaf(f"{theirs}weight"), f"{ours}/bias": Leaf(f"{theirs}bias")}


def model_leaves(spec: ModelSpec, names: Names) -> ParameterTable:
    """Returns our name -> the arrays that the parameter consists of, for all parameters of a ViT but its ResNet's."""
    arrange = merging_linear if names.flat_patches else convolution
    table: ParameterTable = {"embed/kernel": Leaf(f"{names.patches}weight", arrange=arrange)}
    if spec.stem.bias:
        table["embed/bias"] = Leaf(f"{names.patches}bias")
    if spec.class_rows:
        table["cls"] = Leaf(names.cls, ones=names.cls_ones)
    if spec.prefix.registers:
        table["registers"] = Leaf(names.registers, ones=1)
    if spec.position.kind == "learned":
        as_grid = (lambda rows: rows.reshape(*spec.grid, -1, copy=False)) if names.position_grid else None
        table["position"] = Leaf(names.position, ones=names.position_ones, arrange=as_grid)
    if spec.stem.pre_norm:
        table |= norm_leaves("encoder/pre_norm", names.pre_norm)
    blocks = [f"{names.blocks}{index}." for index in range(spec.depth)]
    table |= {f"encoder/blocks/{name}": of_blocks(part, blocks) for name, part in block_leaves(spec, names).items()}
    pooled = spec.head.final_norm == "pooled"
    table |= norm_leaves("pooled_norm", names.pooled_norm) if pooled else norm_leaves("encoder/norm", names.norm)
    if spec.head.pooling == "map":
        table |= map_leaves(names.map_head)
    if spec.head.projection:
        table["projection/kernel"] = Leaf(f"{names.projection}weight", arrange=linear)
    if spec.head.pre_logits:
        table |= dense_leaves("pre_logits", names.pre_logits)
    if spec.head.num_classes:
        for ours, theirs in names.heads.items():
            table |= dense_leaves(ours, theirs)
    if spec.block.norm == "rms":  # without biases
        table = {name: part for name, part in table.items() if not re.search(r"norm\d?/bias$", name)}
    return table


def block_leaves(spec: ModelSpec, names: Names) -> ParameterTable:
    """Returns the table of one block, without the block's name."""
    table = norm_leaves("norm1", names.norms[0]) | norm_leaves("norm2", names.norms[1])
    table |= attention_leaves(spec, names) | merging_leaves("attention/out", names.out)
    if spec.attention.qk_norm:
        table |= norm_leaves("attention/query_norm", names.qk_norms[0])
        table |= norm_leaves("attention/key_norm", names.qk_norms[1])
    if spec.position.kind == "relative_bias":
        table["attention/relative_bias"] = Leaf(names.relative_bias)
    if spec.block.layer_scale:
        table |= {f"layer_scale{number}": Leaf(name) for number, name in enumerate(names.layer_scales, 1)}
    gated = spec.block.activation == "swiglu"
    widening, narrowing = names.gated if gated else names.dense
    if spec.block.mlp_norm:
        table |= norm_leaves("mlp/hidden_norm", names.mlp_norm)
    table |= dense_leaves("mlp/dense1_gated" if gated else "mlp/dense1", *widening)
    table |= dense_leaves("mlp/dense2", narrowing)
    if not spec.block.dense_bias:
        del table["attention/out/bias"]
        table = {name: part for name, part in table.items() if not re.fullmatch(r"mlp/dense\w+/bias", name)}
    return table


def attention_leaves(spec: ModelSpec, names: Names) -> ParameterTable:
    """Returns the table of the projections of queries, keys and values."""
    if names.biases is None and not names.rotates_halves and spec.attention.qkv_bias == "all":
        return dense_leaves("attention/qkv", *names.attention)
    layers = names.attention if len(names.attention) == 3 else names.attention * 3
    kernels, biases = [], []
    for part, layer in enumerate(layers):
        turned = names.rotates_halves and part < 2
        kernels.append(Leaf(f"{layer}weight", arrange=halves_linear if turned else linear, merged=3 if turned else 1))
        bias = names.biases[part] if names.biases else f"{layer}bias"
        biases.append(Leaf(bias, arrange=halves if turned else flat, merged=3 if turned else 1))
    biased = BIASED[spec.attention.qkv_bias]
    table: ParameterTable = {"attention/qkv/kernel": Stack(1, kernels)}
    if biased != ():
        table["attention/qkv/bias"] = Stack(0, [biases[part] for part in biased or range(3)])
    return table


def map_leaves(names: MapNames) -> ParameterTable:
    """Returns the table of attention pooling."""
    table: ParameterTable = {"map_head/probe": Leaf(names.prefix + names.probe, ones=2)}
    for ours, theirs in zip(("query", "key", "value"), names.projections, strict=True):
        table |= dense_leaves(f"map_head/attention/{ours}", names.prefix + theirs)
    table |= merging_leaves("map_head/attention/out", names.prefix + names.out)
    table |= norm_leaves("map_head/norm", names.prefix + names.norm)
    for number in (1, 2):
        table |= dense_leaves(f"map_head/mlp/dense{number}", f"{names.prefix}mlp.fc{number}.")
    return table


def infer_fields(arrays: Archive, names: Names, always: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the fields of the model whose arrays have these shapes.

    The fields of a ResNet stem and of attention are left out, and how the tokens are pooled.

    Args:
        arrays: the arrays of a file.
        names: the names of the file's layout.
        always: the names of other arrays that every file of the layout has.

    Raises:
        UserError: an array is missing that determines a field or that every file has.
    """
    first = f"{names.blocks}0."
    gated = names.gated != names.dense and all(f"{first}{part}weight" in arrays for part in names.gated[0])
    (widened, *_), narrowed = names.gated if gated else names.dense
    projection, widened, narrowed = f"{names.patches}weight", f"{first}{widened}weight", f"{first}{narrowed}weight"
    arrays.check_present([projection, widened, narrowed, *always])
    patches = arrays.shape_of(projection, 2 if names.flat_patches else 4)
    widening, narrowing = arrays.shape_of(widened), arrays.shape_of(narrowed)
    mlp_dim, head, pre_logits = narrowing[1], f"{names.heads['head']}weight", f"{names.pre_logits}weight"
    fields: dict[str, Any] = {
        "width": patches[0],
        "depth": len(matches(arrays, rf"{re.escape(names.blocks)}(\d+)\.")),
        "mlp_dim": mlp_dim,
        "patch_size": max(1, math.isqrt(patches[1] // 3)) if names.flat_patches else patches[2],
        "embed_bias": f"{names.patches}bias" in arrays,
        "registers": arrays.shape_of(names.registers)[-2] if names.registers in arrays else 0,
        "layer_scale": LAYER_SCALE if first + names.layer_scales[0] in arrays else 0.0,
        "num_classes": arrays.shape_of(head)[0] if head in arrays else 0,
        "distilled_head": "distilled_head" in names.heads,
    }
    if gated or widening[0] == 2 * mlp_dim:
        fields["activation"] = "swiglu"
    if pre_logits in arrays:
        fields |= {"pre_logits": True, "representation_size": arrays.shape_of(pre_logits)[0]}
    return fields


def infer_biases(arrays: Archive, names: Names, patch_size: int, sizes: tuple[Size | None, ...]) -> dict[str, Any]:
    """Returns the fields that a table of relative biases tells, for a model with a class token.

    Args:
        arrays: the arrays of a file.
        names: the names of the file's layout.
        patch_size: the side of a patch in pixels.
        sizes: the sizes of images to try, the likeliest first; None: a square of any size.

    Raises:
        UserError: the table is missing, or fits none of these sizes.
    """
    name = f"{names.blocks}0.{names.relative_bias}"
    arrays.check_present([name])
    rows, heads = arrays.shape_of(name, 2)
    side = (math.isqrt(max(0, rows - 3)) + 1) // 2
    for size in sizes:
        height, width = (pixels // patch_size for pixels in size) if size else (side, side)
        if height > 0 < width and (2 * height - 1) * (2 * width - 1) + 3 == rows:
            resolution = height * patch_size, width * patch_size
            return {"position": "relative_bias", "num_heads": heads, "resolution": resolution}
    raise no_image_size(rows)


def infer_positions(
    arrays: Archive,
    names: Names,
    fields: dict[str, Any],
    given: Size | None,
    stated: Size | None,
) -> dict[str, Any]:
    """Returns the fields of the positions, and the resolution.

    Positions in the file are taken for those of images of the size `stated` if that is possible, else of square images,
    else of the size `given`. Without positions in the file, the resolution is `given`, else `stated`, else about 224.

    Args:
        arrays: the arrays of a file.
        names: the names of the file's layout.
        fields: the model's patch_size and registers.
        given: (height, width) of the images as the user states it, or None.
        stated: (height, width) of the images as the configuration beside the file states it, or None.

    Raises:
        UserError: the positions fit none of these sizes.
    """
    patch_size = fields["patch_size"]
    if names.position not in arrays:
        default = max(1, 224 // patch_size) * patch_size
        return {"position": "none", "resolution": given or stated or (default, default)}
    if names.position_grid:
        _, height, width, _ = arrays.shape_of(names.position, 4)
        return {
            "position": "learned",
            "position_rows": "patches",
            "resolution": (height * patch_size, width * patch_size),
        }
    rows, class_tokens = arrays.shape_of(names.position)[-2], int(names.cls in arrays)
    kinds = {"all": class_tokens + fields["registers"], "patches": 0, "class": class_tokens}
    for kind, size in image_sizes(rows, kinds, patch_size, (stated, None, given)):
        return {"position": "learned", "position_rows": kind, "resolution": size}
    raise no_image_size(rows)
