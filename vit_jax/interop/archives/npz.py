"""Reads and writes .npz files: NumPy arrays by name in a zip archive. The file may come from a stranger.

Nothing is unpickled, nothing is unpacked to disk, and the size that an array declares is checked before memory is
allocated.
"""

import contextlib
import math
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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

# Weights hardly compress. A file may unpack to this many times its own size, and a small one to this many bytes.
MAX_EXPANSION, ALWAYS_ALLOWED = 4, 2**26
MAX_HEADER = 1_000  # bytes
FORMATS = "vit_jax reads the .npz files of vit_jax, vision_transformer and big_vision, and .safetensors files"
CHUNK = 2**20  # bytes read at once: they are still in the processor's cache when they are copied
SUFFIX = ".npy"
BFLOAT16 = "|V2"  # as headers write it: NumPy has no name for it
KIND = "an .npz file"


class Entry(NamedTuple):
    """The place of an array in the file."""

    info: zipfile.ZipInfo
    start: int  # bytes before the values
    fortran_order: bool  # the first index varies fastest


class NpzArchive(Archive):
    """The arrays of an open .npz file.

    Each thread reads by a ZipFile of its own: from Python 3.12 on, `ZipFile.open` moves the position of the file that
    all streams of a ZipFile share, so that another thread reads the wrong bytes.
    """

    def __init__(self, path: Path, closing: contextlib.ExitStack):
        """Opens the file, which `closing` closes.

        Raises:
            ValueError: it declares what no model's file contains.
        """
        self._path, self._closing = path, closing
        self._own = threading.local()  # of each thread: its ZipFile and its spare memory
        file = self._thread_file()
        check_count(len(file.infolist()))
        infos: dict[str, zipfile.ZipInfo] = {}
        for info in file.infolist():
            if not info.filename.endswith(SUFFIX):
                raise ValueError(f"it contains {info.filename}, which is not an array; {FORMATS}")
            name = info.filename.removesuffix(SUFFIX)
            if name in infos:
                raise ValueError(f"it contains two arrays named {name}")
            infos[name] = info
        declared = sum(info.file_size for info in infos.values())
        if declared > max(ALWAYS_ALLOWED, MAX_EXPANSION * path.stat().st_size):
            raise ValueError(f"it declares an unpacked size of {declared / 1e9:.3g} GB, far above its own size")
        read = {name: _read_header(file, name, info) for name, info in infos.items()}
        self._headers = {name: header for name, (header, _) in read.items()}
        self._entries = {name: entry for name, (_, entry) in read.items()}

    def read_array(self, name: str, into: np.ndarray) -> None:
        """See `Archive`."""
        header, entry = self._headers[name], self._entries[name]
        direct = into.flags.c_contiguous and into.dtype == header.dtype and not entry.fortran_order
        raw = into.reshape(-1).view(np.uint8) if direct else self._buffer(into.size * header.dtype.itemsize)
        with read_errors(KIND):
            self._fill(entry, raw.data)
            if not direct:
                values = raw.view(header.dtype)
                copy_values(values.reshape(header.shape[::-1]).T if entry.fortran_order else values, into)

    def _thread_file(self) -> zipfile.ZipFile:
        if not hasattr(self._own, "file"):
            self._own.file = self._closing.enter_context(zipfile.ZipFile(self._path))
        return self._own.file

    def _buffer(self, size: int) -> np.ndarray:
        """Returns `size` bytes of memory that each thread reuses, as allocating them takes as long as filling them."""
        if len(getattr(self._own, "memory", b"")) < size:
            self._own.memory = np.empty(size, np.uint8)
        return self._own.memory[:size]

    def _fill(self, entry: Entry, raw: memoryview) -> None:
        with self._thread_file().open(entry.info) as stream:
            stream.read(entry.start)
            for begin in range(0, len(raw), CHUNK):
                part = raw[begin : begin + CHUNK]
                values = stream.read(len(part))
                if len(values) < len(part):
                    raise EOFError(f"{entry.info.filename} is cut short")
                part[:] = values  # with the last one zipfile compares the checksum


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[NpzArchive]:
    """Opens an .npz file.

    Raises:
        UserError: it is damaged.
    """
    with contextlib.ExitStack() as closing:
        with read_errors(KIND):
            archive = NpzArchive(path, closing)
        yield archive


def write_archive(path: Path, arrays: Mapping[str, Any], dtype: str) -> None:
    """Writes an .npz file of arrays, or of whatever NumPy converts to arrays, one after another and all in `dtype`."""
    with zipfile.ZipFile(path, "w", allowZip64=True) as file:
        for name, array in arrays.items():
            with file.open(f"{name}{SUFFIX}", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, convert_values(array, DTYPES[dtype]), allow_pickle=False)


def _read_header(file: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> tuple[Header, Entry]:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed by a method that NumPy does not use")
    with file.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        parse = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran_order, dtype = parse(stream, max_header_size=MAX_HEADER)
        start = stream.tell()
    if dtype.hasobject:
        raise ValueError(f"{name} contains Python objects; reading them would execute code")
    header = Header(shape, DTYPES["bfloat16"] if dtype.str == BFLOAT16 and not dtype.names else dtype)
    check_header(name, header)
    if info.file_size != start + math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} declares {dtype}{list(shape)}, which contradicts its size")
    return header, Entry(info, start, fortran_order)
