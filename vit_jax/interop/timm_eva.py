"""The layouts of timm's Eva, which computes DINOv3 (arXiv 2508.10104).

Source of the names, of the arguments and of their values: huggingface/pytorch-image-models 1.0.31, timm/models/eva.py,
timm/layers/attention.py, mlp.py and pos_embed_sincos.py.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from vit_jax import UserError
from vit_jax.interop import timm_config, timm_vit, torch_tables
from vit_jax.interop.archives import Archive
from vit_jax.interop.layout import Family, Size, required_defaults
from vit_jax.interop.published_config import read_float, split_keys
from vit_jax.interop.torch_tables import Names
from vit_jax.model import Model
from vit_jax.models import ModelSpec

NAMES = timm_vit.NAMES._replace(
    layer_scales=("gamma_1", "gamma_2"),
    gated=(("mlp.fc1_g.", "mlp.fc1_x."), "mlp.fc2."),
    biases=("attn.q_bias", "attn.k_bias", "attn.v_bias"),  # keys have none: timm's is zero, and in no file
)
# Fields that the arrays or the configuration state. Any other field must have its default.
STATED = (
    *("width", "depth", "mlp_dim", "num_heads", "pooling", "final_norm", "class_token", "registers", "layer_scale"),
    *("position", "position_rows", "rotary", "rotary_grid", "rotary_theta", "qkv_bias", "activation", "norm_epsilon"),
    *("embed_bias", "image_mean", "image_std"),
)
# Arguments of Eva that the arrays tell, that the reader of all configurations knows, or that only training needs.
TOLD = split_keys(
    """num_reg_tokens qkv_bias qkv_fused swiglu_mlp swiglu_align_to scale_mlp use_abs_pos_emb use_fc_norm
    use_pre_transformer_norm use_post_transformer_norm head_init_scale rope_shift_coords rope_jitter_coords
    rope_rescale_coords"""
)
# Those that no array tells: argument -> its value in models of the family.
DINOV3_ARGUMENTS: Mapping[str, Any] = {
    "attn_type": "eva",
    "use_post_norm": False,
    "use_rot_pos_emb": True,
    "rope_type": "dinov3",
    "rope_grid_offset": 0.0,
    "rope_grid_indexing": "ij",
    "rope_rotate_half": True,
}
DINOV3_THETA = 100.0


def infer_fields(
    arrays: Archive, names: Names, given: Size | None, stated: Size | None, *, untold: Mapping[str, Any]
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
    pooled = f"{names.pooled_norm}weight" in arrays
    fields = {"activation": "gelu"} | untold | torch_tables.infer_fields(arrays, names)
    fields |= {
        "final_norm": "pooled" if pooled else "tokens",
        "class_token": "always" if names.cls in arrays else "auto",
        "qkv_bias": "query_value" if f"{names.blocks}0.attn.q_bias" in arrays else "none",
    }
    return fields | torch_tables.infer_positions(arrays, names, fields, given, stated)


def read_own_keys(args: Mapping[str, Any], *, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that the arguments of Eva state; raises UserError for models that vit_jax does not compute.

    `arguments` are those that no array tells, with their values in models of the family.
    """
    for key, value in arguments.items():
        if args.get(key, value) not in (value, None):
            raise UserError(
                f"{key} in its configuration is {args[key]!r}, but vit_jax reads such arrays with {value!r}"
            )
    if args.get("rope_temperature") is None:
        return {}
    return {"rotary_theta": read_float(args["rope_temperature"], "rope_temperature")}


def describe_dinov3(name: str, model: Model) -> dict[str, str]:
    """Returns `config.json` -> its content, for a DINOv3.

    Raises:
        UserError: timm cannot state its preprocessing.
    """
    value, biased = model.field, model.field("qkv_bias") != "none"
    args = timm_config.size_arguments(model) | {
        "dynamic_img_size": True,
        "mlp_ratio": (value("mlp_dim") + 0.5) / value("width"),  # timm rounds the product down
        "num_reg_tokens": value("registers"),
        "use_fc_norm": value("final_norm") == "pooled",
        "qkv_bias": biased,
        "swiglu_mlp": value("activation") == "swiglu",
        "swiglu_align_to": 1,  # 0: both widening layers are one
        "rope_temperature": value("rotary_theta"),
    }
    pattern = rf"vit_\w+_patch{{0}}_dinov3{'_qkvb' if biased else ''}"
    return timm_config.describe(model, timm_config.nearest_of(model, pattern, "vit_base_patch16_dinov3"), args)


def unsupported_dinov3(spec: ModelSpec) -> dict[str, bool]:
    """Returns feature that no DINOv3 has -> whether a model has it."""
    return {
        "a head of patches": spec.head.kind == "patches",
        "layer_scale 0 in a DINOv3": not spec.block.layer_scale,
        "registers 0 in a DINOv3": not spec.prefix.registers,
        "no class token in a DINOv3": not spec.class_rows,
    }


DINOV3: Family = dataclasses.replace(
    timm_vit.FAMILY,
    name="DINOv3",
    marks=(
        r"patch_embed\.proj\.weight",
        *(r"cls_token", r"reg_token", r"blocks\.0\.attn\.qkv\.weight", r"blocks\.0\.gamma_1"),
    ),
    names=NAMES._replace(rotates_halves=True),
    older_names=(),
    fields=functools.partial(
        infer_fields,
        # timm's models pool the patches, those of Meta the class token.
        untold={"pooling": "gap", "rotary": "centred", "rotary_theta": DINOV3_THETA, "norm_epsilon": 1e-5},
    ),
    own_keys=TOLD | DINOV3_ARGUMENTS.keys() | {"rope_temperature"},
    read_own_keys=functools.partial(read_own_keys, arguments=DINOV3_ARGUMENTS),
    table=torch_tables.model_leaves,
    requires=required_defaults(STATED)
    | {
        "pooling": ("gap", "token"),
        "position": ("none",),
        "rotary": ("centred",),
        "qkv_bias": ("query_value", "none"),
        "activation": ("gelu", "swiglu"),
        "norm_epsilon": (1e-5,),
        "embed_bias": (True,),
        "pre_logits": (False,),
    },
    unsupported=unsupported_dinov3,
    config=describe_dinov3,
)
