"""An npz as what it is: arrays by name in a zip file, which whoever has it may have made.

Nothing is unpickled, nothing is unpacked to disk, and what an array says of its size is checked before memory is taken.
"""

import contextlib
import math
import os
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax import UserError

# Weights hardly compress. A file may say that it holds this many times its own size, and small ones this much.
EXPANSION, FLOOR = 4, 2**26
# Far more than any model's file has: arrays, bytes of a header, dimensions, elements along one of them.
ARRAYS, HEADER, DIMENSIONS, LONGEST = 10_000, 1_000, 8, 2**40
READ = "those of vit_jax, vision_transformer and big_vision are read, not other formats"
CHUNK = 2**20  # bytes read at once, few enough to stay in the processor's cache until they are checked
SUFFIX = ".npy"
# How the dtypes of weights are written; NumPy has no word for bfloat16.
DTYPES = {"<f2": np.float16, "<f4": np.float32, "<f8": np.float64, "|V2": jax.dtypes.bfloat16}


class Header(NamedTuple):
    """What an array says of itself."""

    shape: tuple[int, ...]
    dtype: np.dtype
    columns_first: bool  # the first index runs fastest
    start: int  # bytes before the values

    @property
    def is_weights(self) -> bool:
        """Tells whether the values are numbers that weights are kept in."""
        return self.dtype in map(np.dtype, DTYPES.values())


class Archive(Mapping[str, Header]):
    """The arrays of an open npz: headers by name; values when asked for."""

    def __init__(self, path: Path, file: zipfile.ZipFile):
        self.path = path
        self._file = file
        self._entries: dict[str, zipfile.ZipInfo] = {}
        self._headers: dict[str, Header] = {}
        self._spare = threading.local()
        if len(file.infolist()) > ARRAYS:
            raise ValueError(f"it holds {len(file.infolist()):,} arrays, which no model has")
        for entry in file.infolist():
            if not entry.filename.endswith(SUFFIX):
                raise ValueError(f"it holds {entry.filename}, which is no array; {READ}")
            name = entry.filename.removesuffix(SUFFIX)
            if name in self._entries:
                raise ValueError(f"it holds two arrays called {name}")
            self._entries[name] = entry
        declared = sum(entry.file_size for entry in self._entries.values())
        if declared > max(FLOOR, EXPANSION * path.stat().st_size):
            raise ValueError(f"it says that it unpacks to {declared / 1e9:.3g} GB, which no such file of weights does")
        for name, entry in self._entries.items():
            self._headers[name] = _header(file, name, entry)

    def __getitem__(self, name: str) -> Header:
        return self._headers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)

    def read(self, name: str, into: np.ndarray) -> None:
        """Reads an array into one with as many elements, whatever its dtype, dimensions of 1 and strides.

        Several threads may read at once.

        Raises:
            UserError: the file is damaged.
        """
        header = self._headers[name]
        straight = into.flags.c_contiguous and into.dtype == header.dtype and not header.columns_first
        raw = into.reshape(-1).view(np.uint8) if straight else self._buffer(into.size * header.dtype.itemsize)
        with _told():
            self._fill(self._entries[name], header.start, raw.data)
        if not straight:
            values = raw.view(header.dtype)
            shaped = values.reshape(header.shape[::-1]).T if header.columns_first else values
            with _told(), np.errstate(over="raise"):
                np.copyto(into, shaped.reshape(into.shape), casting="same_kind")

    def _buffer(self, size: int) -> np.ndarray:
        """Returns memory that a thread uses again and again: to get it from the system takes as long as to fill it."""
        if len(getattr(self._spare, "memory", b"")) < size:
            self._spare.memory = np.empty(size, np.uint8)
        return self._spare.memory[:size]

    def _fill(self, entry: zipfile.ZipInfo, start: int, raw: memoryview) -> None:
        if entry.compress_type == zipfile.ZIP_STORED:
            return self._fill_straight(entry, start, raw)
        with self._file.open(entry) as stream:
            stream.read(start)
            for begin in range(0, len(raw), CHUNK):
                part = stream.read(min(CHUNK, len(raw) - begin))
                if len(part) < min(CHUNK, len(raw) - begin):
                    raise EOFError(f"{entry.filename} is cut short")
                raw[begin : begin + len(part)] = part
            if stream.read(1):  # at the end the checksum is compared
                raise ValueError(f"{entry.filename} is longer than it says")

    def _fill_straight(self, entry: zipfile.ZipInfo, start: int, raw: memoryview) -> None:
        """Reads what is stored as it is without the copies that `zipfile` makes."""
        with self.path.open("rb") as file:
            file.seek(entry.header_offset)
            name, extra = struct.unpack("<26x2H", file.read(30))  # lengths of what follows in front of the content
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
    """Opens an npz.

    Raises:
        UserError: it is none, or it is damaged.
    """
    with contextlib.ExitStack() as stack:
        if not zipfile.is_zipfile(path):
            raise UserError(f"is no npz; {READ}")
        with _told():
            archive = Archive(path, stack.enter_context(zipfile.ZipFile(path)))
        yield archive


def write(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays, or what NumPy makes arrays of, into an npz, one after the other."""
    with zipfile.ZipFile(path, "w", allowZip64=True) as file:
        for name, array in arrays.items():
            with file.open(f"{name}{SUFFIX}", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.ascontiguousarray(array), allow_pickle=False)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a file to write, which takes the place of `path` when all is written, and is gone otherwise.

    Raises:
        UserError: it cannot be written.
    """
    # Of this thread's own: others may write the same.
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        yield partial
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Makes a sentence of whatever the readers of zip files and of NumPy's headers find wrong, in many ways."""
    try:
        yield
    except Exception as error:
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise UserError(f"cannot be read as an npz: {reason}") from error


def _header(file: zipfile.ZipFile, name: str, entry: zipfile.ZipInfo) -> Header:
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed in a way that NumPy does not use")
    with file.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        parse = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, columns_first, dtype = parse(stream, max_header_size=HEADER)
        start = stream.tell()
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which would have to be run")
    if len(shape) > DIMENSIONS or max(shape, default=0) > LONGEST:
        raise ValueError(f"{name} has a shape that no array of a model has")
    if min(shape, default=0) < 0 or entry.file_size != start + math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} says that it is {dtype}{list(shape)}, which is not its size")
    known = dtype if dtype.names else DTYPES.get(dtype.str, dtype)
    return Header(shape, np.dtype(known), columns_first, start)
