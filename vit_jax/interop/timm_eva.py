"""The layouts of timm's Eva, which computes DINOv3 (arXiv 2508.10104), EVA (2211.07636), EVA-02 (2303.11331) and the
Perception Encoder (2504.13181).

Source of the names, of the arguments and of their values: huggingface/pytorch-image-models 1.0.31, timm/models/eva.py,
timm/layers/attention.py, attention_pool.py, mlp.py and pos_embed_sincos.py.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from vit_jax import UserError
from vit_jax.interop import timm_config, timm_vit, torch_tables
from vit_jax.interop.archives import Archive
from vit_jax.interop.layout import Family, Size, required_defaults
from vit_jax.interop.published_config import read_float, read_int, split_keys
from vit_jax.interop.torch_tables import Names
from vit_jax.model import Model
from vit_jax.models import ModelSpec

NAMES = timm_vit.NAMES._replace(
    layer_scales=("gamma_1", "gamma_2"),
    gated=(("mlp.fc1_g.", "mlp.fc1_x."), "mlp.fc2."),
    mlp_norm="mlp.norm.",
    biases=("attn.q_bias", "attn.k_bias", "attn.v_bias"),  # keys have none: timm's is zero, and in no file
)
# Fields that the arrays or the configuration state. Any other field must have its default.
STATED = (
    *("width", "depth", "mlp_dim", "num_heads", "pooling", "final_norm", "class_token", "registers", "layer_scale"),
    *("position", "position_rows", "rotary", "rotary_grid", "rotary_theta", "qkv_bias", "activation", "norm_epsilon"),
    *("mlp_norm", "embed_bias", "image_mean", "image_std", "map_heads", "map_mlp_dim"),
)
# Arguments of Eva that the arrays tell, or that only training needs.
TOLD = split_keys(
    """num_reg_tokens qkv_bias qkv_fused swiglu_align_to scale_mlp use_abs_pos_emb use_fc_norm
    use_pre_transformer_norm use_post_transformer_norm head_init_scale rope_shift_coords rope_jitter_coords
    rope_rescale_coords"""
)
READ = split_keys("swiglu_mlp use_rot_pos_emb rope_temperature ref_feat_shape")
# Argument that no array tells -> its only value in models of the family.
EVA_ARGUMENTS: dict[str, Any] = {
    "attn_type": "eva",
    "use_post_norm": False,
    "rope_type": "cat",
    "rope_grid_offset": 0.0,
    "rope_grid_indexing": "ij",
    "rope_rotate_half": False,
}
DINOV3_ARGUMENTS = EVA_ARGUMENTS | {"use_rot_pos_emb": True, "rope_type": "dinov3", "rope_rotate_half": True}
PE_ARGUMENTS = EVA_ARGUMENTS | {"attn_type": "rope", "rope_grid_offset": 1.0, "rope_grid_indexing": "xy"}
DINOV3_THETA = 100.0
PE_HEADS = 8  # of the pooling
EVA_GRID = 16  # to which all of EVA-02 scale their places for the rotation


def infer_fields(
    arrays: Archive, names: Names, given: Size | None, stated: Size | None, *, untold: dict[str, Any]
) -> dict[str, Any]:
    """Returns the fields of the model whose arrays have these shapes; see `Family.fields`.

    Args:
        arrays: the arrays of a file.
        names: the names of the family.
        given: (height, width) of the images as the user states it, or None.
        stated: (height, width) of the images as the configuration states it, or None.
        untold: what no array tells of a model of the family.

    Raises:
        UserError: an array is missing that determines a field, or the positions fit no image size.
    """
    first, pooled = f"{names.blocks}0.", f"{names.pooled_norm}weight" in arrays
    fields = {"activation": "gelu"} | untold | torch_tables.infer_fields(arrays, names)
    fields |= {
        "final_norm": "pooled" if pooled else "tokens",
        "class_token": "always" if names.cls in arrays else "auto",
        "mlp_norm": f"{first}{names.mlp_norm}weight" in arrays,
    }
    if names.biases:
        fields["qkv_bias"] = "query_value" if first + names.biases[0] in arrays else "none"
    return fields | torch_tables.infer_positions(arrays, names, fields, given, stated)


def infer_eva(arrays: Archive, names: Names, given: Size | None, stated: Size | None) -> dict[str, Any]:
    """Returns the fields of an EVA, whose MLPs have a GELU, or of an EVA-02, with SwiGLU and rotation.

    Raises:
        UserError: as `infer_fields`.
    """
    fields = infer_fields(arrays, names, given, stated, untold={"norm_epsilon": 1e-6})
    rotation = {"rotary": "axial", "rotary_grid": EVA_GRID} if fields["activation"] == "swiglu" else {}
    reads_class = names.cls in arrays and fields["final_norm"] == "tokens"
    return fields | rotation | {"pooling": "token" if reads_class else "gap"}


def infer_pe(arrays: Archive, names: Names, given: Size | None, stated: Size | None) -> dict[str, Any]:
    """Returns the fields of a core model of the Perception Encoder, with places scaled to the grid of the file.

    Raises:
        UserError: as `infer_fields`.
    """
    untold = {"norm_epsilon": 1e-5, "pre_norm": True, "pooling": "map", "map_prefix": True, "map_heads": PE_HEADS}
    widening = f"{names.map_head.prefix}mlp.fc1.weight"
    arrays.check_present([widening])
    fields = infer_fields(arrays, names, given, stated, untold=untold | {"rotary": "axial_xy"})
    fields["map_mlp_dim"] = arrays.shape_of(widening)[0]
    fields["rotary_grid"] = fields["resolution"][0] // fields["patch_size"]
    return fields | timm_vit.head_fields(arrays, names, fields["num_classes"])


def read_own_keys(args: Mapping[str, Any], *, arguments: Mapping[str, Any], rotary: str) -> dict[str, Any]:
    """Returns the fields that the arguments of Eva state.

    Args:
        args: the arguments.
        arguments: those that no array tells, with their only values in models of the family.
        rotary: the form of rotation in the family.

    Raises:
        UserError: vit_jax does not compute the model.
    """
    for key, value in arguments.items():
        if args.get(key, value) not in (value, None):
            raise UserError(f"{key} in its configuration is {args[key]!r}, not {value!r}, as vit_jax reads such arrays")
    fields: dict[str, Any] = {}
    if args.get("swiglu_mlp") is not None:  # the architecture may state another activation
        fields["activation"] = "swiglu" if args["swiglu_mlp"] else "gelu"
    if args.get("use_rot_pos_emb") is False:
        return fields | {"rotary": "none", "rotary_grid": 0}
    if args.get("use_rot_pos_emb"):
        fields["rotary"] = rotary
    if args.get("rope_temperature") is not None:
        fields["rotary_theta"] = read_float(args["rope_temperature"], "rope_temperature")
    if "ref_feat_shape" in args and rotary != "centred":  # which does not depend on a grid
        grid = args["ref_feat_shape"]
        sides = grid if isinstance(grid, list | tuple) else [grid]
        if len({*map(str, sides)}) != 1:
            raise UserError(f"ref_feat_shape in its configuration must be a square, not {grid!r}")
        fields["rotary_grid"] = 0 if grid is None else read_int(sides[0], "ref_feat_shape")
    if args.get("attn_pool_num_heads") is not None:
        fields["map_heads"] = read_int(args["attn_pool_num_heads"], "attn_pool_num_heads")
    return fields


def describe(name: str, model: Model, *, pattern: str, default: str, **more: Any) -> dict[str, str]:
    """Returns `config.json` -> its content, for a model of one of the families.

    Args:
        name: the name of the file.
        model: the model.
        pattern: of the names of the family's architectures; {0}: the patch size.
        default: the architecture if none has the sizes of the model.
        more: arguments that follow from the family.

    Raises:
        UserError: timm cannot state its preprocessing.
    """
    value = model.field
    args = timm_config.size_arguments(model) | {
        "mlp_ratio": (value("mlp_dim") + 0.5) / value("width"),  # timm rounds the product down
        "num_reg_tokens": value("registers"),
        "use_fc_norm": value("final_norm") == "pooled",
        "qkv_bias": value("qkv_bias") != "none",
        "swiglu_mlp": value("activation") == "swiglu",
        "scale_mlp": value("mlp_norm"),
        "use_abs_pos_emb": value("position") == "learned",
        "use_rot_pos_emb": value("rotary") != "none",
        "rope_temperature": value("rotary_theta"),
        "ref_feat_shape": [value("rotary_grid")] * 2 if value("rotary_grid") else None,
    }
    return timm_config.describe(model, timm_config.nearest_of(model, pattern, default), args | more)


def describe_dinov3(name: str, model: Model) -> dict[str, str]:
    """Returns what `describe` does; the names of DINOv3's architectures tell whether projections have biases."""
    pattern = r"vit_\w+_patch{0}_dinov3" + ("" if model.field("qkv_bias") == "none" else "_qkvb")
    # With an alignment of 0, timm has both widening layers in one array.
    return describe(name, model, pattern=pattern, default="vit_base_patch16_dinov3", swiglu_align_to=1)


