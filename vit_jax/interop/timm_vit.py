"""The layouts of timm's VisionTransformer: with its hybrids and DeiT's second head, and the image towers of CLIP.

Source of the names: huggingface/pytorch-image-models, timm/models/vision_transformer.py, naflexvit.py, deit.py and
vision_transformer_hybrid.py. Source of older names: facebookresearch/deit, dinov2 (also dinov2/hub/classifiers.py) and
mae; those of facebookresearch/dino are timm's.
"""

import dataclasses
import functools
import math
import re
from typing import Any

from vit_jax import UserError
from vit_jax.interop import timm_bit, timm_config, torch_tables
from vit_jax.interop.archives import Archive
from vit_jax.interop.layout import (
    Family,
    ParameterTable,
    Size,
    convolutions,
    count_units,
    is_zero,
    matches,
    required_defaults,
)
from vit_jax.interop.torch_tables import MapNames, Names
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
    pre_norm="norm_pre.",
    projection="head.",  # timm has CLIP's projection as a classifier
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
# The words of fields of `STATED` that timm's VisionTransformer computes.
COMPUTED = {
    "pooling": ("token", "gap", "map"),
    "norm": ("layer", "rms"),
    "qkv_bias": ("all", "none"),
    "stem": ("patches", "resnet"),
    "activation": (*timm_config.ACTIVATIONS, "swiglu"),
}
# Fields that arrays or configuration state, or that `COMPUTED` or `unsupported` checks. All others must have defaults.
STATED = (
    *("width", "depth", "mlp_dim", "num_heads", "pooling", "final_norm", "class_token", "registers", "qk_norm", "head"),
    *("position", "position_rows", "position_place", "relative_tables", "relative_clip", "rotary", "rotary_grid"),
    *("activation", "norm", "norm_epsilon", "layer_scale", "embed_bias", "image_mean", "image_std", "block"),
    *("qkv_bias", "dense_bias"),
    *("stem", "stem_epsilons", "stages", "distilled_head"),
)

# The values of every timm model whose file does not say otherwise: nn.GELU, and LayerNorm's epsilon.
EPSILON, CLIP_EPSILON = 1e-6, 1e-5
DEFAULTS = {"activation": "gelu", "norm_epsilon": EPSILON}


def infer_fields(arrays: Archive, names: Names, given: Size | None, stated: Size | None) -> dict[str, Any]:
    """Returns the fields of the model whose arrays have these shapes; see `Family.fields`.

    What no array states is as in most of timm's models: exact GELU, class token pooled where there is one. The number
    of heads is only among the fields if the file has norms of queries.

    Raises:
        UserError: an array is missing that determines a field, the positions fit no image size, or a distillation token
            has no head.
    """
    if TWO_HEADS.registers in arrays:
        names = TWO_HEADS
        if f"{names.heads['distilled_head']}weight" not in arrays:
            raise UserError(
                "its distillation token has no head (head_dist): then timm averages the representations of both "
                "tokens, which vit_jax does not"
            )
    fields: dict[str, Any] = DEFAULTS | torch_tables.infer_fields(arrays, names) | _stem_fields(arrays)
    class_token, pooled = names.cls in arrays, f"{names.pooled_norm}weight" in arrays
    attention_pooling = names.map_head.prefix + names.map_head.probe in arrays
    fields["pooling"] = "map" if attention_pooling else "token" if class_token and not pooled else "gap"
    fields |= {"final_norm": "pooled" if pooled else "tokens", "class_token": "always" if class_token else "auto"}
    biases = {found for (found,) in matches(arrays, rf"{re.escape(names.blocks)}\d+\.(.*\.)bias$")}  # of any block
    fields["norm"] = "layer" if names.norms[0] in biases else "rms"
    fields["qkv_bias"] = "none" if biases.isdisjoint(names.attention) else "all"
    fields["dense_bias"] = not biases.isdisjoint((names.out, *names.dense[0], names.dense[1]))
    query_norm = f"{names.blocks}0.{names.qk_norms[0]}weight"
    fields["qk_norm"] = query_norm in arrays
    if fields["qk_norm"]:
        head_dim = math.prod(arrays[query_norm].shape)
        fields["num_heads"] = fields["width"] // max(head_dim, 1)
    return fields | torch_tables.infer_positions(arrays, names, fields, given, stated)


