"""Our own layout: an npz of float32 arrays by name, and a JSON file that says which model they are."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax import UserError, choose, models, tree
from vit_jax.interop import archive

WEIGHTS = "model.npz"

# Fields that depend on the machine and not on the weights.
EXECUTION = ("dtype", "attention", "remat", "scan")

LARGEST = 2**24  # bytes of a JSON file
KINDS = {"model": str, "fields": dict, "preprocess": str | None, "class_names": list | None, "loss": str}


def about(model: models.Model) -> dict[str, Any]:
    """Returns what a model is, as JSON, without how it was made to run."""
    fields = {name: value for name, value in model.fields.items() if name not in EXECUTION}
    names = list(model.class_names) if model.class_names else None
    use = {"preprocess": model.preprocess, "class_names": names, "loss": model.loss}
    return {"model": model.name, "fields": fields, **use}


def arguments(about: Any) -> tuple[str, dict[str, Any]]:
    """Returns the name and the keywords with which `models.create` makes the model that `about` tells of.

    Raises:
        UserError: it tells of none.
    """
    if not isinstance(about, dict) or not all(isinstance(about.get(key), kind) for key, kind in KINDS.items()):
        raise UserError(f"what is said of its model is not {', '.join(KINDS)}")
    if not all(isinstance(name, str) for name in about["class_names"] or ()):
        raise UserError("its class names are not words")
    choose("loss", about["loss"], ("softmax", "sigmoid"))
    use = {key: about[key] for key in ("preprocess", "class_names", "loss")}
    return about["model"], about["fields"] | use


def described(path: Path) -> Any:
    """Returns what the JSON file beside an npz says.

    Raises:
        UserError: it is missing or is no JSON.
    """
    beside = path.with_suffix(".json")
    if not beside.is_file():
        raise UserError(
            f"its arrays are in no layout known here, and {beside.name}, which would say what ours are, is not beside it"
        )
    if beside.stat().st_size > LARGEST:
        raise UserError(f"{beside.name} is too large to be the description of a model")
    try:
        return json.loads(beside.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{beside.name} is no JSON: {error}") from error


def shapes(model: models.Model) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's parameters by name."""
    spec = model.spec
    # Fixed positions are no parameters: their table, maybe a large one, need not be made.
    learned = spec.position.position == "learned"
    size = spec.position.image_size if learned else (spec.stem.patch_size, spec.stem.patch_size)
    wanted = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, *size, 3), jnp.float32))
    return {name: leaf.shape for name, leaf in tree.flatten(wanted).items()}


def check(model: models.Model, params: Mapping[str, Any]) -> None:
    """Compares parameters with what a model wants.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    wanted = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes(model).items()}
    if wrong := tree.differences(params, wanted):
        raise UserError(f"the arrays are not those of the {model.name} described: {'; '.join(wrong)}.")


def write(path: Path, model: models.Model, arrays: Mapping[str, Any]) -> None:
    """Writes the pair of files, each whole or not at all.

    Raises:
        UserError: there is no such folder.
    """
    archive.write(path, arrays)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(about(model), indent=2) + "\n")
    partial.replace(path.with_suffix(".json"))
