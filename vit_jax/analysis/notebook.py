"""Files to and from a notebook: by the browser in Colab, by their paths elsewhere."""

import zipfile
from pathlib import Path
from typing import Any

from vit_jax import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif")  # of images


def upload(path: str | Path = "") -> list[Path]:
    """Returns files: the path itself or, if it is a folder, the images in it; without a path, what is uploaded.

    Raises:
        UserError: nothing is there, or nothing was uploaded; or there is no path, and this is not Colab.
    """
    if not path:
        found = sorted(Path(name) for name in _colab("give a path: there is no upload").upload())
    else:
        path = Path(path).expanduser()
        found = [path] if path.is_file() else sorted(one for one in path.glob("*") if one.suffix.lower() in SUFFIXES)
    if not found:
        raise UserError(f"there are no files in {path}." if path else "nothing was uploaded.")
    return found


def dataset(source: str) -> str:
    """Returns a data source as configs name it, and sees to it that its images are here.

    Args:
        source: of the kind `folder:PATH`, the path may be a zip, which is unpacked beside itself, and if it is empty
            a zip is uploaded; all others are returned as they are.

    Raises:
        UserError: as `upload`; or the file is no zip.
    """
    kind, _, name = source.partition(":")
    if kind != "folder" or (name and Path(name).expanduser().is_dir()):
        return source
    [archive, *_] = upload(name)
    return f"folder:{_unpack(archive)}"


def download(path: str | Path) -> None:
    """Hands a file, and the JSON that describes it if that lies beside it, to the browser; elsewhere tells where it is.

    Raises:
        UserError: there is no such file.
    """
    path = Path(path).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"there is no {path}.")
    beside = path.with_suffix(".json")
    for one in [path, beside] if beside.is_file() else [path]:
        try:
            _colab("").download(str(one))
        except UserError:
            print(one)


def _colab(otherwise: str) -> Any:
    try:
        from google.colab import files
    except ImportError as error:
        raise UserError(f"{otherwise} outside Colab.") from error
    return files


def _unpack(archive: Path) -> Path:
    """Returns the folder that holds the classes or splits, however many folders are around it."""
    folder = archive.with_suffix("")
    try:
        with zipfile.ZipFile(archive) as file:
            # What macOS adds would be a class.
            file.extractall(folder, [name for name in file.namelist() if not name.startswith("__MACOSX/")])
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{archive} is no readable zip: {error}.") from error
    while len(inside := [one for one in folder.iterdir() if not one.name.startswith(".")]) == 1 and inside[0].is_dir():
        [folder] = inside
    return folder
