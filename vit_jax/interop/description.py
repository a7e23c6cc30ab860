"""What a model is, as JSON: beside the npz of our own layout, and in every checkpoint."""

import json
from pathlib import Path
from typing import Any

from vit_jax import UserError, models
from vit_jax.config_fields import EXECUTION

MODEL_FILE = "model.npz"

LARGEST = 2**24  # bytes of a JSON file
KINDS = {"model": str, "fields": dict, "preprocess": str | None, "class_names": list | None, "loss": str}


def describe_model(model: models.Model) -> dict[str, Any]:
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
            f"its arrays are in no layout known here, and no {beside.name} beside it says that they are in ours"
        )
    if beside.stat().st_size > LARGEST:
        raise UserError(f"{beside.name} is too large to be the description of a model")
    try:
        return json.loads(beside.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{beside.name} is no JSON: {error}") from error


def write(path: Path, model: models.Model) -> None:
    """Writes what a model is into a file."""
    path.write_text(json.dumps(describe_model(model), indent=2) + "\n")
