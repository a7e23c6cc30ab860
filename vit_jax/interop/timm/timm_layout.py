"""The layout of timm's VisionTransformer, with its hybrids and DeiT's second head: one table, by which files are both
read and written.

Source of the names: huggingface/pytorch-image-models, timm/models/vision_transformer.py, deit.py and
vision_transformer_hybrid.py. Source of older names: facebookresearch/deit and dinov2.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax import UserError
from vit_jax.interop import array_shapes, mapping
from vit_jax.interop.archives import Archive
from vit_jax.interop.mapping import ParameterTable
from vit_jax.interop.pytorch import MapNames, Names, RenamedArchive, model_leaves, torch_fields
from vit_jax.interop.timm import timm_bit_layout
from vit_jax.model import Model
from vit_jax.models import ModelSpec, resnet_stride

NAMES = Names(
    patches="patch_embed.proj.",
    cls="cls_token",
    registers="reg_token",
    position="pos_embed",
    blocks="blocks.",
    norms=("norm1.", "norm2."),
    attention=("attn.qkv.",),
    out="attn.proj.",
    qk_norms=("attn.q_norm.", "attn.k_norm."),
    layer_scales=("ls1.gamma", "ls2.gamma"),
    dense=(("mlp.fc1.",), "mlp.fc2."),
    gated=(("mlp.fc1.",), "mlp.fc2."),
    norm="norm.",
    pooled_norm="fc_norm.",
    map_head=MapNames("attn_pool.", probe="latent", projections=("q.", "kv.", "kv."), out="proj.", norm="norm."),
    pre_logits="pre_logits.fc.",
    heads={"head": "head."},
)
BACKBONE = "patch_embed.backbone."
# Of VisionTransformerDistilled.
TWO_HEADS = NAMES._replace(registers="dist_token", heads={"head": "head.", "distilled_head": "head_dist."})
# Where that class computes less than a VisionTransformer does: our field -> the values that it computes.
DISTILLED = {
    "registers": (1,),
    "position": ("learned",),
    "position_rows": ("all",),
    "final_norm": ("tokens",),
    "stem": ("patches",),
    "activation": ("gelu", "gelu_tanh"),
}

OLDER_NAMES = (
    (r"^(blocks\.\d+\.)gamma_([12])$", r"\1ls\2.gamma"),  # DeiT-III
    (r"^register_tokens$", "reg_token"),  # DINOv2
    (r"^(blocks\.\d+\.mlp\.)w12\.", r"\1fc1."),
    (r"^(blocks\.\d+\.mlp\.)w3\.", r"\1fc2."),
)
IGNORED = "mask_token"  # only DINOv2's training uses it

# Fields that the arrays or the configuration state or `_unsupported` checks. Any other field must have its default.
STATED = (
    *("width", "depth", "mlp_dim", "num_heads", "pooling", "final_norm", "class_token", "registers", "qk_norm", "head"),
    *("position", "position_rows", "position_place", "relative_tables", "relative_clip", "rotary", "rotary_grid"),
    *("activation", "norm_epsilon", "layer_scale", "embed_bias", "image_mean", "image_std", "block"),
    *("stem", "stem_epsilons", "stages", "distilled_head"),
)

# The values of every timm model whose file does not say otherwise: nn.GELU, and LayerNorm's epsilon.
DEFAULTS = {"activation": "gelu", "norm_epsilon": 1e-6}


def detect_layout(names: Mapping[str, Any]) -> bool:
    """Returns whether arrays with these names have the layout of ViTs.

    Raises:
        UserError: only those with a certain prefix have.
    """
    patches, attention = f"{NAMES.patches}weight", f"{NAMES.blocks}0.attn.qkv.weight"
    for name in names:
        prefix = name.removesuffix(patches)
        if name.endswith(patches) and prefix + attention in names:
            if other := next((other for other in names if not other.startswith(prefix)), ""):
                raise UserError(
                    f"its model is in the arrays named {prefix}..., but it contains others, such as {other}; save the "
                    "model alone"
                )
            return True
    return False


def width_of(file: Archive) -> int:
    """Returns the width of the ViT in a file."""
    return array_shapes.shape_of(renamed(file), f"{NAMES.patches}weight")[0]


def infer_fields(
    file: Archive, given: tuple[int, int] | None = None, stated: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Returns the fields of the model whose arrays have these shapes.

    What no array states is as in most of timm's models: exact GELU, class token pooled where there is one. The number
    of heads is only among the fields if the file has norms of queries.

    Args:
        file: the arrays of a file, by timm's current or older names.
        given: (height, width) of the images as the user states it, or None; see `torch_fields.infer_positions`.
        stated: (height, width) of the images in the configuration beside the file, or None.

    Raises:
        UserError: an array is missing that determines a field, the positions fit no image size, or a distillation token
            has no head.
    """
    archive = renamed(file)
    if "norm_pre.weight" in archive:
        raise UserError(
            "its tokens are normalised before the first block (norm_pre), as in CLIP, whose files vit_jax does not read"
        )
    names = TWO_HEADS if TWO_HEADS.registers in archive else NAMES
    if names is TWO_HEADS and f"{names.heads['distilled_head']}weight" not in archive:
        raise UserError(
            "its distillation token has no head (head_dist): then timm averages the representations of both tokens, "
            "which vit_jax does not"
        )
    fields: dict[str, Any] = DEFAULTS | torch_fields.infer_fields(archive, names) | _stem_fields(archive)
    class_token, pooled = names.cls in archive, f"{names.pooled_norm}weight" in archive
    attention_pooling = names.map_head.prefix + names.map_head.probe in archive
    fields["pooling"] = "map" if attention_pooling else "token" if class_token and not pooled else "gap"
    fields |= {"final_norm": "pooled" if pooled else "tokens", "class_token": "always" if class_token else "auto"}
    query_norm = f"{names.blocks}0.{names.qk_norms[0]}weight"
    fields["qk_norm"] = query_norm in archive
    if fields["qk_norm"]:
        head_dim = math.prod(archive[query_norm].shape)
        fields["num_heads"] = fields["width"] // max(head_dim, 1)
    return fields | torch_fields.infer_positions(archive, names, fields, given, stated)


