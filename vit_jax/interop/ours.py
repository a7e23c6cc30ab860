"""Our own layout: an npz of float32 arrays by name, and a JSON file that says which model they are."""

import json
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import UserError, models, tree

WEIGHTS = "model.npz"

# Fields that depend on the machine and not on the weights.
EXECUTION = ("dtype", "attention", "remat", "scan")


def about(model: models.Model) -> dict[str, Any]:
    """Returns what a model is, as JSON, without how it was made to run."""
    fields = {name: value for name, value in model.fields.items() if name not in EXECUTION}
    names = list(model.class_names) if model.class_names else None
    use = {"preprocess": model.preprocess, "class_names": names, "loss": model.loss}
    return {"model": model.name, "fields": fields, **use}


def model_of(about: dict[str, Any], fields: dict[str, Any]) -> models.Model:
    """Returns the model that `about` tells of, some of its fields changed."""
    names = about["class_names"]
    return models.create(
        about["model"],
        preprocess=about["preprocess"],
        class_names=tuple(names) if names else None,
        loss=about["loss"],
        **(about["fields"] | fields),
    )


def write(path: Path, model: models.Model, params: dict[str, Any]) -> None:
    """Writes the pair of files, each whole or not at all.

    Raises:
        UserError: there is no such folder.
    """
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} to write {path.name} to.")
    arrays = {name: np.asarray(leaf, np.float32) for name, leaf in tree.flatten(params).items()}
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    partial.replace(path)
    partial.write_text(json.dumps(about(model), indent=2) + "\n")
    partial.replace(path.with_suffix(".json"))


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what the JSON file says and the tree of arrays.

    Raises:
        UserError: a file is missing or is not what `write` makes.
    """
    if path.suffix != ".npz":
        raise UserError(f"{path} is no model: give a workdir, a checkpoint folder or a model.npz.")
    beside = path.with_suffix(".json")
    if not beside.is_file():
        raise UserError(f"{path} needs {beside.name} beside it, which says what model it is.")
    try:
        description = json.loads(beside.read_text())
        with np.load(path, allow_pickle=False) as file:
            return description, tree.unflatten({name: file[name] for name in file.files})
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def check(path: str, model: models.Model, params: dict[str, Any]) -> None:
    """Compares parameters with what the model wants.

    Raises:
        UserError: names every missing, unexpected and wrongly shaped array.
    """
    images = jax.ShapeDtypeStruct((1, *model.spec.position.image_size, 3), jnp.float32)
    wanted = jax.eval_shape(model.init, jax.random.key(0), images)
    wrong = tree.differences(params, wanted)
    if wrong:
        raise UserError(f"{path} does not hold a {model.name} as described: {'; '.join(wrong)}.")