def infer_clip(arrays: Archive, names: Names, given: Size | None, stated: Size | None) -> dict[str, Any]:
    """Returns the fields of a CLIP, as `infer_fields`."""
    fields = infer_fields(arrays, names, given, stated) | {"pre_norm": True, "norm_epsilon": CLIP_EPSILON}
    return fields | head_fields(arrays, names, fields["num_classes"])


def head_fields(arrays: Archive, names: Names, outputs: int) -> dict[str, int]:
    """Returns the fields of a head with so many outputs.

    timm has the projection of models that were trained with texts as a classifier, whose bias is then zero. A bias of
    other values is that of a model with classes.
    """
    bias = f"{names.projection}bias"
    if bias not in arrays or is_zero(arrays, bias, (outputs,)):
        return {"num_classes": 0, "projection": outputs}
    return {"num_classes": outputs}


def head_zeros(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Returns the bias of zeros that timm has beside a projection; see `head_fields`."""
    return {f"{NAMES.projection}bias": (spec.head.projection,)} if spec.head.projection else {}


def infer_linear(arrays: Archive, names: Names, given: Size | None, stated: Size | None) -> dict[str, Any]:
    """Returns the fields of a DINOv2 with its linear head, as `infer_fields`.

    Raises:
        UserError: the head reads the class tokens of several blocks.
    """
    fields = infer_fields(arrays, names, given, stated)
    inputs = arrays.shape_of(f"{names.heads['head']}weight")[1]
    if inputs != 2 * fields["width"]:
        raise UserError(
            f"its linear head reads {inputs} channels, but vit_jax computes only one that reads the class token and "
            f"the mean of the last block, {2 * fields['width']} channels; take the head of one layer"
        )
    return fields | {"pooling": "token_gap"}


def _stem_fields(arrays: Archive) -> dict[str, Any]:
    """Returns the fields of a hybrid's ResNet; an empty dict for other models."""
    root = [name for name in (f"{BACKBONE}stem.conv.weight", f"{BACKBONE}conv.weight") if name in arrays]
    if not root:
        return {}
    stages = count_units(arrays, BACKBONE + timm_bit.UNIT)
    size = arrays[f"{NAMES.patches}weight"].shape[2]
    width = arrays.shape_of(root[0])[0]
    fields = {"stem": "resnet", "stages": stages, "stem_width": width, "stem_epsilons": "timm"}
    return fields | {"patch_size": size * resnet_stride(stages)}


def unsupported(spec: ModelSpec, norm_epsilon: float) -> dict[str, bool]:
    """Returns feature that timm's model, with this epsilon, does not compute -> whether this model has it."""
    value = Model("", spec).field
    return {
        f"position embeddings of type {spec.position.kind}": spec.position.kind not in ("learned", "none"),
        f"positions with position_place {spec.position.place}": spec.position.place != "stem",
        f"{spec.block.kind} blocks": spec.block.kind != "standard",
        "rotary positions": spec.position.rotary != "none",
        "a head of patches": spec.head.kind == "patches",
        "a tanh layer (pre_logits)": spec.head.pre_logits,
        f"norm_epsilon {spec.block.norm_epsilon:g}": spec.block.norm_epsilon != norm_epsilon,
        "a ResNet with stem_epsilons released": spec.stem.kind == "resnet" and spec.stem.epsilons == "released",
        "a hybrid with swiglu": spec.stem.kind == "resnet" and spec.block.activation == "swiglu",
        "attention pooling without dense_bias": spec.head.pooling == "map" and not spec.block.dense_bias,
        # Its arrays have the names and shapes of a Perception Encoder's.
        "attention pooling after pre_norm": spec.head.pooling == "map" and spec.stem.pre_norm,
        "attention pooling with swiglu": spec.head.pooling == "map" and spec.block.activation == "swiglu",
        "a classifier after a projection": bool(spec.head.projection and spec.head.num_classes),
    } | {
        f"{name} {value(name)} with a second head": spec.head.distilled and value(name) not in computed
        for name, computed in DISTILLED.items()
    }


def parameter_table(spec: ModelSpec, names: Names) -> ParameterTable:
    """Returns our name -> the arrays of the layout that the parameter consists of, for the parameters of a model."""
    table = _stem_table(spec) if spec.stem.kind == "resnet" else {}
    return table | torch_tables.model_leaves(spec, TWO_HEADS if spec.head.distilled else names)


def _stem_table(spec: ModelSpec) -> ParameterTable:
    stages = spec.stem.stages
    table = timm_bit.convolution_leaves("stem/root", BACKBONE + ("stem." if stages else ""), "", "conv", "norm")
    for stage, unit, suffix in convolutions(stages):
        ours, theirs = f"stem/stage{stage}/unit{unit}", f"{BACKBONE}stages.{stage - 1}.blocks.{unit - 1}."
        names = ("downsample.conv", "downsample.norm") if suffix == "_proj" else (f"conv{suffix}", f"norm{suffix}")
        table |= timm_bit.convolution_leaves(ours, theirs, suffix, *names)
    return table


FAMILY = Family(
    name="VisionTransformer",
    spec=ModelSpec,
    marks=(r"patch_embed\.proj\.weight", r"blocks\.0\.attn\.qkv\.weight"),
    prefixes=".*",
    names=NAMES,
    older_names=OLDER_NAMES,
    ignored=r"mask_token|decoder_.*",  # only the training of DINOv2 and MAE uses them
    fields=infer_fields,
    untold=("num_heads",),
    table=parameter_table,
    requires=required_defaults(STATED) | COMPUTED | {"embed_bias": (True,)},
    unsupported=functools.partial(unsupported, norm_epsilon=EPSILON),
    # timm's class token has a position only if all tokens have one.
    position_rows=lambda spec: spec.position_rows if spec.position_rows == spec.prefix_rows else 0,
    resample="bicubic",
    config=timm_config.describe_vit,
)
LINEAR = dataclasses.replace(
    FAMILY,
    name="DINOv2 with its linear head",
    marks=(*FAMILY.marks, r"linear_head\.weight"),
    names=NAMES._replace(heads={"head": "linear_head."}),
    classifiers=("linear_head.",),
    fields=infer_linear,
    requires={**FAMILY.requires, "pooling": ("token_gap",)},
    is_written=False,
)
NAFLEX = dataclasses.replace(  # of SigLIP 2, whose positions are resampled as in big_vision
    FAMILY,
    name="NaFlexVit",
    marks=(r"embeds\.proj\.weight", r"attn_pool\.latent"),
    names=NAMES._replace(
        patches="embeds.proj.",
        cls="embeds.cls_token",
        registers="embeds.reg_token",
        position="embeds.pos_embed",
        flat_patches=True,
        position_grid=True,
    ),
    own_keys=frozenset({"pos_embed_grid_size"}),
    resample="flexi",
    is_written=False,
)
CLIP = dataclasses.replace(
    FAMILY,
    name="CLIP",
    marks=(*FAMILY.marks, r"norm_pre\.weight"),
    fields=infer_clip,
    requires=required_defaults((*STATED, "pre_norm", "projection"))
    | COMPUTED
    | {
        "pre_norm": (True,),
        "norm": ("layer",),
        "qkv_bias": ("all",),
        "dense_bias": (True,),
        "embed_bias": (False,),
        "stem": ("patches",),
        "distilled_head": (False,),
        "activation": timm_config.ACTIVATIONS,
    },
    unsupported=functools.partial(unsupported, norm_epsilon=CLIP_EPSILON),
    zeros=head_zeros,
)
