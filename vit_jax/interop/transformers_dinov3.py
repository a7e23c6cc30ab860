"""The layout of transformers' DINOv3 (arXiv 2508.10104).

Source of the names and of the configuration's keys: huggingface/transformers 5.24, models/dinov3_vit.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from vit_jax import UserError
from vit_jax.interop import torch_tables, transformers_config
from vit_jax.interop.archives import Archive
from vit_jax.interop.layout import Size, required_defaults
from vit_jax.interop.published_config import read_float, split_keys
from vit_jax.interop.torch_tables import Names
from vit_jax.interop.transformers_families import STATED, VIT
from vit_jax.model import Model
from vit_jax.models import BIASED, ModelSpec

THETA = 100.0  # where a configuration states none
PROJECTIONS = ("query", "key", "value")
NAMES: Names = VIT.names._replace(
    patches="embeddings.patch_embeddings.",
    registers="embeddings.register_tokens",
    position="",  # there are none: queries and keys are rotated
    blocks="layer.",
    norms=("norm1.", "norm2."),
    attention=("attention.q_proj.", "attention.k_proj.", "attention.v_proj."),
    out="attention.o_proj.",
    dense=(("mlp.up_proj.",), "mlp.down_proj."),
    gated=(("mlp.gate_proj.", "mlp.up_proj."), "mlp.down_proj."),
    norm="norm.",
    rotates_halves=True,
)


def infer_fields(arrays: Archive, names: Names, given: Size | None, stated: Size | None) -> dict[str, Any]:
    """Returns the fields that follow from the arrays; see `Family.fields`.

    Raises:
        UserError: an array is missing that determines a field, or other projections have a bias than in our models.
    """
    biased = tuple(part for part, layer in enumerate(names.attention) if f"{names.blocks}0.{layer}bias" in arrays)
    fields = torch_tables.infer_fields(arrays, names) | {
        "pooling": "token",
        "rotary": "centred",
        "rotary_theta": THETA,
        "qkv_bias": _word(biased),
    }
    return fields | torch_tables.infer_positions(arrays, names, fields, given, stated)


def _word(biased: tuple[int, ...]) -> str:
    """Returns the word of `qkv_bias` for the projections with a bias; raises UserError if there is none."""
    for word, parts in BIASED.items():
        if biased == (tuple(range(len(PROJECTIONS))) if parts is None else parts):
            return word
    listed = " and ".join(PROJECTIONS[part] for part in biased)
    raise UserError(f"of its projections of queries, keys and values only {listed} has a bias")


def read_own_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that a configuration states by keys of this family; raises UserError for other models."""
    for key in ("proj_bias", "mlp_bias"):
        if content.get(key, True) is not True:
            raise UserError(f"{key} in its configuration is {content[key]!r}, which vit_jax does not compute")
    gated, activation = content.get("use_gated_mlp") is True, content.get("hidden_act", "gelu")
    if gated != (activation == "silu"):
        raise UserError(f"vit_jax computes no DINOv3 with use_gated_mlp={gated} and hidden_act={activation!r}")
    stated = tuple(part for part, name in enumerate(PROJECTIONS) if content.get(f"{name}_bias", name != "key") is True)
    return {"rotary_theta": read_float(content.get("rope_theta", THETA), "rope_theta"), "qkv_bias": _word(stated)}


def own_keys(model: Model) -> dict[str, Any]:
    """Returns the keys that only this family's configurations have."""
    value, gated = model.field, model.field("activation") == "swiglu"
    biased = BIASED[value("qkv_bias")]
    return {
        **{f"{name}_bias": biased is None or part in biased for part, name in enumerate(PROJECTIONS)},
        "proj_bias": True,
        "mlp_bias": True,
        "use_gated_mlp": gated,
        **({"hidden_act": "silu"} if gated else {}),
        "rope_theta": value("rotary_theta"),
        "num_register_tokens": value("registers"),
        "layerscale_value": value("layer_scale"),
    }


def unsupported(spec: ModelSpec) -> dict[str, bool]:
    """Returns feature that DINOv3 does not compute -> whether a model has it."""
    return {
        "a head of patches": spec.head.kind == "patches",
        "layer_scale 0 in a DINOv3": not spec.block.layer_scale,
        "registers 0 in a DINOv3": not spec.prefix.registers,
    }


DINOV3 = dataclasses.replace(
    VIT,
    name="dinov3_vit",
    marks=(r"embeddings\.patch_embeddings\.weight", r"layer\.0\.attention\.q_proj\.weight"),
    names=NAMES,
    fields=infer_fields,
    defaults={"norm_epsilon": 1e-5, "activation": "gelu"},
    own_keys=split_keys(
        """query_bias key_bias value_bias proj_bias mlp_bias use_gated_mlp rope_theta pos_embed_shift pos_embed_jitter
        pos_embed_rescale"""  # the last three are of the training
    ),
    read_own_keys=read_own_keys,
    requires=required_defaults((*STATED, "position", "rotary", "rotary_theta", "qkv_bias"))
    | {
        "pooling": ("token",),
        "position": ("none",),
        "rotary": ("centred",),
        "pre_logits": (False,),
        "num_classes": (0,),
        "activation": ("gelu", "gelu_tanh", "swiglu"),
    },
    unsupported=unsupported,
    zeros=lambda spec: {"embeddings.mask_token": (1, 1, spec.width)},  # only the training uses it
    prefix="",
    config=functools.partial(
        transformers_config.describe, model_type="dinov3_vit", classes=("DINOv3ViTModel",), own_keys=own_keys
    ),
)
IN_MEMORY = dataclasses.replace(
    DINOV3,
    marks=(r"embeddings\.patch_embeddings\.weight", r"model\.layer\.0\.attention\.q_proj\.weight"),
    names=NAMES._replace(blocks="model.layer."),
    is_written=False,
)
