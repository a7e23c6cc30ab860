"""The layouts of BEiT (arXiv 2106.08254) and BEiT v2 (2208.06366) in timm and transformers.

Every block has a table of relative biases, and keys have no bias. Source of the names and of the configurations' keys:
huggingface/pytorch-image-models 1.0.31, timm/models/beit.py; huggingface/transformers 5.24, models/beit.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from vit_jax import UserError
from vit_jax.interop import timm_config, timm_vit, torch_tables, transformers_config, transformers_families
from vit_jax.interop.archives import Archive
from vit_jax.interop.layout import Size, required_defaults
from vit_jax.interop.published_config import split_keys
from vit_jax.interop.torch_tables import Names
from vit_jax.model import Model
from vit_jax.models import ModelSpec

SAME = {"qkv_bias": "query_value", "class_token": "always"}  # of every BEiT
TIMM_NAMES = timm_vit.NAMES._replace(
    layer_scales=("gamma_1", "gamma_2"),
    biases=("attn.q_bias", "attn.k_bias", "attn.v_bias"),
    relative_bias="attn.relative_position_bias_table",
)
ATTENTION = "attention.attention."
TRANSFORMERS_NAMES = transformers_families.VIT_NAMES._replace(
    layer_scales=("lambda_1", "lambda_2"),
    biases=(f"{ATTENTION}query.bias", f"{ATTENTION}key.bias", f"{ATTENTION}value.bias"),
    relative_bias=f"{ATTENTION}relative_position_bias.relative_position_bias_table",
    pooled_norm="pooler.layernorm.",
)
REQUIRED = {
    "position": ("relative_bias",),
    "position_rows": ("all",),
    "qkv_bias": ("query_value",),
    "registers": (0,),
    "stem": ("patches",),
    "embed_bias": (True,),
    "qk_norm": (False,),
    "distilled_head": (False,),
    "pre_logits": (False,),
}
STATED = (
    *("width", "depth", "mlp_dim", "num_heads", "pooling", "final_norm", "class_token", "layer_scale", "head"),
    *("image_mean", "image_std", "activation", "norm_epsilon", *REQUIRED),
)


def infer_timm(arrays: Archive, names: Names, given: Size | None, stated: Size | None) -> dict[str, Any]:
    """Returns the fields that follow from the arrays of a file of timm; see `Family.fields`.

    Raises:
        UserError: an array is missing that determines a field, or the biases fit no image size.
    """
    fields = timm_vit.infer_fields(arrays, names, given, stated) | SAME
    return fields | torch_tables.infer_biases(arrays, names, fields["patch_size"], (stated, None, given))


def infer_transformers(arrays: Archive, names: Names, given: Size | None, stated: Size | None) -> dict[str, Any]:
    """Returns the fields that follow from the arrays of a file of transformers; raises as `infer_timm`."""
    fields = torch_tables.infer_fields(arrays, names) | SAME | {"pooling": "gap", "final_norm": "pooled"}
    return fields | torch_tables.infer_biases(arrays, names, fields["patch_size"], (stated, None, given))


def check_own_keys(content: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Returns no fields; raises UserError if a key has another value than those that are supported."""
    for key, values in supported.items():
        if content.get(key, values[0]) not in values:
            raise UserError(f"{key} in its configuration is {content[key]!r}, which vit_jax does not compute in a BEiT")
    return {}


def unsupported(spec: ModelSpec) -> dict[str, bool]:
    """Returns feature that timm's BEiT does not compute -> whether a model has it."""
    return {
        "a head of patches": spec.head.kind == "patches",
        "no class token in a BEiT": not spec.class_rows,
        f"norm_epsilon {spec.block.norm_epsilon:g}": spec.block.norm_epsilon != timm_vit.EPSILON,
    }


