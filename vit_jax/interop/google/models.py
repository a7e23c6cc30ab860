"""The `Format` of each layout of the published .npz files. A layout has one table for ViTs and one for BiTs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from vit_jax.interop.archives import Archive
from vit_jax.interop.array_shapes import given_size
from vit_jax.interop.description import ModelDescription
from vit_jax.interop.format import Format
from vit_jax.interop.google import bit_layouts, layouts
from vit_jax.models import BitSpec, ModelSpec

Form: TypeAlias = layouts.Layout | bit_layouts.BitLayout
TABLES: dict[type, Any] = {layouts.Layout: layouts, bit_layouts.BitLayout: bit_layouts}  # by the form of a file


def make_format(layout: layouts.Layout) -> Format:
    """Returns the `Format` of the layout with this name, for ViTs and for BiTs."""

    def detect(archive: Archive) -> Form | None:
        form = layouts.detect_layout(archive) or bit_layouts.detect_layout(archive)
        return form if form and form.name == layout.name else None

    def write(params: dict[str, Any], spec: ModelSpec | BitSpec) -> dict[str, np.ndarray]:
        form = bit_layouts.choose_layout(spec, layout.name) if isinstance(spec, BitSpec) else layout
        return TABLES[type(form)].to_layout(params, spec, form)

    return Format(suffixes=(".npz",), detect=detect, describe=describe_file, read=read_layout, write=write)


def describe_file(archive: Archive, form: Form, path: Path, given: Mapping[str, Any]) -> ModelDescription:
    """Returns the description of a file's model; raises as `infer_fields` of its module."""
    fields = TABLES[type(form)].infer_fields(archive, form, given_size(given))
    return ModelDescription.of_fields(fields, layouts.evaluation_pipe(fields, form.name))


def read_layout(
    archive: Archive, form: Form, spec: ModelSpec | BitSpec, shapes: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Returns our name -> parameter of a file; raises as `read_layout` of its module."""
    return TABLES[type(form)].read_layout(archive, form, spec, shapes)


GOOGLE, BIG_VISION = make_format(layouts.GOOGLE), make_format(layouts.BIG_VISION)
