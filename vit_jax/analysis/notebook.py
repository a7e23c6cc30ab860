"""Moves files to and from a notebook: through the browser in Colab, by their paths elsewhere."""

import zipfile
from pathlib import Path
from typing import Any

from vit_jax import UserError, user_errors
from vit_jax.data.images import IMAGE_SUFFIXES
from vit_jax.storage import expand_home, filesystem


def upload(path: str | Path = "") -> list[Path]:
    """Returns files: the path itself or, if it is a folder, the images in it; without a path, the uploaded files.

    Raises:
        UserError: there are no files, or no path is given outside Colab.
    """
    if not path:
        files = sorted(Path(name) for name in _colab_files().upload())
    else:
        path = expand_home(path)
        inside = (file for file in path.glob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
        files = [path] if path.is_file() else sorted(inside)
    if not files:
        raise UserError(f"there are no images in {path}." if path else "no file was uploaded.")
    return files


def dataset(source: str) -> str:
    """Returns a data source as configs name it, after its images were uploaded or unpacked if necessary.

    Args:
        source: `folder:PATH`, where the path may be a zip file, which is unpacked beside itself; `folder:`, for which a
            zip file is uploaded; any other source is returned unchanged.

    Raises:
        UserError: as `upload`; or the file is not a zip file.
    """
    kind, _, name = source.partition(":")
    if kind != "folder" or filesystem.is_remote(name) or (name and expand_home(name).is_dir()):
        return source
    [archive, *_] = upload(name)
    return f"folder:{_unpack(archive)}"


def download(path: str | Path) -> None:
    """Downloads a file, with the JSON file beside it if there is one, by the browser; outside Colab prints the paths.

    Raises:
        UserError: the file does not exist.
    """
    path = expand_home(path).resolve()
    if not path.is_file():
        raise UserError(f"there is no {path}.")
    beside = path.with_suffix(".json")
    for file in [path, beside] if beside.is_file() else [path]:
        try:
            _colab_files().download(str(file))
        except UserError:
            print(file)


def _colab_files() -> Any:
    with user_errors("files can be uploaded in Colab only", ImportError, advice="give a path."):
        from google.colab import files
    return files


def _unpack(archive: Path) -> Path:
    """Returns the folder that contains the classes or splits, inside however many outer folders."""
    folder = archive.with_suffix("")
    with user_errors(f"cannot unpack {archive}", OSError, zipfile.BadZipFile), zipfile.ZipFile(archive) as file:
        # The folder that macOS adds would be taken for a class.
        file.extractall(folder, [name for name in file.namelist() if not name.startswith("__MACOSX/")])
    while len(inside := [path for path in folder.iterdir() if not path.name.startswith(".")]) == 1:
        if not inside[0].is_dir():
            break
        [folder] = inside
    return folder
