"""Reads and writes .safetensors files by the library of that name: one file, or shards with an index.

A file may come from a stranger. The library checks that the arrays fill the file without overlap. This module limits
the size of the header, which the library parses, and checks the size and the names of an index.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from vit_jax.interop.archives.archive import (
    DTYPES,
    Archive,
    Header,
    check_count,
    check_header,
    convert_values,
    copy_values,
    read_errors,
)

SUFFIX = ".safetensors"
INDEX_SUFFIX = f"{SUFFIX}.index.json"
MAX_HEADER, MAX_INDEX = 2**22, 2**22  # bytes
MAX_SHARDS = 1_000
# The format's words for dtypes. Weights are never stored as integers: only messages and buffers mention these.
DTYPE_WORDS = {"F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16"}
DTYPE_WORDS |= {"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U8": "uint8", "BOOL": "bool"}
KIND = f"a {SUFFIX} file"


class SafetensorsArchive(Archive):
    """The arrays of open .safetensors files.

    Args:
        files: path -> open file. The names of arrays must be unique over all files.
    """

    def __init__(self, files: Mapping[Path, Any]):
        """Raises ValueError for a file that declares what no model's file contains."""
        self._headers = {}
        self._file_of: dict[str, Any] = {}
        check_count(sum(len(file.keys()) for file in files.values()))
        for file in files.values():
            for name in file.keys():  # noqa: SIM118 (it is not a mapping)
                if name in self._headers:
                    raise ValueError(f"it contains two arrays named {name}")
                array = file.get_slice(name)
                if array.get_dtype() not in DTYPE_WORDS:
                    raise ValueError(f"{name} is stored as {array.get_dtype()}, which vit_jax does not read")
                word = DTYPE_WORDS[array.get_dtype()]
                self._headers[name] = Header(tuple(array.get_shape()), DTYPES.get(word) or np.dtype(word))
                check_header(name, self._headers[name])
                self._file_of[name] = file

    def read_array(self, name: str, into: np.ndarray) -> None:
        """See `Archive`."""
        with read_errors(KIND):
            copy_values(self._file_of[name].get_tensor(name), into)


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[SafetensorsArchive]:
    """Opens a .safetensors file.

    Raises:
        UserError: it is damaged.
    """
    with contextlib.ExitStack() as stack:
        with read_errors(KIND):
            file = _open_file(path, stack)
            archive = SafetensorsArchive({path: file})
            archive.notes = file.metadata() or {}
        yield archive


@contextlib.contextmanager
def open_shards(path: Path) -> Iterator[SafetensorsArchive]:
    """Opens the .safetensors files that an index in the same folder names.

    Raises:
        UserError: the index or a file is damaged, or a file is missing.
    """
    with contextlib.ExitStack() as stack:
        with read_errors(f"an index of {SUFFIX} files"):
            shard_of = read_index(path)
            missing = [name for name in sorted(set(shard_of.values())) if not (path.parent / name).is_file()]
            if missing:
                raise ValueError(f"{', '.join(missing)} must be in the same folder")
        files = {}
        for name in sorted(set(shard_of.values())):
            with read_errors(f"{KIND} ({name})"):
                files[path.parent / name] = _open_file(path.parent / name, stack)
        with read_errors(f"an index of {SUFFIX} files"):
            archive = SafetensorsArchive(files)
            wrong = set(archive) ^ set(shard_of)
            if wrong:
                raise ValueError(f"index and files differ in the array {min(wrong)}")
        yield archive


def read_index(path: Path) -> dict[str, str]:
    """Returns name of an array -> name of the file that holds it, which is in the folder of the index.

    Raises:
        ValueError: the index has another form.
    """
    if path.stat().st_size > MAX_INDEX:
        raise ValueError("it is too large")
    index = json.loads(path.read_bytes())
    shard_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise ValueError("it has no weight_map")
    check_count(len(shard_of))
    for name in shard_of.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(SUFFIX):
            raise ValueError(f"it names {name!r}, which is not the name of a {SUFFIX} file beside it")
    if len(set(shard_of.values())) > MAX_SHARDS:
        raise ValueError(f"it names more than {MAX_SHARDS:,} files")
    return shard_of


def _open_file(path: Path, stack: contextlib.ExitStack) -> Any:
    """Opens a file by the library, and closes it when `stack` ends.

    Values are read, not mapped into memory: this process would be killed if another one cut a mapped file short.

    Raises:
        ValueError: the header is too large.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER:
        raise ValueError(f"its header of {length:,} bytes is larger than any model's")
    return stack.enter_context(safetensors.safe_open(path, "np", backend="pread"))


def write_archive(path: Path, arrays: Mapping[str, Any], dtype: str, notes: Mapping[str, str] | None = None) -> None:
    """Writes a .safetensors file of arrays, or of whatever NumPy converts to arrays, all in `dtype`, and of notes."""
    values = {name: convert_values(array, DTYPES[dtype]) for name, array in arrays.items()}
    # PyTorch's libraries refuse a file that does not state that its arrays are in their order of dimensions.
    safetensors.numpy.save_file(values, path, metadata={"format": "pt", **(notes or {})})
