"""The two layouts of Google's published .npz files. Each has one table for ViTs and one for BiTs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from vit_jax.interop.archives import Archive
from vit_jax.interop.array_shapes import given_size
from vit_jax.interop.google import google_bit_layout, google_layout
from vit_jax.interop.layout import Layout
from vit_jax.interop.model_description import ModelDescription
from vit_jax.models import BitSpec, ModelSpec

Form: TypeAlias = google_layout.GoogleForm | google_bit_layout.BitForm
# By the type of a file's form: the module with the table.
TABLES: dict[type, Any] = {google_layout.GoogleForm: google_layout, google_bit_layout.BitForm: google_bit_layout}


def make_layout(names: google_layout.GoogleForm) -> Layout:
    """Returns the layout whose ViTs have these names, with the BiTs of the same layout."""

    def detect(archive: Archive) -> Form | None:
        form = google_layout.detect_form(archive) or google_bit_layout.detect_form(archive)
        return form if form and form.name == names.name else None

    def write(params: dict[str, Any], spec: ModelSpec | BitSpec) -> dict[str, np.ndarray]:
        form = google_bit_layout.choose_form(spec, names.name) if isinstance(spec, BitSpec) else names
        return TABLES[type(form)].to_layout(params, spec, form)

    return Layout(suffixes=(".npz",), detect=detect, describe=describe_file, read=read_layout, write=write)


def describe_file(archive: Archive, form: Form, path: Path, given: Mapping[str, Any]) -> ModelDescription:
    """Returns the description of a file's model; raises as `infer_fields` of its module."""
    fields = TABLES[type(form)].infer_fields(archive, form, given_size(given))
    return ModelDescription.of_fields(fields, google_layout.evaluation_pipe(fields, form.name))


def read_layout(
    archive: Archive, form: Form, spec: ModelSpec | BitSpec, shapes: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Returns our name -> parameter of a file; raises as `read_layout` of its module."""
    return TABLES[type(form)].read_layout(archive, form, spec, shapes)


GOOGLE, BIG_VISION = make_layout(google_layout.GOOGLE), make_layout(google_layout.BIG_VISION)
