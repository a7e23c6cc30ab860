"""Files of arrays by name: .npz files, .safetensors files, and several .safetensors files with an index.

A file may come from a stranger. Nothing is unpickled or unpacked to disk, and the size that an array declares is
checked before memory is allocated. The library of .safetensors files checks that the arrays fill the file without
overlap; the size of the header, which it parses, and the size and the names of an index are limited here.
"""

import abc
import contextlib
import json
import math
import re
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors
import safetensors.numpy

from vit_jax import BUGS, UserError, user_errors

# Far above what a model's file contains: arrays, dimensions, elements along one dimension.
MAX_ARRAYS, MAX_DIMENSIONS, MAX_LENGTH = 10_000, 8, 2**40
WRITTEN_DTYPES = ("float32", "float16", "bfloat16")
DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")}
DTYPES["bfloat16"] = np.dtype(jax.dtypes.bfloat16)
# Weights hardly compress. A file may unpack to this many times its own size, and a small one to this many bytes.
MAX_EXPANSION, ALWAYS_ALLOWED = 4, 2**26
MAX_NPY_HEADER = 1_000  # bytes
FORMATS = "vit_jax reads the .npz files of vit_jax, vision_transformer and big_vision, and .safetensors files"
CHUNK = 2**20  # bytes read at once: they are still in the processor's cache when they are copied
NPY = ".npy"
NPY_BFLOAT16 = "|V2"  # as headers write it: NumPy has no name for it
NPZ_KIND = "an .npz file"
SAFETENSORS = ".safetensors"
INDEX = f"{SAFETENSORS}.index.json"  # the end of the name of an index
MAX_SAFETENSORS_HEADER, MAX_INDEX = 2**22, 2**22  # bytes
MAX_SHARDS = 1_000
# The format's words for dtypes. Weights are never stored as integers: only messages and buffers mention these.
DTYPE_WORDS = {"F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16"}
DTYPE_WORDS |= {"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U8": "uint8", "BOOL": "bool"}
SAFETENSORS_KIND = f"a {SAFETENSORS} file"


