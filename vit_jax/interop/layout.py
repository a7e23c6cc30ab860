"""The interface of a layout of files: how they are recognised, described, read and written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.interop.model_description import ModelDescription
from vit_jax.model import Model


@dataclass(frozen=True)
class Layout:
    """A layout of files of weights: the functions that recognise, read and write such files.

    The first argument of `detect`, `describe` and `read` is an open file (`archives.Archive`). They decide by the names
    and shapes of its arrays.

    Attributes:
        suffixes: the suffixes of the files that may have the layout. A file that is written into a folder gets the
            first one.
        detect: returns which form of the layout the arrays have; None: they have another layout.
        describe: takes the arrays, their form as `detect` returns it, the path of the file, and the fields that the
            user gave. Returns the description of the model. Raises UserError if these do not determine the model.
        read: takes the arrays, their form, the spec of the model, and name -> shape of its parameters. Returns name ->
            parameter. Raises UserError naming every array that is missing, unexpected, or of another shape or type.
        write: takes the parameters by our names, and the spec of the model. Returns name -> array of the file. Raises
            UserError if the layout cannot express the model.
        describing_files: takes the name of the file with the arrays, and the model. Returns name -> content of the
            files that describe the model.
        is_inferred: whether the model of a file is inferred from its arrays. If so, it is printed on loading.
    """

    suffixes: tuple[str, ...]
    detect: Callable[[Any], Any]
    describe: Callable[[Any, Any, Path, Mapping[str, Any]], ModelDescription]
    read: Callable[[Any, Any, Any, dict[str, tuple[int, ...]]], dict[str, Any]]
    write: Callable[[dict[str, np.ndarray], Any], dict[str, np.ndarray]]
    describing_files: Callable[[str, Model], dict[str, str]] = lambda name, model: {}
    is_inferred: bool = True
