"""Our own layout: a file has the parameters by our names, and a JSON file beside it describes the model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_jax.interop import mapping
from vit_jax.interop.archives import Archive
from vit_jax.interop.layout import Layout
from vit_jax.interop.model_description import ModelDescription, describe_model, description_file, read_description
from vit_jax.interop.pytorch import json_text
from vit_jax.model import Model
from vit_jax.models import BitSpec, ModelSpec


def detect_form(archive: Archive) -> str:
    """Returns the only form: any file may be ours, since the model decides the names."""
    return "ours"


def describe_file(archive: Archive, form: str, path: Path, given: Mapping[str, Any]) -> ModelDescription:
    """Returns the description in the JSON file beside an archive; raises as `read_description`."""
    return read_description(path)


def read_layout(archive: Archive, form: str, spec: ModelSpec | BitSpec, shapes: mapping.Shapes) -> dict[str, Any]:
    """Returns the parameters of a file; `shapes` are the shapes of the parameters.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    return mapping.read_parameters(archive, {name: mapping.Leaf(name) for name in shapes}, shapes, prefix="")


def to_layout(params: dict[str, Any], spec: ModelSpec | BitSpec) -> dict[str, Any]:
    """Returns the arrays of a file: the parameters themselves."""
    return params


def describing_files(name: str, model: Model) -> dict[str, str]:
    """Returns name -> content of the JSON file that describes the model, for arrays in the file `name`."""
    return {description_file(Path(name)).name: json_text(describe_model(model))}


OURS = Layout(
    suffixes=(".npz", ".safetensors"),
    detect=detect_form,
    describe=describe_file,
    read=read_layout,
    write=to_layout,
    describing_files=describing_files,
    is_inferred=False,
)
