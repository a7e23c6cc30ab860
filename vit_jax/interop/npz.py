"""Reads and writes .npz files: NumPy arrays by name in a zip archive. The file may come from a stranger.

Nothing is unpickled, nothing is unpacked to disk, and the size that an array declares is checked before memory is
allocated.
"""

import contextlib
import math
import os
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax import BUGS, UserError, user_errors

# Weights hardly compress. A file may unpack to this many times its own size, and a small one to this many bytes.
MAX_EXPANSION, ALWAYS_ALLOWED = 4, 2**26
# Far above what a model's file contains: arrays, bytes of a header, dimensions, elements along one dimension.
MAX_ARRAYS, MAX_HEADER, MAX_DIMENSIONS, MAX_LENGTH = 10_000, 1_000, 8, 2**40
FORMATS = "vit_jax reads the .npz files of vit_jax, vision_transformer and big_vision"
CHUNK = 2**20  # bytes read at once: they are still in the processor's cache when their checksum is computed
SUFFIX = ".npy"
# How headers write the dtypes of weights; NumPy has no name for bfloat16.
DTYPES = {"<f2": np.float16, "<f4": np.float32, "<f8": np.float64, "|V2": jax.dtypes.bfloat16}


class Header(NamedTuple):
    """What the header of an array declares."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran_order: bool  # the first index varies fastest
    start: int  # bytes before the values

    @property
    def is_weights(self) -> bool:
        """Tells whether the dtype is one in which weights are stored."""
        return self.dtype in map(np.dtype, DTYPES.values())


class Archive(Mapping[str, Header]):
    """The arrays of an open .npz file: a mapping from names to headers. `read_array` reads the values."""

    def __init__(self, path: Path, file: zipfile.ZipFile):
        self.path = path
        self._file = file
        self._entries: dict[str, zipfile.ZipInfo] = {}
        self._headers: dict[str, Header] = {}
        self._spare = threading.local()
        if len(file.infolist()) > MAX_ARRAYS:
            raise ValueError(f"it contains {len(file.infolist()):,} arrays, more than any model has")
        for entry in file.infolist():
            if not entry.filename.endswith(SUFFIX):
                raise ValueError(f"it contains {entry.filename}, which is not an array; {FORMATS}")
            name = entry.filename.removesuffix(SUFFIX)
            if name in self._entries:
                raise ValueError(f"it contains two arrays named {name}")
            self._entries[name] = entry
        declared = sum(entry.file_size for entry in self._entries.values())
        if declared > max(ALWAYS_ALLOWED, MAX_EXPANSION * path.stat().st_size):
            raise ValueError(f"it declares an unpacked size of {declared / 1e9:.3g} GB, far above its own size")
        for name, entry in self._entries.items():
            self._headers[name] = _read_header(file, name, entry)

    def __getitem__(self, name: str) -> Header:
        return self._headers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)

    def read_array(self, name: str, into: np.ndarray) -> None:
        """Reads an array into one with as many elements; dtype, strides and dimensions of 1 may differ.

        Several threads may read at once.

        Raises:
            UserError: the file is damaged.
        """
        header = self._headers[name]
        direct = into.flags.c_contiguous and into.dtype == header.dtype and not header.fortran_order
        raw = into.reshape(-1).view(np.uint8) if direct else self._buffer(into.size * header.dtype.itemsize)
        with _read_errors():
            self._fill(self._entries[name], header.start, raw.data)
            if not direct:
                values = raw.view(header.dtype)
                shaped = values.reshape(header.shape[::-1]).T if header.fortran_order else values
                with np.errstate(over="raise"):
                    np.copyto(into, shaped.reshape(into.shape), casting="same_kind")

    def _buffer(self, size: int) -> np.ndarray:
        """Returns memory that a thread reuses: allocating it takes as long as filling it."""
        if len(getattr(self._spare, "memory", b"")) < size:
            self._spare.memory = np.empty(size, np.uint8)
        return self._spare.memory[:size]

    def _fill(self, entry: zipfile.ZipInfo, start: int, raw: memoryview) -> None:
        if entry.compress_type == zipfile.ZIP_STORED:
            return self._fill_stored(entry, start, raw)
        with self._file.open(entry) as stream:
            stream.read(start)
            for begin in range(0, len(raw), CHUNK):
                part = stream.read(min(CHUNK, len(raw) - begin))
                if len(part) < min(CHUNK, len(raw) - begin):
                    raise EOFError(f"{entry.filename} is cut short")
                raw[begin : begin + len(part)] = part
            if stream.read(1):  # at the end zipfile compares the checksum
                raise ValueError(f"{entry.filename} is longer than it declares")

    def _fill_stored(self, entry: zipfile.ZipInfo, start: int, raw: memoryview) -> None:
        """Reads an uncompressed entry without `zipfile`, which copies each part and has one open file for all threads.

        This is why the entry's header is parsed here: two threads read 0.35 GB in 0.10 s instead of 0.16 s at best, in
        0.9 times the time in the median (15 rounds in turn, two busy cores).
        """
        with self.path.open("rb") as file:
            file.seek(entry.header_offset)
            name, extra = struct.unpack("<26x2H", file.read(30))  # lengths of two fields before the content
            file.seek(name + extra, os.SEEK_CUR)
            checksum = zlib.crc32(file.read(start))
            for begin in range(0, len(raw), CHUNK):
                part = raw[begin : begin + CHUNK]
                if file.readinto(part) != len(part):
                    raise EOFError(f"{entry.filename} is cut short")
                checksum = zlib.crc32(part, checksum)
        if checksum != entry.CRC:
            raise ValueError(f"Bad CRC-32 for file {entry.filename!r}")


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Opens an .npz file.

    Raises:
        UserError: it is not an .npz file, or it is damaged.
    """
    with contextlib.ExitStack() as stack:
        if not zipfile.is_zipfile(path):
            raise UserError(f"is not an .npz file; {FORMATS}")
        with _read_errors():
            archive = Archive(path, stack.enter_context(zipfile.ZipFile(path)))
        yield archive


def write_archive(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes an .npz file, array by array, from arrays or whatever NumPy converts to arrays."""
    with zipfile.ZipFile(path, "w", allowZip64=True) as file:
        for name, array in arrays.items():
            with file.open(f"{name}{SUFFIX}", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.ascontiguousarray(array), allow_pickle=False)


def _read_errors() -> AbstractContextManager[None]:
    """Turns all errors into UserErrors: a damaged file may cause any error in `zipfile` and in NumPy."""
    return user_errors("cannot be read as an .npz file", Exception, *BUGS)


def _read_header(file: zipfile.ZipFile, name: str, entry: zipfile.ZipInfo) -> Header:
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed by a method that NumPy does not use")
    with file.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        parse = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran_order, dtype = parse(stream, max_header_size=MAX_HEADER)
        start = stream.tell()
    if dtype.hasobject:
        raise ValueError(f"{name} contains Python objects; reading them would execute code")
    if len(shape) > MAX_DIMENSIONS or max(shape, default=0) > MAX_LENGTH:
        raise ValueError(f"{name} has a shape that no array of a model has")
    if min(shape, default=0) < 0 or entry.file_size != start + math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} declares {dtype}{list(shape)}, which contradicts its size")
    known = dtype if dtype.names else DTYPES.get(dtype.str, dtype)
    return Header(shape, np.dtype(known), fortran_order, start)