def _stem_fields(archive: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a hybrid's ResNet; an empty dict for other models."""
    root = [name for name in (f"{BACKBONE}stem.conv.weight", f"{BACKBONE}conv.weight") if name in archive]
    if not root:
        return {}
    stages = array_shapes.count_units(archive, BACKBONE + timm_bit_layout.UNIT)
    size = archive[f"{NAMES.patches}weight"].shape[2]
    width = array_shapes.shape_of(archive, root[0])[0]
    fields = {"stem": "resnet", "stages": stages, "stem_width": width, "stem_epsilons": "timm"}
    return fields | {"patch_size": size * resnet_stride(stages)}


def renamed(file: Archive) -> RenamedArchive:
    """Returns a file's arrays by their current names."""
    return RenamedArchive(file, OLDER_NAMES, IGNORED)


def read_layout(file: Archive, spec: ModelSpec, shapes: mapping.Shapes) -> dict[str, Any]:
    """Returns our name -> parameter of a model; `shapes` are the shapes of the parameters.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    return mapping.read_parameters(renamed(file), parameter_table(spec), shapes, prefix="")


def to_layout(params: dict[str, Any], spec: ModelSpec) -> dict[str, np.ndarray]:
    """Returns the arrays of a file in this layout.

    Raises:
        UserError: the layout cannot express the model.
    """
    mapping.refuse("timm", _unsupported(spec) | _unsupported_beside_two_heads(spec))
    if spec.position_rows and spec.position_rows < spec.prefix_rows:
        # The class token has a position, the registers have none: a model only ever uses the sum of token and position.
        first, rest = np.split(np.asarray(params["position"]), [1])
        params = params | {"cls": np.asarray(params["cls"]) + first[0], "position": rest}
    return mapping.file_views(parameter_table(spec), params, prefix="")


def _unsupported(spec: ModelSpec) -> dict[str, bool]:
    """Returns feature that timm's model does not compute -> whether this model has it."""
    return mapping.unstated_values(spec, STATED) | {
        f"position embeddings of type {spec.position.kind}": spec.position.kind not in ("learned", "none"),
        f"positions with position_place {spec.position.place}": spec.position.place != "stem",
        f"{spec.block.kind} blocks": spec.block.kind != "standard",
        "rotary positions": spec.position.rotary != "none",
        "a head of patches": spec.head.kind == "patches",
        "class token and mean pooled together": spec.head.pooling == "token_gap",
        "a tanh layer (pre_logits)": spec.head.pre_logits,
        f"norm_epsilon {spec.block.norm_epsilon:g}": spec.block.norm_epsilon != DEFAULTS["norm_epsilon"],
        "patches projected without a bias": not spec.stem.bias,
        "a ResNet with stem_epsilons released": spec.stem.kind == "resnet" and spec.stem.epsilons == "released",
        "a hybrid with swiglu": spec.stem.kind == "resnet" and spec.block.activation == "swiglu",
        "attention pooling with swiglu": spec.head.pooling == "map" and spec.block.activation == "swiglu",
    }


def _unsupported_beside_two_heads(spec: ModelSpec) -> dict[str, bool]:
    """Returns feature that timm's class with two heads does not compute -> whether this model has it and two heads."""
    value = Model("", spec).field
    return {
        f"{name} {value(name)} with a second head": spec.head.distilled and value(name) not in computed
        for name, computed in DISTILLED.items()
    }


def parameter_table(spec: ModelSpec) -> ParameterTable:
    """Returns our name -> the arrays of the layout that the parameter consists of, for the parameters of a model."""
    table = _stem_table(spec) if spec.stem.kind == "resnet" else {}
    return table | model_leaves(spec, TWO_HEADS if spec.head.distilled else NAMES)


def _stem_table(spec: ModelSpec) -> ParameterTable:
    stages = spec.stem.stages
    table = timm_bit_layout.convolution_leaves("stem/root", BACKBONE + ("stem." if stages else ""), "", "conv", "norm")
    for stage, unit, suffix in mapping.convolutions(stages):
        ours, theirs = f"stem/stage{stage}/unit{unit}", f"{BACKBONE}stages.{stage - 1}.blocks.{unit - 1}."
        names = ("downsample.conv", "downsample.norm") if suffix == "_proj" else (f"conv{suffix}", f"norm{suffix}")
        table |= timm_bit_layout.convolution_leaves(ours, theirs, suffix, *names)
    return table
