"""The named models: one table of sizes, one of hybrids, and the names that stand for both."""

import re
from typing import Any, TypeAlias

from vit_jax import UserError, choose
from vit_jax.models.bit_spec import BitSpec, bit_fields, bit_name, bit_names
from vit_jax.models.flat_keywords import field_rows, flatten_spec, replace_fields
from vit_jax.models.spec import ModelSpec

Spec: TypeAlias = ModelSpec | BitSpec

# Table 1 (B, L, H); Ti and S are of "How to train your ViT" (2106.10270), g and G of "Scaling ViTs" (2106.04560),
# So400m of "Getting ViT in Shape" (2305.13035); mu is for tests.
SIZES = {
    #      width depth mlp_dim num_heads
    "mu": (32, 1, 128, 2),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "H": (1280, 32, 5120, 16),
    "So400m": (1152, 27, 4304, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
}

RESNETS = ("BiT", "AxialResNet", "SASA-ResNet", "AA-ResNet", "SE-ResNet")  # beginnings of the names of `BitSpec`s
# What an Axial-ViT has besides its size (appendix D.6). A class token does not fit a grid of rows and columns.
AXIAL = {"block": "axial", "pooling": "gap"}
SIZE_FIELDS = ("width", "depth", "mlp_dim", "num_heads")

# ResNet and number in a hybrid's name -> units in each stage of the ResNet, patch size in pixels.
HYBRIDS = {
    ("R50", 16): ((3, 4, 9), 16),  # the units of stage 4 are moved to stage 3
    ("R50", 32): ((3, 4, 6, 3), 32),
    ("R26", 32): ((2, 2, 2, 2), 32),
    # AugReg's R+ViT-Ti/16: the root alone, of stride 4, then 8x8 patches. So the patch size is 32, not 16 as named.
    ("R", 16): ((), 32),
    ("R", 4): ((), 4),  # the root alone, each of whose positions is a patch: for small images
}


def default_spec(name: str) -> Spec:
    """Returns the default spec of the kind of model that a name stands for: a `BitSpec` or a `ModelSpec`."""
    return BitSpec() if name.startswith(RESNETS) else ModelSpec()


def build_spec(name: str, fields: dict[str, Any]) -> Spec:
    """Returns the spec that a name stands for, with some fields replaced.

    Args:
        name: a name as in `create`.
        fields: flat keyword -> value; None means the value that the name stands for. A field that only the other kind
            of model has is ignored if it has its default value, because a configuration states the fields of both.

    Raises:
        UserError: the name or a field is unknown, neither the name nor the fields state the size, a field that the
            model does not have is changed, or values contradict each other.
    """
    start = default_spec(name)
    own, known = flatten_spec(start), flatten_spec(ModelSpec()) | flatten_spec(BitSpec())
    given = {key: value for key, value in fields.items() if value is not None}
    given = {key: value for key, value in given.items() if key in own or key not in known or value != known[key]}
    if foreign := [key for key in given if key in known and key not in own]:
        rows = field_rows(ModelSpec()) | field_rows(BitSpec())
        flags = [f" --config.{rows[key].name}={rows[key].default}" for key in foreign if key in rows]
        advice = f" or, where a recipe sets them, add{''.join(flags)}" if flags else ""
        raise UserError(f"{name}, a {start.family}, has no {', '.join(foreign)}; leave them out{advice}.")
    chosen = named_fields(name) | given
    if missing := [key for key, value in chosen.items() if value is None]:
        raise UserError(f"the model name {name} does not contain a size; set {', '.join(missing)}.")
    return replace_fields(start, **chosen)


def named_fields(name: str) -> dict[str, Any]:
    """Returns the fields that a name stands for, by flat keyword. If it states no size, those of the size are None.

    Raises:
        UserError: no model has this name.
    """
    return bit_fields(name) if name.startswith(RESNETS) else _vit_fields(name)


def _vit_fields(name: str) -> dict[str, Any]:
    match = re.fullmatch(r"(?:(R\d{0,3})\+|(Axial)-)?ViT(?:-([A-Za-z][A-Za-z0-9]*))?/([1-9]\d{0,5})", name)
    resnet, axial, size, number = match.groups() if match else (None, None, "", "0")
    hybrid = HYBRIDS.get((resnet, int(number))) if resnet and size else None
    if size not in (None, *SIZES) or (resnet and not hybrid):
        options = [f"ViT-{size}/{number}" for size in SIZES for number in (8, 14, 16, 32)]
        options += [f"Axial-{option}" for option in options]
        choose("model", name, [*options, *_hybrid_names(), *bit_names()], where="vit_jax/models/variants.py")
    fields = dict(zip(SIZE_FIELDS, SIZES[size] if size else (None,) * len(SIZE_FIELDS), strict=True))
    if not hybrid:
        return fields | {"patch_size": int(number)} | (AXIAL if axial else {})
    stages, patch_size = hybrid
    return fields | {"stem": "resnet", "stages": stages, "patch_size": patch_size}


def model_name(fields: dict[str, Any]) -> str:
    """Returns the name that stands for these fields, given by flat keyword.

    It is `ViT/<patch size>` or `BiT` if no named model has these fields.
    """
    if "unit" in fields:
        return bit_name(fields)
    whole = flatten_spec(ModelSpec()) | fields
    kind = "Axial-" if whole["block"] == "axial" else ""
    options = [f"{kind}ViT-{size}/{whole['patch_size']}" for size in SIZES]
    if whole["stem"] == "resnet":
        options = _hybrid_names()
    fits = [name for name in options if all(whole[field] == value for field, value in _vit_fields(name).items())]
    return next(iter(fits), f"ViT/{whole['patch_size']}")


def _hybrid_names() -> list[str]:
    return [f"{resnet}+ViT-{size}/{number}" for resnet, number in HYBRIDS for size in SIZES]