class Header(NamedTuple):
    """The declaration of an array in a file: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def is_weights(self) -> bool:
        """Tells whether the dtype is one in which weights are stored."""
        return self.dtype in DTYPES.values()


class Archive(Mapping[str, Header]):
    """The arrays of an open file: a mapping from names to headers. `read_array` reads the values.

    Attributes:
        notes: key -> text, for the notes that the file contains beside the arrays.
    """

    _headers: dict[str, Header]
    notes: Mapping[str, str] = MappingProxyType({})

    def __getitem__(self, name: str) -> Header:
        return self._headers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)

    def name_in_file(self, name: str) -> str:
        """Returns the name of an array for messages: the one that it has in the file, or would have if it was there."""
        return name

    def shape_of(self, name: str, dimensions: int | None = None) -> tuple[int, ...]:
        """Returns the shape of an array from which fields of a model are inferred.

        Raises:
            UserError: the array has fewer than two dimensions, or another number than `dimensions`, or no elements.
        """
        shape = self[name].shape
        if len(shape) < 2 or not min(shape) or len(shape) != (dimensions or len(shape)):
            raise UserError(
                f"{self.name_in_file(name)} has the shape {list(shape)}, from which no field can be inferred"
            )
        return shape

    def check_present(self, names: Iterable[str]) -> None:
        """Raises UserError if an array is missing that every file with such a model has."""
        if missing := [self.name_in_file(name) for name in names if name not in self]:
            raise UserError(f"the model cannot be inferred, since arrays are missing: {', '.join(missing)}")

    @abc.abstractmethod
    def read_array(self, name: str, into: np.ndarray) -> None:
        """Reads an array of the file into `into`, which must have as many elements.

        The dtype, the strides and dimensions of 1 may differ. Several threads may read at once.

        Raises:
            UserError: the file is damaged.
        """


def check_header(name: str, header: Header) -> None:
    """Raises ValueError for a shape that no array of a model has."""
    shape = header.shape
    if len(shape) > MAX_DIMENSIONS or not all(0 <= side <= MAX_LENGTH for side in shape):
        raise ValueError(f"{name} has a shape that no array of a model has")


def check_count(count: int) -> None:
    """Raises ValueError for more arrays than any model has."""
    if count > MAX_ARRAYS:
        raise ValueError(f"it contains {count:,} arrays, more than any model has")


def copy_values(values: np.ndarray, into: np.ndarray) -> None:
    """Copies the values of a file into the array `into`, which must have as many elements.

    Raises:
        FloatingPointError: a value is beyond the range of the dtype of `into`.
    """
    with np.errstate(over="raise"):
        np.copyto(into, values.reshape(into.shape), casting="same_kind")


def convert_values(array: Any, dtype: np.dtype) -> np.ndarray:
    """Returns an array, or whatever NumPy converts to one, in a dtype and in C order.

    Raises:
        FloatingPointError: a value is beyond the range of the dtype.
    """
    with np.errstate(over="raise"):
        return np.asarray(array).astype(dtype, order="C", copy=False)


def read_errors(kind: str) -> AbstractContextManager[None]:
    """Turns all errors into UserErrors: a damaged file may cause any error in a format's library and in NumPy.

    Args:
        kind: the kind of file, with its article: `an .npz file`.
    """
    return user_errors(f"cannot be read as {kind}", Exception, *BUGS)


class RenamedArchive(Archive):
    """The arrays of another archive by new names, without those that are left out."""

    def __init__(self, archive: Archive, new_name: Callable[[str], str | None], old_name: Callable[[str], str]):
        """Renames the arrays of an archive.

        Args:
            archive: the archive with the names of a file.
            new_name: returns the new name of an array; None: it is left out.
            old_name: returns the name in the file that an array with a new name would have. It is asked only for arrays
                that the file lacks.

        Raises:
            UserError: two arrays get the same name.
        """
        self._archive, self._old_name, self.notes = archive, old_name, archive.notes
        self._names: dict[str, str] = {}
        for old in archive:
            new = new_name(old)
            if new in self._names:
                raise UserError(
                    f"it contains both {self._names[new]} and {old}, of which only one can be meant; leave out one"
                )
            if new is not None:
                self._names[new] = old
        self._headers = {new: archive[old] for new, old in self._names.items()}

    def read_array(self, name: str, into: np.ndarray) -> None:
        """Reads an array by its new name; see `Archive`."""
        self._archive.read_array(self._names[name], into)

    def name_in_file(self, name: str) -> str:
        """See `Archive`."""
        return self._names.get(name) or self._old_name(name)


# What PyTorch puts into names for torch.compile, FSDP and activation checkpointing, of a model or of a part of it.
WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def unwrapped(archive: Archive) -> Archive:
    """Returns the arrays of a file without the prefix that all names share, and without what `WRAPPERS` match.

    A prefix says only what the model was a part of when it was saved: `model.`, `backbone.`, `state_dict_ema.module.`.

    Raises:
        UserError: two arrays get the same name.
    """
    names, prefix = [WRAPPERS.sub("", name) for name in archive], ""
    first, last = min(names, default=""), max(names, default="")  # what these two begin with, all begin with
    for part in first.split(".")[:-1]:
        if not last.startswith(f"{prefix}{part}."):
            break
        prefix += f"{part}."
    return RenamedArchive(archive, lambda name: WRAPPERS.sub("", name).removeprefix(prefix), lambda name: name)


def open_archive(path: Path) -> AbstractContextManager[Archive]:
    """Opens the arrays of a file: .npz, .safetensors, or the index of several .safetensors files.

    Raises:
        UserError: it is none of these, or it is damaged.
    """
    if zipfile.is_zipfile(path):
        return _open_npz(path)
    with path.open("rb") as file:
        start = file.read(9)
    if start[8:9] == b"{":  # after a length of 8 bytes, JSON
        return _open_safetensors(path)
    if path.name.endswith(INDEX):
        return _open_shards(path)
    raise UserError(f"is not an .npz or .safetensors file; {FORMATS}")


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
            _write_npz(temporary, arrays, dtype)
        else:
            _write_safetensors(temporary, arrays, dtype, notes)


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
            if not info.filename.endswith(NPY):
                raise ValueError(f"it contains {info.filename}, which is not an array; {FORMATS}")
            name = info.filename.removesuffix(NPY)
            if name in infos:
                raise ValueError(f"it contains two arrays named {name}")
            infos[name] = info
        declared = sum(info.file_size for info in infos.values())
        if declared > max(ALWAYS_ALLOWED, MAX_EXPANSION * path.stat().st_size):
            raise ValueError(f"it declares an unpacked size of {declared / 1e9:.3g} GB, far above its own size")
        read = {name: _read_npy_header(file, name, info) for name, info in infos.items()}
        self._headers = {name: header for name, (header, _) in read.items()}
        self._entries = {name: entry for name, (_, entry) in read.items()}

    def read_array(self, name: str, into: np.ndarray) -> None:
        """See `Archive`."""
        header, entry = self._headers[name], self._entries[name]
        direct = into.flags.c_contiguous and into.dtype == header.dtype and not entry.fortran_order
        raw = into.reshape(-1).view(np.uint8) if direct else self._buffer(into.size * header.dtype.itemsize)
        with read_errors(NPZ_KIND):
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
def _open_npz(path: Path) -> Iterator[NpzArchive]:
    """Opens an .npz file.

    Raises:
        UserError: it is damaged.
    """
    with contextlib.ExitStack() as closing:
        with read_errors(NPZ_KIND):
            archive = NpzArchive(path, closing)
        yield archive


def _write_npz(path: Path, arrays: Mapping[str, Any], dtype: str) -> None:
    """Writes an .npz file of arrays, or of whatever NumPy converts to arrays, one after another and all in `dtype`."""
    with zipfile.ZipFile(path, "w", allowZip64=True) as file:
        for name, array in arrays.items():
            with file.open(f"{name}{NPY}", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, convert_values(array, DTYPES[dtype]), allow_pickle=False)


def _read_npy_header(file: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> tuple[Header, Entry]:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed by a method that NumPy does not use")
    with file.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        parse = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran_order, dtype = parse(stream, max_header_size=MAX_NPY_HEADER)
        start = stream.tell()
    if dtype.hasobject:
        raise ValueError(f"{name} contains Python objects; reading them would execute code")
    header = Header(shape, DTYPES["bfloat16"] if dtype.str == NPY_BFLOAT16 and not dtype.names else dtype)
    check_header(name, header)
    if info.file_size != start + math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} declares {dtype}{list(shape)}, which contradicts its size")
    return header, Entry(info, start, fortran_order)


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
        with read_errors(SAFETENSORS_KIND):
            copy_values(self._file_of[name].get_tensor(name), into)


@contextlib.contextmanager
def _open_safetensors(path: Path) -> Iterator[SafetensorsArchive]:
    """Opens a .safetensors file.

    Raises:
        UserError: it is damaged.
    """
    with contextlib.ExitStack() as stack:
        with read_errors(SAFETENSORS_KIND):
            file = _open_safetensors_file(path, stack)
            archive = SafetensorsArchive({path: file})
            archive.notes = file.metadata() or {}
        yield archive


@contextlib.contextmanager
def _open_shards(path: Path) -> Iterator[SafetensorsArchive]:
    """Opens the .safetensors files that an index in the same folder names.

    Raises:
        UserError: the index or a file is damaged, or a file is missing.
    """
    with contextlib.ExitStack() as stack:
        with read_errors(f"an index of {SAFETENSORS} files"):
            shard_of = _read_index(path)
            missing = [name for name in sorted(set(shard_of.values())) if not (path.parent / name).is_file()]
            if missing:
                raise ValueError(f"{', '.join(missing)} must be in the same folder")
        files = {}
        for name in sorted(set(shard_of.values())):
            with read_errors(f"{SAFETENSORS_KIND} ({name})"):
                files[path.parent / name] = _open_safetensors_file(path.parent / name, stack)
        with read_errors(f"an index of {SAFETENSORS} files"):
            archive = SafetensorsArchive(files)
            wrong = set(archive) ^ set(shard_of)
            if wrong:
                raise ValueError(f"index and files differ in the array {min(wrong)}")
        yield archive


def _read_index(path: Path) -> dict[str, str]:
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
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(SAFETENSORS):
            raise ValueError(f"it names {name!r}, which is not the name of a {SAFETENSORS} file beside it")
    if len(set(shard_of.values())) > MAX_SHARDS:
        raise ValueError(f"it names more than {MAX_SHARDS:,} files")
    return shard_of


def _open_safetensors_file(path: Path, stack: contextlib.ExitStack) -> Any:
    """Opens a file by the library, and closes it when `stack` ends.

    Values are read, not mapped into memory: this process would be killed if another one cut a mapped file short.

    Raises:
        ValueError: the header is too large.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_SAFETENSORS_HEADER:
        raise ValueError(f"its header of {length:,} bytes is larger than any model's")
    return stack.enter_context(safetensors.safe_open(path, "np", backend="pread"))


def _write_safetensors(
    path: Path, arrays: Mapping[str, Any], dtype: str, notes: Mapping[str, str] | None = None
) -> None:
    """Writes a .safetensors file of arrays, or of whatever NumPy converts to arrays, all in `dtype`, and of notes."""
    values = {name: convert_values(array, DTYPES[dtype]) for name, array in arrays.items()}
    # PyTorch's libraries refuse a file that does not state that its arrays are in their order of dimensions.
    safetensors.numpy.save_file(values, path, metadata={"format": "pt", **(notes or {})})