def describe_pe(name: str, model: Model) -> dict[str, str]:
    """Returns what `describe` does, with the arguments of the pooling."""
    value = model.field
    pool = {
        "attn_pool_num_heads": value("map_heads") or value("num_heads"),
        "attn_pool_mlp_ratio": ((value("map_mlp_dim") or value("mlp_dim")) + 0.5) / value("width"),
    }
    pattern, default = r"vit_pe_core_[a-z]+_patch{0}_\d+", "vit_pe_core_base_patch16_224"
    return describe(name, model, pattern=pattern, default=default, **PE_ARGUMENTS, **pool)


def unsupported(spec: ModelSpec) -> dict[str, bool]:
    """Returns feature that no Eva has -> whether a model has it."""
    return {
        "a head of patches": spec.head.kind == "patches",
        "a classifier after a projection": bool(spec.head.projection and spec.head.num_classes),
    }


def unsupported_dinov3(spec: ModelSpec) -> dict[str, bool]:
    """Returns feature that no DINOv3 has -> whether a model has it."""
    return unsupported(spec) | {
        "layer_scale 0 in a DINOv3": not spec.block.layer_scale,
        "registers 0 in a DINOv3": not spec.prefix.registers,
        "no class token in a DINOv3": not spec.class_rows,
    }


