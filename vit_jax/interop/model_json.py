"""The description of a model as JSON: beside the arrays of our own layout or in a file's header, and in checkpoints."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from vit_jax import UserError, user_errors
from vit_jax.config import EXECUTION_FIELDS
from vit_jax.interop.published_config import json_text, read_json_object, stated_kind
from vit_jax.json_text import to_json
from vit_jax.model import Model, create

MODEL_FILE = "model.npz"  # the file of the weights in a workdir, or in a folder of our own layout
NOTE = "vit_jax"  # the key of the description in the header of a file


@dataclass(frozen=True)
class ModelDescription:
    """A model as JSON states it.

    Attributes:
        model: the model's name, as `vit_jax.create` takes it.
        fields: flat keyword of `vit_jax.create` -> value, which complete the name. Fields that only say how the model
            is computed are left out.
        preprocess: the pipe of operations that prepares the model's images; None: not known.
        class_names: the names of the classes in the order of the logits; None: not known.
        loss: the loss that the model was trained with, of `model.LOSSES`; empty: not known.
        resample: how positions are resampled to another resolution by the library of the weights.
        licence: the licence of the weights, as the Hugging Face hub names it; empty: not known.
        licence_address: where the licence is published; empty: not known.
        multi_label: whether an image may have several classes, or none.
        target_scale: [mean, deviation] of each number of a regression; None: the outputs are the numbers.
    """

    model: str
    fields: dict
    preprocess: str | None
    class_names: list | None
    loss: str
    resample: str = "linear"
    licence: str = ""
    licence_address: str = ""
    multi_label: bool = False
    target_scale: list | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords with which `vit_jax.create` makes the model."""
        return self.fields | {name: getattr(self, name) for name in DESCRIBED}


TYPES = get_type_hints(ModelDescription)
# What weights hand on to those that are made from them -> its value in descriptions of versions that did not state it.
INHERITED = {"resample": "linear", "licence": "", "licence_address": ""}
# What the head answers -> its value in descriptions of versions that did not state it.
ANSWERS: dict[str, Any] = {"multi_label": False, "target_scale": None}
# Attributes of a model besides its name and its fields.
DESCRIBED = ("preprocess", "class_names", "loss", *ANSWERS, *INHERITED)


def describe_model(model: Model) -> dict[str, Any]:
    """Returns the description of a model as JSON."""
    fields = {name: value for name, value in model.fields.items() if name not in EXECUTION_FIELDS}
    described = {name: getattr(model, name) for name in DESCRIBED}
    described["class_names"] = list(model.class_names) if model.class_names else None
    described["target_scale"] = [list(pair) for pair in model.target_scale] if model.target_scale else None
    return asdict(ModelDescription(model.name, fields, **described))


def inherited(model: Model | dict[str, Any]) -> dict[str, str]:
    """Returns the part of a model's description that the models which start from its weights have too.

    Args:
        model: the model, or its description as JSON, which may be of an earlier version.
    """
    described = model if isinstance(model, dict) else describe_model(model)
    return {name: described.get(name, default) for name, default in INHERITED.items()}


def restore_model(description: object) -> Model:
    """Returns the model that `describe_model` described; raises as `check_description`."""
    stated = check_description(description)
    return create(stated.model, **stated.keywords)


def check_description(description: Any) -> ModelDescription:
    """Returns the description of a model in parsed JSON, which may come from a stranger.

    Raises:
        UserError: a field is missing or has another type.
    """
    is_object = isinstance(description, dict)
    if is_object:
        description = INHERITED | ANSWERS | description
    if not is_object or not all(isinstance(description.get(key), kind) for key, kind in TYPES.items()):
        raise UserError(f"the description of the model must have the fields {', '.join(TYPES)}")
    if not all(isinstance(name, str) for name in description.get("class_names") or ()):
        raise UserError("the class names in the description of the model must be strings")
    for pair in description["target_scale"] or ():
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(number) in (int, float) for number in pair)):
            raise UserError("target_scale in the description of the model must be a list of [mean, deviation]")
    return ModelDescription(**{key: description.get(key) for key in TYPES})


def read_description(path: Path) -> ModelDescription:
    """Returns the description in the JSON file beside a file of arrays.

    Raises:
        UserError: the file is missing or does not describe a model.
    """
    beside = description_file(path)
    if not beside.is_file():
        if kind := stated_kind(path.parent):
            raise UserError(f"it is {kind}, which vit_jax does not read")
        raise UserError(
            f"its array names match no known layout; if vit_jax wrote this file, put {beside.name} in the same folder"
        )
    return check_description(read_json_object(beside))


def description_file(path: Path) -> Path:
    """Returns the path of the JSON file that describes the model of a file."""
    return path.with_suffix(".json")


def describing_files(name: str, model: Model) -> dict[str, str]:
    """Returns name -> content of the JSON file that describes the model, for arrays in the file `name`."""
    return {description_file(Path(name)).name: json_text(describe_model(model))}


def header_notes(model: Model) -> dict[str, str]:
    """Returns key -> text of the note that describes a model in the header of its file."""
    return {NOTE: to_json(describe_model(model))}


def read_notes(notes: Mapping[str, str]) -> ModelDescription | None:
    """Returns the description in the notes of a file's header; None if there is none.

    Raises:
        UserError: the description is not JSON or does not describe a model.
    """
    if NOTE not in notes:
        return None
    with user_errors("the description in its header is not JSON", ValueError, RecursionError):
        description = json.loads(notes[NOTE])
    return check_description(description)
