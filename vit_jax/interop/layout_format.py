"""What `load` and `save` need to know of a layout, in which files hold the arrays of a model."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.interop.description import ModelDescription
from vit_jax.models import Model


@dataclasses.dataclass(frozen=True)
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
    describing_files: Callable[[str, Model], dict[str, str]] = lambda name, model: {}
    is_inferred: bool = True
