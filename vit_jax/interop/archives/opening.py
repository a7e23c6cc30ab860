"""Opens a file of weights by its content."""

import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from vit_jax import UserError, user_errors
from vit_jax.interop.archives import npz, safetensors_files

WRITTEN_DTYPES = ("float32", "float16", "bfloat16")


def open_archive(path: Path) -> AbstractContextManager[Any]:
    """Opens the arrays of a file: .npz, .safetensors, or the index of several .safetensors files.

    Raises:
        UserError: it is none of these, or it is damaged.
    """
    if zipfile.is_zipfile(path):
        return npz.open_archive(path)
    with path.open("rb") as file:
        start = file.read(9)
    if start[8:9] == b"{":  # after a length of 8 bytes, JSON
        return safetensors_files.open_archive(path)
    if path.name.endswith(safetensors_files.INDEX_SUFFIX):
        return safetensors_files.open_shards(path)
    raise UserError(f"is not an .npz or .safetensors file; {npz.FORMATS}")


def write_archive(
    path: Path, temporary: Path, arrays: Mapping[str, Any], dtype: str, notes: Mapping[str, str] | None = None
) -> None:
    """Writes arrays to a temporary path, in the format of the final one.

    Args:
        path: the final path; its suffix decides the format.
        temporary: the path that is written.
        arrays: name -> array, or whatever NumPy converts to an array.
        dtype: the dtype of the arrays in the file, one of `WRITTEN_DTYPES`.
        notes: key -> text for the header of a .safetensors file. They are ignored for an .npz file.

    Raises:
        UserError: a value is beyond the range of the dtype.
    """
    with user_errors(f"the weights cannot be written as {dtype}", FloatingPointError, advice="use another dtype"):
        if path.suffix == ".npz":
            npz.write_archive(temporary, arrays, dtype)
        else:
            safetensors_files.write_archive(temporary, arrays, dtype, notes)
