"""The description of a model as JSON: in a file beside the arrays of our own layout, and in every checkpoint.

`Format` is what a layout can do; the description of a model is what its `describe` returns.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from vit_jax import UserError, models, user_errors
from vit_jax.config import EXECUTION
from vit_jax.interop import class_names
from vit_jax.interop.pytorch import read_json, stated_kind

NOTE = "vit_jax"  # key of the description in the header of a file


@dataclass(frozen=True)
class ModelDescription:
    """A model as JSON states it.

    Attributes:
        model: its name, as `vit_jax.create` takes it.
        fields: what the name does not say, by flat keyword, without the fields that only say how it is computed.
        preprocess: the pipe of operations that prepares its images, if known.
        class_names: the names of its logits, if known.
        loss: the loss that it was trained with, softmax or sigmoid; empty: not known.
    """

    model: str
    fields: dict
    preprocess: str | None
    class_names: list | None
    loss: str

    @classmethod
    def of_fields(
        cls, fields: dict[str, Any], preprocess: str | None, names: list[str] | None = None, loss: str = ""
    ) -> "ModelDescription":
        """Returns the description of the model with these fields, which decide its name.

        Without names of its classes, a head with as many as ImageNet or ImageNet-21k is assumed to be of theirs.
        """
        known_names = names or class_names.class_names(fields["num_classes"])
        return cls(models.model_name(fields), fields, preprocess, list(known_names) if known_names else None, loss)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords with which `vit_jax.create` makes the model."""
        return self.fields | {"preprocess": self.preprocess, "class_names": self.class_names, "loss": self.loss}


TYPES = get_type_hints(ModelDescription)


def describe_model(model: models.Model) -> dict[str, Any]:
    """Returns the description of a model as JSON."""
    fields = {name: value for name, value in model.fields.items() if name not in EXECUTION}
    names = list(model.class_names) if model.class_names else None
    return asdict(ModelDescription(model.name, fields, model.preprocess, names, model.loss))


def check_description(description: Any) -> ModelDescription:
    """Returns a description from JSON.

    Raises:
        UserError: a field is missing or has another type.
    """
    known = isinstance(description, dict)
    if not known or not all(isinstance(description.get(key), kind) for key, kind in TYPES.items()):
        raise UserError(f"the description of the model must have the fields {', '.join(TYPES)}")
    if not all(isinstance(name, str) for name in description.get("class_names") or ()):
        raise UserError("the class names in the description of the model must be strings")
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
    return check_description(read_json(beside))


def description_file(path: Path) -> Path:
    """Returns the path of the JSON file that describes the model of a file."""
    return path.with_suffix(".json")


def header_notes(model: models.Model) -> dict[str, str]:
    """Returns the notes that describe a model in the header of its file."""
    return {NOTE: json.dumps(describe_model(model))}


def read_notes(notes: Mapping[str, str]) -> ModelDescription | None:
    """Returns the description in the header of a file; None if there is none.

    Raises:
        UserError: it does not describe a model.
    """
    if NOTE not in notes:
        return None
    with user_errors("the description in its header is not JSON", ValueError, RecursionError):
        description = json.loads(notes[NOTE])
    return check_description(description)


@dataclass(frozen=True)
class Format:
    """One layout. Functions take the arrays of an open file (`archives.Archive`), whose names and shapes decide.

    Attributes:
        suffixes: of the files that may contain it; the first is that of a folder's file.
        detect: returns which form of the layout the arrays of a file have, or None: they have another layout.
        describe: returns the form, complete, and the model of a file, from its arrays, their form, the path and the
            fields that the user gave. Raises UserError if that is not enough.
        read: returns the parameters from the arrays, their form, the spec of the model and the shapes of its
            parameters. Raises UserError naming every array that is missing, unexpected, or of another shape or type.
        write: returns the arrays of a file from the parameters and the spec of the model. Raises UserError if the
            layout cannot express the model.
        describing_files: returns the content of the files that describe a model, by name, from the name of the file
            with the arrays and the model.
        is_inferred: the model of a file is inferred from its arrays, so that it is printed.
    """

    suffixes: tuple[str, ...]
    detect: Callable[[Any], Any]
    describe: Callable[[Any, Any, Path, Mapping[str, Any]], tuple[Any, ModelDescription]]
    read: Callable[[Any, Any, Any, dict[str, tuple[int, ...]]], dict[str, Any]]
    write: Callable[[dict[str, np.ndarray], Any], dict[str, np.ndarray]]
    describing_files: Callable[[str, models.Model], dict[str, str]] = lambda name, model: {}
    is_inferred: bool = True
