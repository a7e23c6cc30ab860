"""The description of a model as JSON: in a file beside the arrays of our own layout, and in every checkpoint."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from vit_jax import UserError, models, user_errors
from vit_jax.config_fields import EXECUTION

MAX_BYTES = 2**24  # of a JSON file


@dataclass(frozen=True)
class ModelDescription:
    """A model as JSON states it.

    Attributes:
        model: its name, as `vit_jax.create` takes it.
        fields: what the name does not say, by flat keyword, without the fields that only say how it is computed.
        preprocess: the pipe of operations that prepares its images, if known.
        class_names: the names of its logits, if known.
        loss: the loss that it was trained with, softmax or sigmoid.
    """

    model: str
    fields: dict
    preprocess: str | None
    class_names: list | None
    loss: str

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
        raise UserError(
            f"its array names match no known layout; if vit_jax wrote this file, put {beside.name} in the same folder"
        )
    if beside.stat().st_size > MAX_BYTES:
        raise UserError(f"{beside.name} is too large to describe a model")
    with user_errors(f"{beside.name} is not JSON", ValueError, RecursionError):
        description = json.loads(beside.read_text())
    return check_description(description)


def description_file(path: Path) -> Path:
    """Returns the path of the JSON file that describes the model of a file."""
    return path.with_suffix(".json")


def description_text(model: models.Model) -> str:
    """Returns the description of a model as the text of a JSON file."""
    return json.dumps(describe_model(model), indent=2) + "\n"
