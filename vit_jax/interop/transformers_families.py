"""The layouts of transformers' vision models: ViT, ViTMAE, DeiT, Dinov2 (registers or not), Siglip's vision towers.

A file has either the bare model or a model with a classifier; a DeiT may have two classifiers. What no array states
(heads, epsilon, activation) is in `config.json` beside the file.

Source of the names: huggingface/transformers, models/{vit,deit,dinov2,dinov2_with_registers,siglip,siglip2}. Since
version 5 some models in memory (`state_dict`) have other names than in the files of `save_pretrained`:
conversion_mapping.py.
"""

import dataclasses
import functools
import re
from typing import Any

from vit_jax import UserError
from vit_jax.interop import torch_tables, transformers_config
from vit_jax.interop.archives import Archive
from vit_jax.interop.layout import Family, ParameterTable, Size, required_defaults
from vit_jax.interop.torch_tables import MapNames, MlpNames, Names
from vit_jax.model import Model
from vit_jax.models import ModelSpec

# Fields that the files of every family state. All other fields have our defaults, or the values that a family requires.
STATED = (
    *("width", "depth", "mlp_dim", "num_heads", "pooling", "class_token", "registers", "position_rows", "activation"),
    *("norm_epsilon", "layer_scale", "image_mean", "image_std", "stages", "head"),
)
ALL = required_defaults(STATED) | {"activation": tuple(transformers_config.WORDS)}
PLAIN = ALL | {"layer_scale": (0.0,), "activation": ("gelu", "gelu_tanh", "quick_gelu"), "class_token": ("auto",)}

