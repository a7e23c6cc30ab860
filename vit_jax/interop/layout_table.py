"""The layouts that `load` and `save` know, in one table by name, and the choice of one."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from vit_jax import UserError, choose, refuse
from vit_jax.interop import (
    beit,
    google_bit,
    google_vit,
    hub,
    model_json,
    timm_bit,
    timm_config,
    timm_eva,
    timm_vit,
    transformers_clip,
    transformers_config,
    transformers_dinov3,
    transformers_families,
)
from vit_jax.interop.layout import Family, Layout
from vit_jax.interop.model_json import MODEL_FILE
from vit_jax.interop.onnx_model import write_onnx
from vit_jax.interop.published_config import read_json_object
from vit_jax.interop.stablehlo import write_stablehlo
from vit_jax.storage import expand_home

SUFFIXES = (".npz", ".safetensors")
# Suffix of a file that runs without this package -> (name of the file, export) -> name -> content of what is written.
PROGRAMS = {".onnx": write_onnx, ".stablehlo": write_stablehlo}

# In the order in which they are tried.
_ROWS = (
    Layout(
        name="google",
        suffixes=(".npz",),
        families=(google_vit.GOOGLE, google_bit.RELEASED),
        usual_pipe=google_vit.google_pipe,
        states_classes=False,
    ),
    Layout(
        name="big_vision",
        suffixes=(".npz",),
        families=(
            google_vit.BIG_VISION_SCANNED,
            google_vit.BIG_VISION,
            google_bit.PRE_ACTIVATION,
            google_bit.POST_ACTIVATION,
        ),
        usual_pipe=google_vit.big_vision_pipe,
        states_classes=False,
    ),
    Layout(
        name="timm",
        suffixes=(".safetensors",),
        families=(
            timm_bit.FAMILY,
            beit.TIMM,
            timm_vit.LINEAR,
            timm_vit.NAFLEX,
            timm_eva.PERCEPTION_ENCODER,  # before DINOv3, whose marks one with registers and scales has too
            timm_eva.DINOV3,
            timm_eva.EVA02,
            timm_eva.EVA,
            timm_vit.CLIP,
            timm_vit.FAMILY,
        ),
        read_config=timm_config.read_folder,
        read_name=timm_config.read_name,
        untold_error=timm_config.untold_error,
    ),
    Layout(
        name="huggingface",
        suffixes=(".safetensors",),
        families=(
            transformers_dinov3.IN_MEMORY,
            transformers_dinov3.DINOV3,
            transformers_clip.CLIP,
            beit.TRANSFORMERS_IN_MEMORY,
            beit.TRANSFORMERS,
            transformers_families.SIGLIP2,
            transformers_families.SIGLIP,
            transformers_families.IN_MEMORY["dinov2_with_registers"],
            transformers_families.DINOV2_WITH_REGISTERS,
            transformers_families.IN_MEMORY["dinov2"],
            transformers_families.DINOV2,
            transformers_families.IN_MEMORY["deit"],
            transformers_families.DEIT,
            transformers_families.IN_MEMORY["vit"],
            transformers_families.VIT,
        ),
        read_config=transformers_config.read_folder,
    ),
    Layout(
        name="ours",
        suffixes=(".npz", ".safetensors"),
        families=(
            Family(  # any file may be ours, since the model decides the names
                name="ours", spec=object, marks=(), table=None, config=model_json.describing_files
            ),
        ),
        is_inferred=False,
    ),
)
LAYOUTS = {layout.name: layout for layout in _ROWS}


class Target(NamedTuple):
    """A file to write, either alone or in a folder together with the files that describe it."""

    file: Path
    is_folder: bool
    layout: str  # empty: the file is a program

    @property
    def is_program(self) -> bool:
        """Whether the file runs without this package."""
        return self.file.suffix in PROGRAMS

    def prepare(self, names: Iterable[str]) -> None:
        """Checks that the file can be written with its describing files, and creates its folder if `is_folder`.

        Args:
            names: the names of the describing files.

        Raises:
            UserError: the folder is the workdir of a run, `load` would take another file of the folder, or a file of
                another kind would be replaced by a description.
            OSError: the folder cannot be created.
        """
        folder = self.file.parent
        if not self.is_folder:
            for name in names:
                _check_description_or_absent(folder / name)
            return
        if (folder / "checkpoints").is_dir():
            raise UserError(f"cannot write {folder}: it is the workdir of a run; choose another folder.")
        if self.file.name != MODEL_FILE and (folder / MODEL_FILE).exists():
            first = f"its {MODEL_FILE}, which is there already, would be loaded instead"
            raise UserError(f"cannot write {folder}: {first}; remove that file, or choose another folder.")
        folder.mkdir(parents=True, exist_ok=True)


def _check_description_or_absent(path: Path) -> None:
    """Raises UserError if there is a file that does not describe a model."""
    try:
        if path.exists():
            model_json.check_description(read_json_object(path))
    except UserError as error:
        why = "the file that is there does not describe a model"
        raise UserError(f"cannot write the description {path}: {why}; choose another name.") from error


def choose_target(path: str | Path, layout: str | None) -> Target:
    """Returns what to write for a path and a layout.

    Args:
        path: a local file that ends in one of `SUFFIXES` or `PROGRAMS`, or a folder.
        layout: one of `LAYOUTS`; None: none for a program, timm for a .safetensors file, else ours.

    Raises:
        UserError: the layout is unknown, the path is neither such a file nor a folder, or the layout is not written
            into files with this suffix.
    """
    if layout is not None:
        choose("layout", layout, LAYOUTS)
    local = expand_home(path)
    is_file = local.suffix in (*SUFFIXES, *PROGRAMS) and not str(path).endswith("/")
    is_folder = not is_file and (str(path).endswith("/") or not local.suffix or local.is_dir())
    if "://" in str(path) or str(path).startswith(hub.PREFIX) or not (is_folder or is_file):
        ends = f"{', '.join((*SUFFIXES, '.onnx'))} or .stablehlo"
        raise UserError(f"cannot write {path}: give a local path that ends in {ends}, or a folder.")
    if is_file and local.suffix in PROGRAMS:
        refuse((layout, f"cannot write {path}: a {local.suffix} file has no layout; leave out layout {layout}."))
        return Target(local, False, "")
    name = layout or ("timm" if is_file and local.suffix == ".safetensors" else "ours")
    allowed = LAYOUTS[name].suffixes
    if is_file and local.suffix not in allowed:
        raise UserError(f"cannot write {path}: the {name} layout is written into {allowed[0]} files.")
    return Target(local / f"model{allowed[0]}" if is_folder else local, is_folder, name)
