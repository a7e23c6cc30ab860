"""Pre-trained weights made to fit another task and resolution, as the paper does before fine-tuning (section 3.2)."""

import logging
from collections.abc import Sequence
from typing import Any

from vit_jax import UserError, models, tree

# The whole pre-training head goes; the new one starts at zero.
HEAD = ("head/", "pre_logits/")

# Fields of config.model besides the name that must be the same for the rest to carry over; with its head, two more.
SAID = ("width", "depth", "mlp_dim", "num_heads", "pooling", "position")
SAID_OF_HEAD = ("pre_logits", "representation_size")
UNSAID = ("patch_size", "stem", "stages", "stem_width")  # only the name says them


def adapt_parameters(
    source: models.Model,
    params: dict[str, Any],
    target: models.Model,
    wanted: dict[str, Any],
    keep_head: bool = False,
    method: str = "linear",
) -> dict[str, Any]:
    """Returns, by name, what `target` takes over from `source`: all but the head, with the position embeddings
    resampled to the target's grid of patches, the class token's row untouched.

    Args:
        source: the model that the parameters are of.
        params: its parameters.
        target: the model to start.
        wanted: shapes of the parameters of `target`.
        keep_head: take over the head too.
        method: of resampling; see `models.resample_positions`.

    Raises:
        UserError: the models differ in more than head and resolution; ends with the flags to set, or names every array
            concerned.
    """
    said = SAID + SAID_OF_HEAD if keep_head else SAID
    differ = [key for key in UNSAID + said if source.field(key) != target.field(key)]
    if differ:
        found = ", ".join(f"{key} {source.field(key)}, not {target.field(key)}" for key in differ)
        if differ == ["patch_size"] and source.field("stem") == "patches":
            found += " (--config.resample=flexi resizes the patches, as FlexiViT does)"
        raise UserError(f"it holds a model with {found}; {_remedy(source, target, said)}")
    classes, own = source.field("num_classes"), target.field("num_classes")
    if keep_head and classes != own:
        raise UserError(
            f"its head is for {classes:,} classes, not {own:,}; without --config.keep_head a new one starts."
        )
    leaves, rest = (
        {name: leaf for name, leaf in tree.flatten(all).items() if keep_head or not name.startswith(HEAD)}
        for all in (params, wanted)
    )
    old, new = source.spec, target.spec
    if "position" in leaves and old.grid != new.grid:
        leaves["position"] = models.resample_positions(leaves["position"], old.grid, new.grid, old.class_rows, method)
    if wrong := tree.differences(leaves, rest):
        remedy = f"; {_remedy(source, target, said)}" if source.name != target.name else ""
        raise UserError(f"it cannot start a {target.name}: {'; '.join(wrong)}{remedy}")
    return leaves


def check_class_order(old: Sequence[str] | None, new: Sequence[str] | None) -> None:
    """Compares the classes of a head with those of the data, by name; other words may mean the same, and are told.

    Raises:
        UserError: a name is of both, but not in the same place.
    """
    if not old or not new or list(old) == list(new):
        return
    places = {name: index for index, name in enumerate(new)}
    moved = [(index, name) for index, name in enumerate(old) if places.get(name, index) != index]
    if moved:
        index, name = moved[0]
        raise UserError(f"its class {name!r} is number {index}, that of the data {places[name]}: a head has one order.")
    words = ", ".join(old[:3]), ", ".join(new[:3])
    logging.getLogger(__name__).warning(
        "classes of the head: %s, ...; of the data: %s, ...: are they the same?", *words
    )


def _remedy(source: models.Model, target: models.Model, said: tuple[str, ...]) -> str:
    """Returns what of `config.model` to change so that the target is as the source, or what cannot be."""
    if unsaid := [f"{key} {source.field(key)}" for key in UNSAID if key in source.fields]:
        return f"no field of config.model gives {', '.join(unsaid)}"

    def differs(key: str) -> bool:  # under the source's name; the target keeps what its config says besides
        return target.fields[key] != source.field(key) if key in target.fields else key in source.fields

    flags = [f"name={source.name}"] if source.name != target.name else []
    flags += [f"{key}={source.field(key)}" for key in said if differs(key)]
    return f"it fits with {' '.join(f'--config.model.{flag}' for flag in flags)}"


def config_fields(source: models.Model) -> dict[str, Any]:
    """Returns the fields of `config.model`, besides the name, with which a run can start from a model."""
    return {name: source.field(name) for name in SAID}