# distilled_head -> (our name of a head -> its prefix in the file)
CLASSIFIERS = {
    False: {"head": "classifier."},
    True: {"head": "cls_classifier.", "distilled_head": "distillation_classifier."},
}
VIT_NAMES = Names(
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
DEIT_NAMES = VIT_NAMES._replace(registers="embeddings.distillation_token")
FC: MlpNames = (("mlp.fc1.",), "mlp.fc2.")
DINOV2_NAMES = VIT_NAMES._replace(
    norms=("norm1.", "norm2."), dense=FC, gated=(("mlp.weights_in.",), "mlp.weights_out.")
)
DINOV2_WITH_REGISTERS_NAMES = DINOV2_NAMES._replace(registers="embeddings.register_tokens")
SIGLIP_NAMES = VIT_NAMES._replace(
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


def infer_fields(
    arrays: Archive, names: Names, given: Size | None, stated: Size | None, classified: str
) -> dict[str, Any]:
    """Returns the fields that follow from the arrays: all but num_heads, norm_epsilon and activation.

    See `Family.fields`; `classified` is the pooling of a model with a classifier.
    """
    names = names._replace(heads=CLASSIFIERS[f"{CLASSIFIERS[True]['distilled_head']}weight" in arrays])
    fields = torch_tables.infer_fields(arrays, names, always=(names.position, f"{names.patches}bias"))
    fields["pooling"] = classified if fields["num_classes"] else "token"
    return fields | torch_tables.infer_positions(arrays, names, fields, given, stated)


def infer_siglip(arrays: Archive, names: Names, given: Size | None, stated: Size | None) -> dict[str, Any]:
    """Returns the fields that follow from the arrays, as `infer_fields`; a classifier reads the mean of the tokens."""
    fields = infer_fields(arrays, names, given, stated, classified="gap")
    probe = names.map_head.prefix + names.map_head.probe
    return fields | {"pooling": "map" if probe in arrays and not fields["num_classes"] else "gap"}


def parameter_table(spec: ModelSpec, names: Names) -> ParameterTable:
    """Returns our name -> the arrays of a file that the parameter consists of, for the parameters of a model."""
    return torch_tables.model_leaves(spec, names._replace(heads=CLASSIFIERS[spec.head.distilled]))


def _plain_unsupported(spec: ModelSpec) -> dict[str, bool]:
    return {
        "a head of patches": spec.head.kind == "patches",
        "a tanh layer before a classifier": bool(spec.head.num_classes) and spec.head.pre_logits,
    }


def _square_unsupported(spec: ModelSpec, model_type: str) -> dict[str, bool]:
    """Of a class whose code takes positions for those of a square grid."""
    height, width = spec.position.image_size
    return {
        "a head of patches": spec.head.kind == "patches",
        f"images of {height}x{width} pixels in a {model_type}": height != width,
    }


def _siglip_unsupported(spec: ModelSpec) -> dict[str, bool]:
    classes, pooling = bool(spec.head.num_classes), spec.head.pooling
    return {
        "attention pooling with a classifier": classes and pooling == "map",
        "a mean without a classifier": not classes and pooling == "gap",
    } | _square_unsupported(spec, "siglip_vision_model")


def _siglip_keys(model: Model) -> dict[str, Any]:
    return {} if model.field("pooling") == "map" else {"vision_use_head": False}


def _dinov2_unsupported(spec: ModelSpec, model_type: str) -> dict[str, bool]:
    classes, pooling = bool(spec.head.num_classes), spec.head.pooling
    return {
        "a classifier of the class token alone after LayerScale": classes and pooling == "token",
        "class token and mean without a classifier": not classes and pooling == "token_gap",
        f"layer_scale 0 in a {model_type}": not spec.block.layer_scale,
    } | _square_unsupported(spec, model_type)


def _dinov2_keys(model: Model) -> dict[str, Any]:
    """Returns the keys that only Dinov2's configurations have.

    Raises:
        UserError: they cannot state the width of the MLP.
    """
    value = model.field
    width, mlp_dim, swiglu = value("width"), value("mlp_dim"), value("activation") == "swiglu"

    def hidden(ratio: int) -> int:  # as the model's code computes it
        return (width * ratio * 2 // 3 + 7) // 8 * 8 if swiglu else width * ratio

    ratios = [ratio for ratio in range(1, 17) if hidden(ratio) == mlp_dim]
    if not ratios:
        sizes = f"mlp_dim {mlp_dim} with width {width}"
        raise UserError(f"the huggingface layout does not support {sizes}; use --layout=ours")
    keys = {"mlp_ratio": ratios[0], "use_swiglu_ffn": swiglu, "layerscale_value": value("layer_scale")}
    return keys | ({"num_register_tokens": value("registers")} if value("registers") else {})


VIT = Family(
    name="vit",
    spec=ModelSpec,
    marks=(r"embeddings\.patch_embeddings\.projection\.weight",),
    prefixes=r"(?!text_model\.).*",
    classifiers=(*CLASSIFIERS[False].values(), *CLASSIFIERS[True].values()),
    ignored=r"embeddings\.mask_token|.*\.position_ids|text_model\..*|logit_(scale|bias)|decoder\..*",
    ignored_beside_classifier=r"pooler\.dense\.(weight|bias)",
    names=VIT_NAMES,
    fields=functools.partial(infer_fields, classified="token"),
    untold=("num_heads", "norm_epsilon", "activation"),
    defaults={"norm_epsilon": 1e-12, "activation": "gelu"},
    table=parameter_table,
    requires=PLAIN | {"pooling": ("token",), "registers": (0,)},
    unsupported=_plain_unsupported,
    # In a file the class token has a position, which may be zero.
    position_rows=lambda spec: spec.class_rows if spec.position.rows == "patches" else spec.position_rows,
    prefix="vit.",
    bare_prefix="",
    resample="bicubic_no_antialias",  # older versions of some classes added 0.1 patch to the new grid
    config=functools.partial(
        transformers_config.describe, model_type="vit", classes=("ViTModel", "ViTForImageClassification")
    ),
)
DEIT = dataclasses.replace(
    VIT,
    name="deit",
    marks=(*VIT.marks, r"embeddings\.distillation_token"),
    names=DEIT_NAMES,
    requires=PLAIN
    | {"pooling": ("token",), "registers": (1,), "position_rows": ("all",), "distilled_head": (False, True)},
    prefix="deit.",
    config=functools.partial(
        transformers_config.describe,
        model_type="deit",
        classes=("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
    ),
)
DINOV2 = dataclasses.replace(
    VIT,
    name="dinov2",
    marks=(*VIT.marks, r"encoder\.layer\.0\.norm1\.weight"),
    names=DINOV2_NAMES,
    fields=functools.partial(infer_fields, classified="token_gap"),
    defaults={"norm_epsilon": 1e-6, "activation": "gelu"},
    own_keys=frozenset({"use_swiglu_ffn"}),
    read_own_keys=lambda content: {"activation": "swiglu"} if content.get("use_swiglu_ffn") is True else {},
    requires=ALL | {"pooling": ("token", "token_gap"), "registers": (0,), "pre_logits": (False,)},
    unsupported=functools.partial(_dinov2_unsupported, model_type="dinov2"),
    zeros=lambda spec: {"embeddings.mask_token": (1, spec.width)},  # only the training of these classes uses it
    prefix="dinov2.",
    config=functools.partial(
        transformers_config.describe,
        model_type="dinov2",
        classes=("Dinov2Model", "Dinov2ForImageClassification"),
        own_keys=_dinov2_keys,
    ),
)
DINOV2_WITH_REGISTERS = dataclasses.replace(
    DINOV2,
    name="dinov2_with_registers",
    marks=(*DINOV2.marks, r"embeddings\.register_tokens"),
    names=DINOV2_WITH_REGISTERS_NAMES,
    requires=ALL | {"pooling": ("token", "token_gap"), "position_rows": ("class", "patches"), "pre_logits": (False,)},
    unsupported=functools.partial(_dinov2_unsupported, model_type="dinov2_with_registers"),
    prefix="dinov2_with_registers.",
    resample="bicubic",
    config=functools.partial(
        transformers_config.describe,
        model_type="dinov2_with_registers",
        classes=("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
        own_keys=_dinov2_keys,
    ),
)
SIGLIP = dataclasses.replace(
    VIT,
    name="siglip_vision_model",
    marks=(r"embeddings\.patch_embedding\.weight",),
    names=SIGLIP_NAMES,
    ignored_beside_classifier=r"head\..*",
    fields=infer_siglip,
    defaults={"norm_epsilon": 1e-6, "activation": "gelu_tanh"},
    requires=PLAIN | {"pooling": ("map", "gap"), "registers": (0,), "pre_logits": (False,)},
    unsupported=_siglip_unsupported,
    prefix="vision_model.",
    bare_prefix="vision_model.",
    config=functools.partial(
        transformers_config.describe,
        model_type="siglip_vision_model",
        classes=("SiglipVisionModel", "SiglipForImageClassification"),
        own_keys=_siglip_keys,
        whole="siglip",
    ),
)
SIGLIP2 = dataclasses.replace(  # NaFlex: images of any size
    SIGLIP,
    name="siglip2_vision_model",
    dimensions=2,
    names=SIGLIP_NAMES._replace(flat_patches=True),
    own_keys=frozenset({"num_patches"}),
    resample="flexi",
    is_written=False,
)


def in_memory(of: Family, blocks: str) -> Family:
    """Returns the family of the same models with the names that they have in memory, which are only read.

    There, the names of the blocks begin with `blocks`.
    """
    names: Names = of.names._replace(
        blocks=blocks,
        attention=("attention.q_proj.", "attention.k_proj.", "attention.v_proj."),
        out="attention.o_proj.",
        dense=FC,
        gated=FC if of.names.gated == of.names.dense else (("mlp.gate_proj.", "mlp.up_proj."), "mlp.down_proj."),
    )
    first = re.escape(f"{blocks}0.{names.attention[0]}weight")
    return dataclasses.replace(of, marks=(*of.marks, first), names=names, is_written=False)


# The families whose models have other names in memory than in their files, by the name of the family.
IN_MEMORY = {
    "vit": in_memory(VIT, "layers."),
    "deit": in_memory(DEIT, "layers."),
    "dinov2": in_memory(DINOV2, DINOV2_NAMES.blocks),
    "dinov2_with_registers": in_memory(DINOV2_WITH_REGISTERS, DINOV2_NAMES.blocks),
}
