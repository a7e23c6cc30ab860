"""The architectures of timm 1.0.31 whose form is that of one of our models, as `timm_models.csv` lists them.

`benchmarks.timm_models` writes the file from the models themselves.
"""

import csv
import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

from vit_jax.model import Model

PLAIN, DISTILLED = "vit_base_patch16_224", "deit_base_distilled_patch16_224"
FORMS = {  # what `model_args` cannot change -> pattern of the names; {0}: the patch size
    "plain": r"vit_[a-z]+_patch{0}_\d+",
    "layer_scale": r"deit3_[a-z]+_patch{0}_\d+|vit_[a-z]+_patch{0}_dinov2",
    "distilled": r"deit_[a-z]+_distilled_patch{0}_\d+",
    "map": r"vit_\w+_patch{0}_siglip_\d+",
}


class Architecture(NamedTuple):
    """The values that the name of an architecture implies unless a configuration states others.

    The values of a hybrid are those of its Transformer.
    """

    num_heads: int
    activation: str
    norm_epsilon: float
    width: int
    depth: int
    mlp_dim: int
    resolution: int

    @property
    def unseen_fields(self) -> dict[str, Any]:
        """The fields that no array of a file tells."""
        return {name: getattr(self, name) for name in ("num_heads", "activation", "norm_epsilon")}


def find_architecture(name: str) -> Architecture | None:
    """Returns the architecture with a name, which may have a tag after a dot; None if it is not listed."""
    return _read_table().get(name.partition(".")[0])


def nearest_name(model: Model) -> str:
    """Returns the name of an architecture with the sizes of a ViT; `PLAIN` or `DISTILLED` if none has these sizes.

    Of several architectures, the one with the nearest resolution is chosen. The model differs from the architecture
    only in what timm's `model_args` can state.
    """
    value = model.field
    kind = "map" if value("pooling") == "map" else "layer_scale" if value("layer_scale") else "plain"
    kind, default = ("distilled", DISTILLED) if value("distilled_head") else (kind, PLAIN)
    pattern = FORMS[kind].format(value("patch_size"))
    sizes = tuple(map(value, ("num_heads", "width", "depth", "mlp_dim")))
    side = max(model.image_size)
    distances = {
        name: abs(one.resolution - side)
        for name, one in _read_table().items()
        if re.fullmatch(pattern, name) and (one.num_heads, one.width, one.depth, one.mlp_dim) == sizes
    }
    return min(distances, key=distances.__getitem__, default=default)


@functools.cache
def _read_table() -> dict[str, Architecture]:
    types = Architecture.__annotations__
    with Path(__file__).with_name("timm_models.csv").open(newline="", encoding="utf-8") as file:
        return {
            row["architecture"]: Architecture(**{name: kind(row[name]) for name, kind in types.items()})
            for row in csv.DictReader(file)
        }
