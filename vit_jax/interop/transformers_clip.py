"""The layout of the image towers of CLIP (arXiv 2103.00020) in transformers, with or without their projection.

Source of the names: huggingface/transformers 5.24, models/clip.
"""

import dataclasses
import functools
from typing import Any

from vit_jax.interop import torch_tables, transformers_config
from vit_jax.interop.archives import Archive
from vit_jax.interop.layout import Size, required_defaults
from vit_jax.interop.torch_tables import Names
from vit_jax.interop.transformers_families import SIGLIP, STATED
from vit_jax.model import Model
from vit_jax.models import ModelSpec

NAMES: Names = SIGLIP.names._replace(
    cls="embeddings.class_embedding",
    cls_ones=0,
    pre_norm="pre_layrnorm.",
    pooled_norm="post_layernorm.",
    projection="visual_projection.",
)
PROJECTION = 512  # where a configuration states none


def infer_fields(arrays: Archive, names: Names, given: Size | None, stated: Size | None) -> dict[str, Any]:
    """Returns the fields that follow from the arrays; see `Family.fields`.

    Raises:
        UserError: an array is missing that determines a field, or the positions fit no image size.
    """
    projection = f"{names.projection}weight"
    fields = torch_tables.infer_fields(arrays, names, always=(names.position,)) | {
        "pooling": "token",
        "final_norm": "pooled",
        "pre_norm": True,
        "projection": arrays.shape_of(projection)[0] if projection in arrays else 0,
    }
    return fields | torch_tables.infer_positions(arrays, names, fields, given, stated)


def own_keys(model: Model) -> dict[str, Any]:
    """Returns the keys of a configuration that depend on the projection."""
    width = model.field("projection")
    kind = "CLIPVisionModelWithProjection" if width else "CLIPVisionModel"
    return {"architectures": [kind], "projection_dim": width or PROJECTION}


def unsupported(spec: ModelSpec) -> dict[str, bool]:
    """Returns feature that CLIP does not compute -> whether a model has it."""
    height, width = spec.position.image_size
    return {
        "a head of patches": spec.head.kind == "patches",
        "patches projected with a bias in a CLIP": spec.stem.bias,
        f"images of {height}x{width} pixels in a CLIP": height != width,
    }


CLIP = dataclasses.replace(
    SIGLIP,
    name="clip_vision_model",
    marks=(r"embeddings\.patch_embedding\.weight", r"pre_layrnorm\.weight"),
    names=NAMES,
    classifiers=(NAMES.projection,),
    ignored=r"embeddings\.position_ids|text_model\..*|text_projection\.weight|logit_scale",
    ignored_beside_classifier=r"(?!)",
    fields=infer_fields,
    defaults={"norm_epsilon": 1e-5, "activation": "quick_gelu"},
    requires=required_defaults((*STATED, "pre_norm", "embed_bias", "final_norm", "projection"))
    | {
        "pooling": ("token",),
        "final_norm": ("pooled",),
        "pre_norm": (True,),
        "registers": (0,),
        "position": ("learned",),
        "position_rows": ("all",),
        "pre_logits": (False,),
        "num_classes": (0,),
        "layer_scale": (0.0,),
        "activation": ("gelu", "gelu_tanh", "quick_gelu"),
    },
    unsupported=unsupported,
    config=functools.partial(
        transformers_config.describe, model_type="clip_vision_model", classes=("CLIPVisionModel",), own_keys=own_keys
    ),
)