PATCHES, FUSED = r"patch_embed\.proj\.weight", r"blocks\.0\.attn\.qkv\.weight"
EVA: Family = dataclasses.replace(
    timm_vit.FAMILY,
    name="EVA",
    marks=(PATCHES, FUSED, r"blocks\.0\.attn\.q_bias"),
    names=NAMES._replace(gated=NAMES.dense),
    older_names=(),
    fields=infer_eva,
    own_keys=TOLD | READ | EVA_ARGUMENTS.keys(),
    read_own_keys=functools.partial(read_own_keys, arguments=EVA_ARGUMENTS, rotary="axial"),
    table=torch_tables.model_leaves,
    requires=required_defaults(STATED)
    | {
        "pooling": ("gap", "token"),
        "position": ("learned", "none"),
        "rotary": ("axial", "none"),
        "qkv_bias": ("query_value",),
        "activation": ("gelu", "swiglu"),
        "mlp_norm": (False,),
        "norm_epsilon": (1e-6,),
        "embed_bias": (True,),
        "pre_logits": (False,),
    },
    unsupported=unsupported,
    config=functools.partial(
        describe, pattern=r"(eva02_[a-z]+|eva_giant)_patch{0}_\d+", default="eva02_tiny_patch14_224", qkv_fused=True
    ),
)
# EVA-02 B and L: projections apart, and a norm in the MLP.
EVA02: Family = dataclasses.replace(
    EVA,
    name="EVA-02",
    marks=(PATCHES, r"blocks\.0\.attn\.q_proj\.weight"),
    names=NAMES._replace(
        attention=("attn.q_proj.", "attn.k_proj.", "attn.v_proj."),
        biases=("attn.q_proj.bias", "attn.k_proj.bias", "attn.v_proj.bias"),
    ),
    requires={**EVA.requires, "mlp_norm": (True,)},
    config=functools.partial(
        describe, pattern=r"eva02_[a-z]+_patch{0}_\d+", default="eva02_base_patch14_224", qkv_fused=False
    ),
)
DINOV3: Family = dataclasses.replace(
    EVA,
    name="DINOv3",
    marks=(PATCHES, FUSED, r"blocks\.0\.gamma_1", r"cls_token", r"reg_token"),
    names=NAMES._replace(rotates_halves=True),
    fields=functools.partial(
        infer_fields,
        # timm's models pool the patches, those of Meta the class token.
        untold={"pooling": "gap", "rotary": "centred", "rotary_theta": DINOV3_THETA, "norm_epsilon": 1e-5},
    ),
    own_keys=TOLD | READ | DINOV3_ARGUMENTS.keys(),
    read_own_keys=functools.partial(read_own_keys, arguments=DINOV3_ARGUMENTS, rotary="centred"),
    requires={
        **EVA.requires,
        "position": ("none",),
        "rotary": ("centred",),
        "qkv_bias": ("query_value", "none"),
        "norm_epsilon": (1e-5,),
    },
    unsupported=unsupported_dinov3,
    config=describe_dinov3,
)
PERCEPTION_ENCODER: Family = dataclasses.replace(
    EVA,
    name="Perception Encoder",
    marks=(PATCHES, FUSED, r"norm_pre\.weight", r"attn_pool\.latent"),
    names=NAMES._replace(pre_norm="norm_pre.", biases=None),
    fields=infer_pe,
    own_keys=TOLD | READ | PE_ARGUMENTS.keys() | {"attn_pool_num_heads", "attn_pool_mlp_ratio"},
    read_own_keys=functools.partial(read_own_keys, arguments=PE_ARGUMENTS, rotary="axial_xy"),
    requires={
        **{name: values for name, values in EVA.requires.items() if name != "projection"},
        "pre_norm": (True,),
        "embed_bias": (False,),
        "rotary": ("axial_xy",),
        "qkv_bias": ("all",),
        "activation": ("gelu",),
        "norm_epsilon": (1e-5,),
        "pooling": ("map",),
        "map_prefix": (True,),
    },
    zeros=timm_vit.head_zeros,
    config=describe_pe,
)