def unsupported_by_transformers(spec: ModelSpec) -> dict[str, bool]:
    """Returns feature that transformers' BEiT does not compute -> whether a model has it."""
    height, width = spec.position.image_size
    return {
        "a head of patches": spec.head.kind == "patches",
        "no class token in a BEiT": not spec.class_rows,
        f"images of {height}x{width} pixels in a BEiT": height != width,  # whose tables it takes for transposed ones
    }


def transformers_keys(model: Model) -> dict[str, Any]:
    """Returns the keys that only transformers' configurations of BEiT have."""
    return {
        "use_relative_position_bias": True,
        "use_absolute_position_embeddings": False,
        "use_shared_relative_position_bias": False,
        "use_mean_pooling": True,
        "layer_scale_init_value": model.field("layer_scale"),
    }


TIMM = dataclasses.replace(
    timm_vit.FAMILY,
    name="Beit",
    marks=(*timm_vit.FAMILY.marks, r"blocks\.0\.attn\.relative_position_bias_table"),
    names=TIMM_NAMES,
    older_names=(),
    ignored=r"mask_token|.*relative_position_index",
    fields=infer_timm,
    own_keys=split_keys(
        "use_fc_norm use_abs_pos_emb use_rel_pos_bias use_shared_rel_pos_bias swiglu_mlp scale_mlp head_init_scale"
    ),
    read_own_keys=functools.partial(
        check_own_keys,
        supported={"use_shared_rel_pos_bias": (False,), "swiglu_mlp": (False,), "scale_mlp": (False,)},
    ),
    requires=required_defaults(STATED)
    | REQUIRED
    | {"pooling": ("token", "gap"), "final_norm": ("tokens", "pooled"), "activation": ("gelu",)},
    unsupported=unsupported,
    resample="geometric",
    config=timm_config.describe_beit,
)
TRANSFORMERS = dataclasses.replace(
    transformers_families.VIT,
    name="beit",
    marks=(
        *transformers_families.VIT.marks,
        r"encoder\.layer\.0\.attention\.attention\.relative_position_bias\.relative_position_bias_table",
    ),
    names=TRANSFORMERS_NAMES,
    ignored=r"embeddings\.mask_token|.*relative_position_index",
    ignored_beside_classifier=r"(?!)",
    fields=infer_transformers,
    untold=("norm_epsilon", "activation"),
    own_keys=split_keys(
        """use_relative_position_bias use_absolute_position_embeddings use_shared_relative_position_bias
        use_mean_pooling layer_scale_init_value vocab_size add_fpn auxiliary_channels auxiliary_concat_input
        auxiliary_loss_weight auxiliary_num_convs pool_scales semantic_loss_ignore_index use_auxiliary_head"""
    ),
    read_own_keys=functools.partial(
        check_own_keys,
        supported={"use_shared_relative_position_bias": (False,), "use_mean_pooling": (True,)},
    ),
    requires=required_defaults(STATED)
    | REQUIRED
    | {"pooling": ("gap",), "final_norm": ("pooled",), "activation": ("gelu", "gelu_tanh", "quick_gelu")},
    unsupported=unsupported_by_transformers,
    prefix="beit.",
    resample="bilinear",
    config=functools.partial(
        transformers_config.describe,
        model_type="beit",
        classes=("BeitModel", "BeitForImageClassification"),
        own_keys=transformers_keys,
    ),
)
PROJECTIONS_IN_MEMORY = transformers_families.in_memory(TRANSFORMERS, "layers.")
TRANSFORMERS_IN_MEMORY = dataclasses.replace(
    PROJECTIONS_IN_MEMORY,
    marks=(*transformers_families.VIT.marks, r"layers\.0\.relative_position_bias\.relative_position_bias_table"),
    names=PROJECTIONS_IN_MEMORY.names._replace(
        biases=tuple(f"{prefix}bias" for prefix in PROJECTIONS_IN_MEMORY.names.attention),
        relative_bias="relative_position_bias.relative_position_bias_table",
    ),
)
