"""The layouts in which files hold the arrays of a model: one table, from the name of a layout to what can be done.

Functions of an entry take the arrays of an open file (`archives.Archive`), of which the names and the shapes decide.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax import UserError, choose
from vit_jax.interop import (
    huggingface_config,
    huggingface_layout,
    layouts,
    own_layout,
    timm_config,
    timm_layout,
    torch_files,
)
from vit_jax.interop.description import ModelDescription
from vit_jax.models import Model, ModelSpec

SUFFIXES = NPZ, SAFETENSORS = ".npz", ".safetensors"


@dataclasses.dataclass(frozen=True)
class Format:
    """What `load` and `save` need to know of a layout.

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
    read: Callable[[Any, Any, ModelSpec, dict[str, tuple[int, ...]]], dict[str, Any]]
    write: Callable[[dict[str, np.ndarray], ModelSpec], dict[str, np.ndarray]]
    describing_files: Callable[[str, Model], dict[str, str]] = lambda name, model: {}
    is_inferred: bool = True


def _google_format(layout: layouts.Layout) -> Format:
    return Format(
        suffixes=(NPZ,),
        detect=functools.partial(layouts.detect_form, layout),
        describe=layouts.describe_file,
        read=layouts.read_layout,
        write=functools.partial(layouts.to_layout, layout=layout),
    )


# In the order in which they are tried: our own layout has no form that can be told from the names alone.
FORMATS = {
    "google": _google_format(layouts.GOOGLE),
    "big_vision": _google_format(layouts.BIG_VISION),
    "timm": Format(
        suffixes=(SAFETENSORS,),
        detect=lambda names: "timm" if timm_layout.detect_layout(names) else None,
        describe=torch_files.describe_timm,
        read=lambda archive, form, spec, shapes: timm_layout.read_layout(archive, spec, shapes),
        write=timm_layout.to_layout,
        describing_files=timm_config.describing_files,
    ),
    "huggingface": Format(
        suffixes=(SAFETENSORS,),
        detect=huggingface_layout.detect_form,
        describe=torch_files.describe_huggingface,
        read=huggingface_layout.read_layout,
        write=huggingface_layout.to_layout,
        describing_files=huggingface_config.describing_files,
    ),
    "ours": Format(
        suffixes=(NPZ, SAFETENSORS),
        detect=own_layout.detect_form,
        describe=own_layout.describe_file,
        read=own_layout.read_layout,
        write=own_layout.to_layout,
        describing_files=own_layout.describing_files,
        is_inferred=False,
    ),
}


def detect_format(archive: Any) -> tuple[str, Any]:
    """Returns the name of the layout of a file, and which form of it the file has."""
    forms = ((name, layout.detect(archive)) for name, layout in FORMATS.items())
    return next((name, form) for name, form in forms if form is not None)


class Target(NamedTuple):
    """A file to write, alone or in a folder with all that describes it."""

    file: Path
    is_folder: bool
    layout: str

    def make_folder(self, names: Iterable[str]) -> None:
        """Makes the folder for the file and for files of these names, if a folder was asked for.

        Raises:
            UserError: it is the workdir of a run, whose files would be replaced.
            OSError: it cannot be made.
        """
        folder = self.file.parent
        if self.is_folder:
            if "config.json" in names and (folder / "checkpoints").is_dir():
                raise UserError(f"cannot write {folder}: it is the workdir of a run; choose another folder.")
            folder.mkdir(parents=True, exist_ok=True)


def choose_target(path: str | Path, layout: str | None) -> Target:
    """Returns what to write for a path and a layout.

    Args:
        path: a local file that ends in one of `SUFFIXES`, or a folder.
        layout: one of `FORMATS`; or None: timm for .safetensors, else ours.

    Raises:
        UserError: the layout is unknown, the path is of another kind, or the layout has files of another kind.
    """
    if layout is not None:
        choose("layout", layout, FORMATS)
    local = Path(path).expanduser()
    is_file = local.suffix in SUFFIXES and not str(path).endswith("/")
    is_folder = not is_file and (str(path).endswith("/") or not local.suffix or local.is_dir())
    if "://" in str(path) or not (is_folder or is_file):
        raise UserError(f"cannot write {path}: give a local path that ends in {' or '.join(SUFFIXES)}, or a folder.")
    name = layout or ("timm" if is_file and local.suffix == SAFETENSORS else "ours")
    allowed = FORMATS[name].suffixes
    if is_file and local.suffix not in allowed:
        raise UserError(f"cannot write {path}: the {name} layout is written into {allowed[0]} files.")
    return Target(local / f"model{allowed[0]}" if is_folder else local, is_folder, name)
