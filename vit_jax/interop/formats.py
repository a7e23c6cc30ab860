"""The layouts that `load` and `save` know, in one table: name of a layout -> its `Format`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from vit_jax import UserError, choose
from vit_jax.interop import own_layout, torch_files
from vit_jax.interop.archives import Archive
from vit_jax.interop.google import models
from vit_jax.storage import expand_home

SUFFIXES = (".npz", ".safetensors")

# In the order in which they are tried. Our own layout is the last: it accepts any file.
FORMATS = {
    "google": models.GOOGLE,
    "big_vision": models.BIG_VISION,
    "timm": torch_files.TIMM,
    "huggingface": torch_files.HUGGINGFACE,
    "ours": own_layout.OURS,
}


def detect_format(archive: Archive) -> tuple[str, Any]:
    """Returns the name of the layout of a file, and the form of the layout that the file has."""
    forms = ((name, layout.detect(archive)) for name, layout in FORMATS.items())
    return next((name, form) for name, form in forms if form is not None)


class Target(NamedTuple):
    """A file to write, either alone or in a folder together with the files that describe it."""

    file: Path
    is_folder: bool
    layout: str

    def make_folder(self, names: Iterable[str]) -> None:
        """Creates the folder of the file and of the describing files `names`. Does nothing unless `is_folder`.

        Raises:
            UserError: the folder is the workdir of a run, whose `config.json` would be replaced.
            OSError: the folder cannot be created.
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
        layout: one of `FORMATS`; None: timm for a .safetensors file, else ours.

    Raises:
        UserError: the layout is unknown, the path is neither such a file nor a folder, or the layout is not written
            into files with this suffix.
    """
    if layout is not None:
        choose("layout", layout, FORMATS)
    local = expand_home(path)
    is_file = local.suffix in SUFFIXES and not str(path).endswith("/")
    is_folder = not is_file and (str(path).endswith("/") or not local.suffix or local.is_dir())
    if "://" in str(path) or not (is_folder or is_file):
        raise UserError(f"cannot write {path}: give a local path that ends in {' or '.join(SUFFIXES)}, or a folder.")
    name = layout or ("timm" if is_file and local.suffix == ".safetensors" else "ours")
    allowed = FORMATS[name].suffixes
    if is_file and local.suffix not in allowed:
        raise UserError(f"cannot write {path}: the {name} layout is written into {allowed[0]} files.")
    return Target(local / f"model{allowed[0]}" if is_folder else local, is_folder, name)
