"""The fields of a model that follow from the arrays of a file in one of PyTorch's layouts."""

import re
from collections.abc import Mapping
from typing import Any

from vit_jax import UserError
from vit_jax.interop.array_shapes import image_sizes, matches, shape_of
from vit_jax.interop.pytorch.array_names import Names

LAYER_SCALE = 1e-5  # initial value of DeiT-III and DINOv2: a file has only the trained factors


def infer_fields(archive: Mapping[str, Any], names: Names, always: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the fields of the model whose arrays have these shapes.

    The fields of a ResNet stem and of attention are left out, and how the tokens are pooled.

    Args:
        archive: the arrays of a file.
        names: the names of the file's layout.
        always: the names of other arrays that every file of the layout has.

    Raises:
        UserError: an array is missing that determines a field or that every file has.
    """
    first = f"{names.blocks}0."
    gated = names.gated != names.dense and any(f"{first}{part}weight" in archive for part in names.gated[0])
    (widened, *_), narrowed = names.gated if gated else names.dense
    needed = [f"{names.patches}weight", f"{first}{widened}weight", f"{first}{narrowed}weight"]
    if missing := [name for name in (*needed, *always) if name not in archive]:
        raise UserError(f"the model cannot be inferred, since arrays are missing: {', '.join(missing)}")
    patches, widening, narrowing = (shape_of(archive, name) for name in needed)
    if len(patches) != 4:
        raise UserError(f"{needed[0]} has the shape {list(patches)}, from which no field can be inferred")
    mlp_dim, head, pre_logits = narrowing[1], f"{names.heads['head']}weight", f"{names.pre_logits}weight"
    fields: dict[str, Any] = {
        "width": patches[0],
        "depth": len(matches(archive, rf"{re.escape(names.blocks)}(\d+)\.")),
        "mlp_dim": mlp_dim,
        "patch_size": patches[2],
        "embed_bias": f"{names.patches}bias" in archive,
        "registers": shape_of(archive, names.registers)[-2] if names.registers in archive else 0,
        "layer_scale": LAYER_SCALE if first + names.layer_scales[0] in archive else 0.0,
        "num_classes": shape_of(archive, head)[0] if head in archive else 0,
        "distilled_head": "distilled_head" in names.heads,
    }
    if gated or widening[0] == 2 * mlp_dim:
        fields["activation"] = "swiglu"
    if pre_logits in archive:
        fields |= {"pre_logits": True, "representation_size": shape_of(archive, pre_logits)[0]}
    return fields


def infer_positions(
    archive: Mapping[str, Any],
    names: Names,
    fields: dict[str, Any],
    given: tuple[int, int] | None,
    stated: tuple[int, int] | None,
) -> dict[str, Any]:
    """Returns the fields of the positions, and the resolution.

    Positions in the file are taken for those of images of the size `stated` if that is possible, else of square images,
    else of the size `given`. Without positions in the file, the resolution is `given`, else `stated`, else about 224.

    Args:
        archive: the arrays of a file.
        names: the names of the file's layout.
        fields: the model's patch_size and registers.
        given: (height, width) of the images as the user states it, or None.
        stated: (height, width) of the images as the configuration beside the file states it, or None.

    Raises:
        UserError: the positions fit none of these sizes.
    """
    patch_size = fields["patch_size"]
    if names.position not in archive:
        default = max(1, 224 // patch_size) * patch_size
        return {"position": "none", "resolution": given or stated or (default, default)}
    rows, class_tokens = shape_of(archive, names.position)[-2], int(names.cls in archive)
    kinds = {"all": class_tokens + fields["registers"], "patches": 0, "class": class_tokens}
    for kind, size in image_sizes(rows, kinds, patch_size, (stated, None, given)):
        return {"position": "learned", "position_rows": kind, "resolution": size}
    raise UserError(
        f"its {rows} position embeddings do not form a square grid; give resolution=(height, width) to vit_jax.load, "
        "or --resolution=HEIGHTxWIDTH to vit_jax.convert"
    )
