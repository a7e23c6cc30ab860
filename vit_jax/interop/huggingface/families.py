"""The names of the arrays of transformers' vision models, and what each family of models computes.

Source of the names: huggingface/transformers, models/{vit,deit,dinov2,dinov2_with_registers,siglip}. Since version 5
some models in memory (`state_dict`) have other names than in the files of `save_pretrained`: conversion_mapping.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_jax.interop.mapping import unstated_fields


class Family(NamedTuple):
    """The names of a family's arrays, without the model's prefix and, inside a block, without the block's name."""

    prefix: str  # the prefix of all arrays but the classifier's
    blocks: str  # prefix; the index of the block follows
    norms: tuple[str, str]
    attention: tuple[str, str, str]  # query, key, value
    out: str
    dense: tuple[str, str]
    gated: tuple[tuple[str, ...], str]  # the MLP with SwiGLU; its two widening projections may be one array
    norm: str
    patches: str
    position: str
    registers: str
    requires: Mapping[str, tuple[Any, ...]]  # field -> the values with which a model belongs to the family


# Fields that the files of every family state. All other fields have our defaults, or the values in `requires` below.
STATED = (
    *("width", "depth", "mlp_dim", "num_heads", "pooling", "class_token", "registers", "position_rows", "activation"),
    *("norm_epsilon", "layer_scale", "image_mean", "image_std", "stages", "head"),
)
ALL = {name: (value,) for name, value in unstated_fields(STATED).items()}
PLAIN = ALL | {"layer_scale": (0.0,), "activation": ("gelu", "gelu_tanh"), "class_token": ("auto",)}

VIT = Family(
    prefix="vit.",
    blocks="encoder.layer.",
    norms=("layernorm_before.", "layernorm_after."),
    attention=("attention.attention.query.", "attention.attention.key.", "attention.attention.value."),
    out="attention.output.dense.",
    dense=("intermediate.dense.", "output.dense."),
    gated=((), ""),
    norm="layernorm.",
    patches="embeddings.patch_embeddings.projection.",
    position="embeddings.position_embeddings",
    registers="",
    requires=PLAIN | {"pooling": ("token",), "registers": (0,)},
)
DEIT = VIT._replace(
    prefix="deit.",
    registers="embeddings.distillation_token",
    requires=PLAIN
    | {"pooling": ("token",), "registers": (1,), "position_rows": ("all",), "distilled_head": (False, True)},
)
DINOV2 = VIT._replace(
    prefix="dinov2.",
    norms=("norm1.", "norm2."),
    dense=("mlp.fc1.", "mlp.fc2."),
    gated=(("mlp.weights_in.",), "mlp.weights_out."),
    requires=ALL | {"pooling": ("token", "token_gap"), "registers": (0,), "pre_logits": (False,)},
)
DINOV2_WITH_REGISTERS = DINOV2._replace(
    prefix="dinov2_with_registers.",
    registers="embeddings.register_tokens",
    requires=ALL | {"pooling": ("token", "token_gap"), "position_rows": ("class", "patches"), "pre_logits": (False,)},
)
SIGLIP = VIT._replace(
    prefix="vision_model.",
    blocks="encoder.layers.",
    norms=("layer_norm1.", "layer_norm2."),
    attention=("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
    out="self_attn.out_proj.",
    dense=("mlp.fc1.", "mlp.fc2."),
    norm="post_layernorm.",
    patches="embeddings.patch_embedding.",
    position="embeddings.position_embedding.weight",
    requires=PLAIN | {"pooling": ("map",), "registers": (0,), "pre_logits": (False,), "num_classes": (0,)},
)
FAMILIES = {
    "vit": VIT,
    "deit": DEIT,
    "dinov2": DINOV2,
    "dinov2_with_registers": DINOV2_WITH_REGISTERS,
    "siglip_vision_model": SIGLIP,
}


def _in_memory(family: Family, blocks: str) -> Family:
    return family._replace(
        blocks=blocks,
        attention=("attention.q_proj.", "attention.k_proj.", "attention.v_proj."),
        out="attention.o_proj.",
        dense=("mlp.fc1.", "mlp.fc2."),
        gated=(("mlp.gate_proj.", "mlp.up_proj."), "mlp.down_proj.") if family.gated[0] else family.gated,
    )


# The families whose models have other names in memory than in their files.
IN_MEMORY = {
    "vit": _in_memory(VIT, "layers."),
    "deit": _in_memory(DEIT, "layers."),
    "dinov2": _in_memory(DINOV2, DINOV2.blocks),
    "dinov2_with_registers": _in_memory(DINOV2_WITH_REGISTERS, DINOV2.blocks),
}

CLS, POOLER = "embeddings.cls_token", "pooler.dense."
# distilled_head -> (our name of a head -> its prefix in the file)
CLASSIFIERS = {
    False: {"head": "classifier."},
    True: {"head": "cls_classifier.", "distilled_head": "distillation_classifier."},
}
MASK_TOKEN = "embeddings.mask_token"
