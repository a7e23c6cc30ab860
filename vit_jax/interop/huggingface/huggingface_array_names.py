"""The names of the arrays of transformers' vision models, and what each family of models computes.

Source of the names: huggingface/transformers, models/{vit,deit,dinov2,dinov2_with_registers,siglip}. Since version 5
some models in memory (`state_dict`) have other names than in the files of `save_pretrained`: conversion_mapping.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_jax.interop.mapping import unstated_fields
from vit_jax.interop.pytorch import MapNames, MlpNames, Names


class Family(NamedTuple):
    """A family of models.

    Attributes:
        names: the names of its arrays in files, without the model's prefix.
        prefix: the prefix of all arrays but the classifier's.
        requires: field -> the values with which a model belongs to the family.
        resample: how its class resamples positions, see `models.resample_positions`; older versions
            of some classes added 0.1 patch to the new grid.
    """

    names: Names
    prefix: str
    requires: Mapping[str, tuple[Any, ...]]
    resample: str = "bicubic_no_antialias"


# Fields that the files of every family state. All other fields have our defaults, or the values in `requires` below.
STATED = (
    *("width", "depth", "mlp_dim", "num_heads", "pooling", "class_token", "registers", "position_rows", "activation"),
    *("norm_epsilon", "layer_scale", "image_mean", "image_std", "stages", "head"),
)
ALL = {name: (value,) for name, value in unstated_fields(STATED).items()}
PLAIN = ALL | {"layer_scale": (0.0,), "activation": ("gelu", "gelu_tanh"), "class_token": ("auto",)}

# distilled_head -> (our name of a head -> its prefix in the file)
CLASSIFIERS = {
    False: {"head": "classifier."},
    True: {"head": "cls_classifier.", "distilled_head": "distillation_classifier."},
}
VIT = Names(
    patches="embeddings.patch_embeddings.projection.",
    cls="embeddings.cls_token",
    registers="",
    position="embeddings.position_embeddings",
    blocks="encoder.layer.",
    norms=("layernorm_before.", "layernorm_after."),
    attention=("attention.attention.query.", "attention.attention.key.", "attention.attention.value."),
    out="attention.output.dense.",
    layer_scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
    dense=(("intermediate.dense.",), "output.dense."),
    gated=(("intermediate.dense.",), "output.dense."),
    norm="layernorm.",
    map_head=MapNames(
        prefix="head.",
        probe="probe",
        projections=("attention.in_proj_",) * 3,
        out="attention.out_proj.",
        norm="layernorm.",
    ),
    pre_logits="pooler.dense.",
    heads=CLASSIFIERS[False],
)
DEIT = VIT._replace(registers="embeddings.distillation_token")
FC: MlpNames = (("mlp.fc1.",), "mlp.fc2.")
DINOV2 = VIT._replace(norms=("norm1.", "norm2."), dense=FC, gated=(("mlp.weights_in.",), "mlp.weights_out."))
DINOV2_WITH_REGISTERS = DINOV2._replace(registers="embeddings.register_tokens")
SIGLIP = VIT._replace(
    blocks="encoder.layers.",
    norms=("layer_norm1.", "layer_norm2."),
    attention=("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
    out="self_attn.out_proj.",
    dense=FC,
    gated=FC,
    norm="post_layernorm.",
    patches="embeddings.patch_embedding.",
    position="embeddings.position_embedding.weight",
    position_ones=0,
)
# The model_type in config.json -> family, in the order in which the families are tried.
FAMILIES = {
    "vit": Family(VIT, "vit.", PLAIN | {"pooling": ("token",), "registers": (0,)}),
    "deit": Family(
        DEIT,
        "deit.",
        PLAIN | {"pooling": ("token",), "registers": (1,), "position_rows": ("all",), "distilled_head": (False, True)},
    ),
    "dinov2": Family(
        DINOV2, "dinov2.", ALL | {"pooling": ("token", "token_gap"), "registers": (0,), "pre_logits": (False,)}
    ),
    "dinov2_with_registers": Family(
        DINOV2_WITH_REGISTERS,
        "dinov2_with_registers.",
        ALL | {"pooling": ("token", "token_gap"), "position_rows": ("class", "patches"), "pre_logits": (False,)},
        "bicubic",
    ),
    "siglip_vision_model": Family(
        SIGLIP,
        "vision_model.",
        PLAIN | {"pooling": ("map",), "registers": (0,), "pre_logits": (False,), "num_classes": (0,)},
    ),
}


def _in_memory(names: Names, blocks: str) -> Names:
    return names._replace(
        blocks=blocks,
        attention=("attention.q_proj.", "attention.k_proj.", "attention.v_proj."),
        out="attention.o_proj.",
        dense=FC,
        gated=FC if names.gated == names.dense else (("mlp.gate_proj.", "mlp.up_proj."), "mlp.down_proj."),
    )


# The names of the families whose models have other names in memory than in their files.
IN_MEMORY = {
    "vit": _in_memory(VIT, "layers."),
    "deit": _in_memory(DEIT, "layers."),
    "dinov2": _in_memory(DINOV2, DINOV2.blocks),
    "dinov2_with_registers": _in_memory(DINOV2_WITH_REGISTERS, DINOV2.blocks),
}

MASK_TOKEN = "embeddings.mask_token"
