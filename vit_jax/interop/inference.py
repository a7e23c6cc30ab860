"""Infers a model and its use from the arrays of a published file, which states neither."""

import collections
import dataclasses
import itertools
import math
import re
from typing import Any

from vit_jax import UserError
from vit_jax.interop import class_names
from vit_jax.interop.layouts import Layout
from vit_jax.interop.npz import Archive
from vit_jax.models import image_size, resnet_stride


class _Arrays:
    """The arrays of a file without the layout's prefix: which there are, and their shapes."""

    def __init__(self, archive: Archive, layout: Layout):
        self.prefix = layout.prefix
        self.headers = {
            name.removeprefix(self.prefix): archive[name] for name in archive if name.startswith(self.prefix)
        }

    def __contains__(self, name: str) -> bool:
        return name in self.headers

    def size(self, name: str, axis: int) -> int:
        """Returns the size of an array along an axis.

        Raises:
            UserError: the array has fewer than two dimensions.
        """
        shape = self.headers[name].shape
        if len(shape) < 2:
            raise UserError(f"{self.prefix}{name} has the shape {list(shape)}, from which no field can be inferred")
        return shape[axis]

    def matches(self, pattern: str) -> set[tuple[str, ...]]:
        """Returns the different groups that a pattern matches at the beginning of names."""
        found = (re.match(pattern, name) for name in self.headers)
        return {match.groups() for match in found if match}


def infer_fields(archive: Archive, layout: Layout, resolution: Any = None) -> tuple[Layout, dict[str, Any]]:
    """Returns the layout, complete, and the fields of the model whose arrays have these shapes.

    Args:
        archive: the file.
        layout: as detected.
        resolution: of the images, if known; else the positions are assumed to be those of square images.

    Raises:
        UserError: an array is missing that determines a field, or the positions are not those of square images.
    """
    given = None if resolution is None else image_size(resolution)
    arrays = _Arrays(archive, layout)
    fields = _shape_fields(arrays, layout)
    patch_size = fields["patch_size"]
    if fields["position"] != "learned":
        default = max(1, 224 // patch_size) * patch_size
        return layout, fields | {"resolution": given or (default, default)}
    rows, class_tokens = arrays.size(layout.position, -2), int(fields["pooling"] == "token")
    class_rows = [True] if layout.name == "google" else [False, True]
    # The published files are of square images: the given resolution is used only where that is impossible.
    for images, class_row in itertools.product((None, given), class_rows):
        grid = _grid(rows - class_tokens * class_row, patch_size, images)
        if grid:
            stored = tuple(side * patch_size for side in grid)
            return dataclasses.replace(layout, class_row=class_row), fields | {"resolution": stored}
    if not class_tokens and _grid(rows - 1, patch_size, None):
        raise UserError(f"missing {layout.prefix}cls: one of the {rows} position rows belongs to a class token")
    raise UserError(
        f"its {rows} position rows are not those of square images; give resolution=(height, width) in pixels"
    )


def _shape_fields(arrays: _Arrays, layout: Layout) -> dict[str, Any]:
    """Returns the fields of the model but for its resolution."""
    _, attention, _, mlp = layout.numbers
    block = "Transformer/" + ("encoderblock" if layout.scanned else "encoderblock_0")
    query = f"{block}/MultiHeadDotProductAttention_{attention}/query/kernel"
    dense = f"{block}/MlpBlock_{mlp}/Dense_0/kernel"
    learned = layout.name == "google" or layout.position in arrays
    needed = ["embedding/kernel", query, dense, *([layout.position] if learned else [])]
    if missing := [f"missing {layout.prefix}{name}" for name in needed if name not in arrays]:
        raise UserError(f"{'; '.join(missing)}: the model cannot be inferred without")
    units = arrays.matches(r"block(\d{1,3})/unit(\d{1,3})/")
    counts = collections.Counter(int(stage) for stage, _ in units)
    stages = tuple(counts[stage] for stage in sorted(counts))
    hybrid = "conv_root/kernel" in arrays
    tanh_layer = "pre_logits/kernel" in arrays
    fields: dict[str, Any] = {
        "width": arrays.size("embedding/kernel", -1),
        "depth": arrays.size(query, 0) if layout.scanned else len(arrays.matches(r"Transformer/encoderblock_(\d+)/")),
        "mlp_dim": arrays.size(dense, -1),
        "num_heads": arrays.size(query, -2),
        "num_classes": arrays.size("head/kernel", -1) if "head/kernel" in arrays else 0,
        "pooling": "token" if "cls" in arrays else "map" if "MAPHead_0/probe" in arrays else "gap",
        "pre_logits": tanh_layer,
        "representation_size": arrays.size("pre_logits/kernel", -1) if tanh_layer else 0,
        "position": "learned" if learned else "sincos2d",
        "patch_size": arrays.size("embedding/kernel", 0) * (resnet_stride(stages) if hybrid else 1),
    }
    if hybrid:
        fields |= {"stem": "resnet", "stages": stages, "stem_width": arrays.size("conv_root/kernel", -1)}
    return fields


def infer_use(fields: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Returns how a published model is used, as keywords of `vit_jax.create`: preprocessing, class names, loss.

    The preprocessing is that of the authors' evaluation: vision_transformer (vit_jax/input_pipeline.py) resizes the
    whole image, big_vision (configs/load_and_eval.py) takes the centre, which is defined for square images only. Heads
    with as many classes as ImageNet or ImageNet-21k are assumed to be theirs; that of ImageNet-21k was trained with a
    sigmoid.
    """
    height, width = fields["resolution"]
    cropped = layout.name == "big_vision" and height == width
    sized = (
        f"resize_small({max(height // 7 * 8, height)})|central_crop({height})"
        if cropped
        else f"resize(({height},{width}))"
    )
    names = class_names.class_names(fields["num_classes"])
    loss = "sigmoid" if names and len(names) > 1000 else "softmax"
    return {"preprocess": f"{sized}|value_range(-1,1)", "class_names": names, "loss": loss}


def _grid(rows: int, patch_size: int, size: tuple[int, int] | None) -> tuple[int, int] | None:
    """Returns the (rows, columns) of patches of images of this size or, without one, of square images; None if their
    number is not `rows`.
    """
    side = math.isqrt(max(rows, 0))
    grid = (size[0] // patch_size, size[1] // patch_size) if size else (side, side)
    return grid if rows > 0 and grid[0] * grid[1] == rows else None
