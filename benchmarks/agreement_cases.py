"""Models that vary every field on which a file depends: few models that have each pair of values a layout can store."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

SMALL = {"width": 32, "depth": 3, "mlp_dim": 64, "num_heads": 4, "resolution": 32, "num_classes": 5}
DINOV2 = {"layer_scale": 1.0, "pooling": "token_gap", "activation": "gelu"}
DINOV3 = {"position": "none", "rotary": "centred", "rotary_theta": 100.0, "qkv_bias": "query_value"}
DINOV3 |= {"registers": 4, "layer_scale": 1e-5, "activation": "gelu", "norm_epsilon": 1e-5}
EVA02 = {"rotary": "axial", "rotary_grid": 6, "qkv_bias": "query_value", "activation": "swiglu", "mlp_norm": True}
EVA02 |= {"pooling": "gap", "final_norm": "pooled", "class_token": "always"}
CLIP = {"pre_norm": True, "embed_bias": False, "norm_epsilon": 1e-5}
PE = CLIP | {"rotary": "axial_xy", "rotary_grid": 24, "activation": "gelu", "class_token": "always"}
PE |= {"pooling": "map", "map_prefix": True, "map_heads": 8}
BEIT = {"position": "relative_bias", "qkv_bias": "query_value", "activation": "gelu", "layer_scale": 1e-5}
BEIT |= {"pooling": "gap", "final_norm": "pooled", "class_token": "always"}
ROOT_ONLY = {"stem": "resnet", "stages": (), "stem_epsilons": "timm", "resolution": 64}
# Name of the base -> (layout, model, fields). A model differs from its base in some of the values in `VALUES`.
BASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "timm ViT": ("timm", "ViT/8", SMALL),
    "timm CLIP": ("timm", "ViT/8", SMALL | CLIP),
    "timm DINOv3": ("timm", "ViT/8", SMALL | DINOV3),
    "timm EVA-02": ("timm", "ViT/8", SMALL | EVA02),
    "timm Perception Encoder": ("timm", "ViT/8", SMALL | PE),
    "timm BEiT": ("timm", "ViT/8", SMALL | BEIT),
    "timm hybrid": ("timm", "ViT/16", SMALL | ROOT_ONLY),
    "timm BiT": ("timm", "BiT-R50x1", {"resolution": 32, "num_classes": 5}),
    "huggingface ViT": ("huggingface", "ViT/8", SMALL),
    "huggingface DeiT": ("huggingface", "ViT/8", SMALL | {"registers": 1}),
    "huggingface DINOv2": ("huggingface", "ViT/8", SMALL | DINOV2),
    "huggingface DINOv2 with registers": (
        "huggingface",
        "ViT/8",
        SMALL | DINOV2 | {"registers": 4, "position_rows": "class"},
    ),
    "huggingface SigLIP": ("huggingface", "ViT/8", SMALL | {"pooling": "map", "num_classes": 0}),
    "huggingface DINOv3": ("huggingface", "ViT/8", SMALL | DINOV3 | {"num_classes": 0}),
    "huggingface CLIP": (
        "huggingface",
        "ViT/8",
        SMALL | CLIP | {"final_norm": "pooled", "activation": "quick_gelu", "projection": 10, "num_classes": 0},
    ),
    "huggingface BEiT": ("huggingface", "ViT/8", SMALL | BEIT),
}
VALUES: dict[str, list[Any]] = {
    "width": [64],
    "depth": [1],
    "mlp_dim": [24, 96],
    "num_heads": [2],
    "patch_size": [16],
    "resolution": [(32, 64), (16, 64)],  # 4x8 patches of 8 pixels; 2x8 patches, as many as 4x4
    "pooling": ["token", "gap", "map", "token_gap"],
    "final_norm": ["tokens", "pooled"],
    "class_token": ["always"],
    "registers": [0, 1, 3],
    "position": ["none", "learned2d", "relative", "relative_bias", "sincos2d", "sincos2d_moco"],
    "position_rows": ["class", "patches"],
    "position_place": ["blocks", "shared"],
    "relative_tables": ["head", "model"],
    "relative_clip": [2],
    "map_heads": [2],
    "map_mlp_dim": [24],
    "map_prefix": [True],
    "rotary": ["axial", "axial_xy", "centred"],
    "rotary_grid": [0, 16],
    "rotary_theta": [100.0],
    "qkv_bias": ["query_value", "none"],
    "projection": [12],
    "qk_norm": [True],
    "attention_pattern": ["local"],
    "attention_window": [2],
    "block": ["axial"],
    "norm_epsilon": [1e-2],
    "activation": ["gelu", "quick_gelu", "swiglu"],
    "mlp_norm": [True],
    "dense_bias": [False],
    "norm": ["rms"],
    "layer_scale": [0.0, 0.1],
    "embed_bias": [False],
    "pre_norm": [True],
    "image_mean": [(0.4, 0.5, 0.6)],
    "image_std": [(0.2, 0.3, 0.4)],
    "pre_logits": [True],
    "representation_size": [24],
    "num_classes": [0, 5],
    "distilled_head": [True],
    "head": ["patches"],
    "stem": ["resnet"],
    "stages": [(2, 2, 2, 2), (3, 4, 9), (3, 4, 6, 3), (1, 1)],
    "stem_width": [32],
    "stem_epsilons": ["released", "timm"],
    "unit": ["post_activation", "axial", "stand_alone", "augmented"],
    "se_reduction": [16],
    "root": ["attention"],
    "border": ["lowest"],
}
NEEDS: dict[str, dict[str, Any]] = {  # field -> other fields without which it has no effect
    "representation_size": {"pre_logits": True},
    "relative_tables": {"position": "relative"},
    "relative_clip": {"position": "relative"},
    **{name: {"pooling": "map"} for name in ("map_heads", "map_mlp_dim", "map_prefix")},
    "rotary_grid": {"rotary": "axial"},
    "rotary_theta": {"rotary": "centred"},
    "attention_window": {"attention_pattern": "local"},
    "distilled_head": {"registers": 1},
}
# Fields on which no file depends: initial values, rates of the training, and how a model is executed.
UNSTORED = {"position_std", "head_bias", "head_std", "dropout_rate", "stochastic_depth", "stochastic_depth_schedule"}
UNSTORED |= {"attention", "mlp", "dtype", "grad_dtype", "remat", "scan"}
BASE = "as in the base"


def covering_rows(
    values: dict[str, list[Any]], unpaired: set[str], refuses: Callable[[dict[str, Any]], bool]
) -> Iterator[dict[str, Any]]:
    """Yields few rows (field -> value that differs from the base) that cover the accepted values and pairs of values.

    Each accepted value of an unpaired field is a row of its own. The other rows together contain each pair of accepted
    values of two fields, unless a model with that pair is refused.

    Args:
        values: field -> its values, without that of the base.
        unpaired: the fields of which no pairs are formed.
        refuses: returns whether a model with these fields is refused.
    """
    options = {name: [BASE, *(v for v in values[name] if not refuses(_given({name: v})))] for name in values}
    options = {name: found for name, found in options.items() if len(found) > 1}
    for name in [name for name in options if name in unpaired]:
        yield from (_given({name: value}) for value in options.pop(name)[1:])
    missing = {
        frozenset(pair): None
        for first, second in itertools.combinations(options, 2)
        for pair in itertools.product(*([(name, value) for value in options[name]] for name in (first, second)))
    }
    while missing:
        pair = next(iter(missing))
        row = dict(pair)
        del missing[pair]
        if refuses(_given(row)):
            continue
        whole = _extended(row, options, missing, lambda row: False)
        row = _extended(row, options, missing, refuses) if refuses(_given(whole)) else whole
        for found in itertools.combinations([(name, row[name]) for name in options], 2):
            missing.pop(frozenset(found), None)
        yield _given(row)


def _extended(row, options, missing, refuses):
    """Returns a row extended by a value for each other field: of those accepted, the one in most missing pairs."""
    for name in options:
        if name in row:
            continue
        pairs = {value: [frozenset([(other, row[other]), (name, value)]) for other in row] for value in options[name]}
        order = sorted(options[name], key=lambda value: -sum(pair in missing for pair in pairs[value]))
        row = row | {name: next(value for value in order if value == BASE or not refuses(_given(row | {name: value})))}
    return row


def _given(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a row that differ from the base, and the fields that these need."""
    given = {name: value for name, value in row.items() if value != BASE}
    return {key: value for name in given for key, value in NEEDS.get(name, {}).items()} | given
