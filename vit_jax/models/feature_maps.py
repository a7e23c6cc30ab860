"""The outputs of chosen blocks and stages as maps, without the tokens that belong to no patch."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax import UserError
from vit_jax.models.layers import Norm
from vit_jax.models.operations import PlainOps
from vit_jax.models.resnet import FeatureMap
from vit_jax.models.spec import ModelSpec
from vit_jax.models.variants import Spec

Place: TypeAlias = int | str  # the number of a block of a ViT, or the name of a part of a ResNet


class FeatureMaps(NamedTuple):
    """Feature maps in the order in which they were chosen.

    Attributes:
        maps: each [batch, rows, columns, channels].
        prefix: each the tokens before the patches [batch, tokens, channels]: the class token, if there is one, then
            the registers. A ResNet has 0 of them.
    """

    maps: tuple[FeatureMap, ...]
    prefix: tuple[Float[Array, "batch prefix channels"], ...]


def list_places(spec: Spec, blocks: int | Sequence[Place]) -> list[Place]:
    """Returns the places that `blocks` names, see `Model.feature_maps`: numbers of a ViT from 0, names of a ResNet.

    Raises:
        UserError: the model has no such block or stage, or none is named.
    """
    stages, has_resnet = (
        (spec.stem.stages, spec.stem.kind == "resnet") if isinstance(spec, ModelSpec) else (spec.stages, True)
    )
    words = [f"stage{number + 1}" for number in range(len(stages))]
    names = ["root", *words] if has_resnet else []
    numbered: Sequence[Place] = range(spec.depth) if isinstance(spec, ModelSpec) else words
    count, given = len(numbered), range(-blocks, 0) if isinstance(blocks, int) else blocks
    if not given:
        raise UserError(
            "blocks must be how many of the last blocks, at least 1, or a sequence of them, such as (3, -1)."
        )
    for place in given:
        if place not in names and place not in range(-count, count):
            named = f", and the names {', '.join(names)}" if names else ""
            raise UserError(f"there is no block {place!r}; there are the numbers from {-count} to {count - 1}{named}.")
    return [place if isinstance(place, str) else numbered[place] for place in given]


def take_maps(
    spec: Spec,
    ops: PlainOps,
    params: dict[str, Any],
    out: dict[str, Array],
    places: Sequence[Place],
    size: tuple[int, int],
    norm: bool,
) -> FeatureMaps:
    """Returns the maps at these places.

    Args:
        spec: the spec of the model.
        ops: the operations of the norm.
        params: the parameters of the model.
        out: the intermediates of the model.
        places: what `list_places` returns.
        size: (height, width) of the images.
        norm: whether the last norm of the model is applied, see `Model.feature_maps`.
    """
    maps, prefixes = [], []
    for place in places:
        if isinstance(spec, ModelSpec) and isinstance(place, int):
            x, rows, patch = out["blocks"][place], spec.prefix_rows, spec.stem.patch_size
            if norm and spec.head.final_norm == "tokens":
                own = {"params": jax.tree.map(jnp.asarray, params["encoder"]["norm"])}
                x = Norm(spec.block.norm, spec.block.norm_epsilon, ops, parent=None).apply(own, x)
            maps.append(x[:, rows:].reshape(len(x), size[0] // patch, size[1] // patch, -1))
            prefixes.append(x[:, :rows])
            continue
        x = out[str(place)]
        if norm and not isinstance(spec, ModelSpec) and place == f"stage{len(spec.stages)}":
            x = out["tokens"].reshape(x.shape)
        maps.append(x)
        prefixes.append(x[:, 0, :0])
    return FeatureMaps(tuple(maps), tuple(prefixes))
