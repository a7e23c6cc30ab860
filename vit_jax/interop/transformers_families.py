"""The layouts of transformers' vision models: ViT, DeiT, Dinov2 (with and without registers), Siglip's vision tower.

A file has either the bare model or a model with a classifier; a DeiT may have two classifiers. What no array states
(heads, epsilon, activation) is in `config.json` beside the file.

Source of the names: huggingface/transformers, models/{vit,deit,dinov2,dinov2_with_registers,siglip}. Since version 5
some models in memory (`state_dict`) have other names than in the files of `save_pretrained`: conversion_mapping.py.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
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
ALL = required_defaults(STATED)
PLAIN = ALL | {"layer_scale": (0.0,), "activation": ("gelu", "gelu_tanh"), "class_token": ("auto",)}

IGNORED = r"embeddings\.mask_token|.*\.position_ids|text_model\..*|logit_(scale|bias)"

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
    if "pre_layrnorm.weight" in arrays:
        raise UserError(
            "it is the image encoder of a CLIP, whose tokens are normalised before the first block (pre_layrnorm), "
            "and whose files vit_jax does not read"
        )
    fields = torch_tables.infer_fields(arrays, names, always=(names.position, f"{names.patches}bias"))
    fields["pooling"] = "map" if names.cls not in arrays else classified if fields["num_classes"] else "token"
    return fields | torch_tables.infer_positions(arrays, names, fields, given, stated)


def parameter_table(spec: ModelSpec, names: Names) -> ParameterTable:
    """Returns our name -> the arrays of a file that the parameter consists of, for the parameters of a model."""
    return torch_tables.model_leaves(spec, names._replace(heads=CLASSIFIERS[spec.head.distilled]))


def family(
    model_type: str,
    names: Names,
    marks: Sequence[str],
    requires: Mapping[str, Sequence[Any]],
    classes: Sequence[str],
    prefix: str,
    unsupported: Callable[[ModelSpec], dict[str, bool]],
    norm_epsilon: float,
    activation: str = "gelu",
    classified: str = "token",
    resample: str = "bicubic_no_antialias",
    ignored: str = IGNORED,
    keys: Callable[[Model], dict[str, Any]] = lambda model: {},
    **facts: Any,
) -> Family:
    """Returns a family of transformers; for what is not listed here see `Family`.

    Args:
        model_type: its model_type in config.json.
        names: the names of the arrays in files of a model with one classifier.
        marks: names of further arrays that tell the family from those that are tried after it.
        requires: field -> the values of it that the models of the family have.
        classes: its classes: of a model without a classifier, with one, and with a second one.
        prefix: the prefix of all arrays but the classifier's, in files of a model with a classifier.
        unsupported: see `Family`; besides, no family has a head of patches.
        norm_epsilon: the epsilon of a configuration that states none.
        activation: the activation of a configuration that states none.
        classified: the pooling of a model with a classifier.
        resample: how its class resamples positions; older versions of some classes added 0.1 patch to the new grid.
        ignored: see `Family`.
        keys: takes a model. Returns what its config.json states that those of other families do not.
        **facts: further attributes of `Family`.
    """
    return Family(
        name=model_type,
        spec=ModelSpec,
        marks=tuple(re.escape(name) for name in (f"{names.patches}weight", *marks)),
        prefixes=r"(?!text_model\.).*",
        classifiers=(*CLASSIFIERS[False].values(), *CLASSIFIERS[True].values()),
        ignored=ignored,
        ignored_beside_classifier=rf"{re.escape(names.pre_logits)}(weight|bias)",
        names=names,
        fields=functools.partial(infer_fields, classified=classified),
        untold=("num_heads", "norm_epsilon", "activation"),
        defaults={"norm_epsilon": norm_epsilon, "activation": activation},
        table=parameter_table,
        requires=requires,
        unsupported=lambda spec: {"a head of patches": spec.head.kind == "patches"} | unsupported(spec),
        # In a file the class token has a position, which may be zero.
        position_rows=lambda spec: spec.class_rows if spec.position.rows == "patches" else spec.position_rows,
        prefix=prefix,
        resample=resample,
        config=functools.partial(transformers_config.describe, model_type=model_type, classes=classes, keys=keys),
        **facts,
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


def _plain_unsupported(spec: ModelSpec) -> dict[str, bool]:
    return {"a tanh layer before a classifier": bool(spec.head.num_classes) and spec.head.pre_logits}


def _square_only(spec: ModelSpec, model_type: str) -> dict[str, bool]:
    """Returns what a class cannot compute whose code takes positions for those of a square grid."""
    height, width = spec.position.image_size
    return {f"images of {height}x{width} pixels in a {model_type}": height != width}


def _dinov2_unsupported(spec: ModelSpec, model_type: str) -> dict[str, bool]:
    classes, pooling = bool(spec.head.num_classes), spec.head.pooling
    return {
        "a classifier of the class token alone after LayerScale": classes and pooling == "token",
        "class token and mean without a classifier": not classes and pooling == "token_gap",
        f"layer_scale 0 in a {model_type}": not spec.block.layer_scale,
    } | _square_only(spec, model_type)


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


def _dinov2(model_type: str, names: Names, marks: Sequence[str], classes: Sequence[str], **facts: Any) -> Family:
    return family(
        model_type,
        names,
        marks=(f"{names.blocks}0.{names.norms[0]}weight", *marks),
        classes=classes,
        prefix=f"{model_type}.",
        unsupported=functools.partial(_dinov2_unsupported, model_type=model_type),
        norm_epsilon=1e-6,
        classified="token_gap",
        keys=_dinov2_keys,
        own_keys=frozenset({"use_swiglu_ffn"}),
        read_own_keys=lambda content: {"activation": "swiglu"} if content.get("use_swiglu_ffn") is True else {},
        zeros=lambda spec: {"embeddings.mask_token": (1, spec.width)},  # only the training of these classes uses it
        **facts,
    )


VIT = family(
    "vit",
    VIT_NAMES,
    marks=(),
    requires=PLAIN | {"pooling": ("token",), "registers": (0,)},
    classes=("ViTModel", "ViTForImageClassification"),
    prefix="vit.",
    unsupported=_plain_unsupported,
    norm_epsilon=1e-12,
)
DEIT = family(
    "deit",
    DEIT_NAMES,
    marks=(DEIT_NAMES.registers,),
    requires=PLAIN
    | {"pooling": ("token",), "registers": (1,), "position_rows": ("all",), "distilled_head": (False, True)},
    classes=("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
    prefix="deit.",
    unsupported=_plain_unsupported,
    norm_epsilon=1e-12,
)
DINOV2 = _dinov2(
    "dinov2",
    DINOV2_NAMES,
    marks=(),
    requires=ALL | {"pooling": ("token", "token_gap"), "registers": (0,), "pre_logits": (False,)},
    classes=("Dinov2Model", "Dinov2ForImageClassification"),
)
DINOV2_WITH_REGISTERS = _dinov2(
    "dinov2_with_registers",
    DINOV2_WITH_REGISTERS_NAMES,
    marks=(DINOV2_WITH_REGISTERS_NAMES.registers,),
    requires=ALL | {"pooling": ("token", "token_gap"), "position_rows": ("class", "patches"), "pre_logits": (False,)},
    classes=("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
    resample="bicubic",
)
SIGLIP = family(
    "siglip_vision_model",
    SIGLIP_NAMES,
    marks=(),
    requires=PLAIN | {"pooling": ("map",), "registers": (0,), "pre_logits": (False,), "num_classes": (0,)},
    classes=("SiglipVisionModel", "SiglipForImageClassification"),
    prefix="vision_model.",
    bare_prefix="vision_model.",
    unsupported=functools.partial(_square_only, model_type="siglip_vision_model"),
    norm_epsilon=1e-6,
    activation="gelu_tanh",
)


# The families whose models have other names in memory than in their files, by the name of the family.
IN_MEMORY = {
    "vit": in_memory(VIT, "layers."),
    "deit": in_memory(DEIT, "layers."),
    "dinov2": in_memory(DINOV2, DINOV2_NAMES.blocks),
    "dinov2_with_registers": in_memory(DINOV2_WITH_REGISTERS, DINOV2_NAMES.blocks),
}
