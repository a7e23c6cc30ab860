"""Parquet files: images, read by row group, and arrays, read and written whole.

A row group is decoded when one of its rows is read, and kept in memory for a while.
"""

import bisect
import collections
import io
import json
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from vit_jax import UserError, reason
from vit_jax.storage import Version, filesystem

if TYPE_CHECKING:
    import pyarrow as pa

KEPT_BYTES = 2**27  # of decoded row groups that a process keeps, also after their files are closed
FOOTER = 2**16  # bytes at the end of a remote file that are read first
ADVICE = "copy or write it again"

Column: TypeAlias = list[Any] | np.ndarray

_kept: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()  # the last used at the end
_changing = threading.Lock()


class Footer(NamedTuple):
    """The facts about a Parquet file that its last bytes, the footer, state.

    Attributes:
        rows: the number of rows.
        columns: name of a column -> the names of the fields of its values; empty if these are not nested.
        texts: the names of the columns whose values are texts, or lists of texts.
        facts: name -> text of what else the file states, such as the JSON description of the columns that the library
            `datasets` leaves as `huggingface`.
    """

    rows: int
    columns: Mapping[str, tuple[str, ...]]
    texts: frozenset[str]
    facts: Mapping[bytes, bytes]


class ParquetFile:
    """A `ShardReader` whose records are rows; a row is a dict, name of a column -> value."""

    def __init__(self, path: str, local: str):
        """Opens the file `local`, which is `path` itself or a local copy of it; error messages name `path`.

        Raises:
            UserError: the file is truncated or not a Parquet file.
        """
        import pyarrow as pa  # here, since it takes 0.14 s
        import pyarrow.parquet as pq

        try:
            # Without a memory map, in which a file that becomes shorter would end the process by SIGBUS.
            self._file = pq.ParquetFile(local, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(path, error) from error
        self._ends = [0]
        for group in range(self._file.num_row_groups):
            self._ends.append(self._ends[-1] + self._file.metadata.row_group(group).num_rows)
        self._name, self._reading = object(), threading.Lock()  # pyarrow's readers are not shared by threads

    def num_records(self) -> int:
        """Returns the number of rows."""
        return self._ends[-1]

    def read(self, row: int, columns: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns the values of a row in some columns, or in all; raises ValueError if its group is damaged."""
        group = bisect.bisect_right(self._ends, row) - 1
        with self._reading:
            table = self._read_group(group, columns)
        [values] = table.slice(row - self._ends[group], 1).to_pylist()
        return values

    def _read_group(self, group: int, columns: Sequence[str] | None) -> Any:
        import pyarrow as pa

        key = (self._name, group, columns and tuple(columns))
        with _changing:
            if key in _kept:
                _kept.move_to_end(key)
                return _kept[key]
        try:
            table = self._file.read_row_group(group, columns=columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"its row group {group} is damaged ({reason(error)})") from error
        with _changing:
            _kept[key] = table
            while len(_kept) > 1 and sum(one.nbytes for one in _kept.values()) > KEPT_BYTES:
                _kept.popitem(last=False)
        return table


def read_footer(path: str, size: int | None) -> Footer:
    """Returns what the end of a file states. Only the end is read, also of a remote file.

    Args:
        path: the path of the file, local or remote.
        size: its size in bytes; may be None only for a local file.

    Raises:
        UserError: the file is truncated or not a Parquet file, has two columns of one name, or its store does not give
            it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(io.BytesIO(_read_end(path, size)) if filesystem.is_remote(path) else path)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from error
    schema = metadata.schema.to_arrow_schema()
    if repeated := [name for name in schema.names if schema.names.count(name) > 1]:
        raise UserError(f"{path} has two columns {repeated[0]}; give each column a name of its own and write it again")
    columns = {
        field.name: tuple(field.type.field(number).name for number in range(field.type.num_fields)) for field in schema
    }
    texts = frozenset(field.name for field in schema if _contains_texts(field.type))
    return Footer(metadata.num_rows, columns, texts, metadata.metadata or {})


def _contains_texts(type: "pa.DataType") -> bool:
    """Returns whether values of an Arrow type are texts, or lists of texts; also if each text is stored once."""
    import pyarrow.types as kinds

    while kinds.is_list(type) or kinds.is_large_list(type) or kinds.is_dictionary(type):
        type = type.value_type
    return kinds.is_string(type) or kinds.is_large_string(type) or kinds.is_string_view(type)


def read_distinct_texts(path: str, column: str, version: Version | None = None) -> set[str]:
    """Returns the texts in a column of texts or of lists of texts, each once, without nulls.

    Args:
        path: the path of the file; a remote file is copied into the cache.
        column: the name of the column.
        version: the version of a remote file that is wanted; None: the present one.

    Raises:
        UserError: the file is damaged, or its store does not give it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts: set[str] = set()
    try:
        file = pq.ParquetFile(filesystem.local_copy(path, version=version), page_checksum_verification=True)
        for batch in file.iter_batches(columns=[column]):
            values = batch.column(0)
            while pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
                values = values.flatten()
            texts |= {text for text in values.unique().to_pylist() if text is not None}
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from error
    return texts


def encode_columns(
    columns: Mapping[str, Column], present: Bool[np.ndarray, " rows"], facts: Mapping[str, str]
) -> bytes:
    """Returns a Parquet file.

    An array of more than one dimension becomes a column of lists of a fixed size, whose field states the `shape` of a
    value and its `dtype`. Parquet has no bfloat16: its bits are written as uint16.

    Args:
        columns: name -> a list, of which None is null, or an array [rows, ...].
        present: which rows of arrays of more than one dimension are not null.
        facts: name -> text of what the end of the file is to state, see `Footer.facts`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields, arrays, vectors = [], [], []
    for name, values in columns.items():
        described = {}
        if isinstance(values, list) or values.ndim == 1:
            column = pa.array(values)
        else:
            described = {"dtype": str(values.dtype), "shape": str(list(values.shape[1:]))}
            plain = values.reshape(len(values), -1)
            plain = plain.view(np.uint16) if described["dtype"] == "bfloat16" else plain
            absent = None if present.all() else pa.array(~present)
            column = pa.FixedSizeListArray.from_arrays(pa.array(plain.ravel()), plain.shape[1], mask=absent)
            vectors.append(name)
        fields.append(pa.field(name, column.type, metadata=described))
        arrays.append(column)
    table = pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=dict(facts)))
    file = pa.BufferOutputStream()
    repeated = [name for name in columns if name not in vectors]
    pq.write_table(table, file, compression="zstd", use_dictionary=repeated, write_page_checksum=True)
    return file.getvalue().to_pybytes()


def read_columns(path: str, names: Sequence[str]) -> dict[str, Column]:
    """Returns name -> values of columns of a file that `encode_columns` has made, local or remote.

    Values are as they were given, but columns of lists of a fixed size lack the rows that are null.

    Raises:
        UserError: the file is damaged, lacks a column, or its store does not give it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Column] = {}
    try:
        table = pq.read_table(filesystem.local_copy(path), columns=list(names), page_checksum_verification=True)
        for name in names:
            field, column = table.schema.field(name), table.column(name).combine_chunks()
            if not pa.types.is_fixed_size_list(field.type):
                columns[name] = column.to_pylist()
                continue
            described = field.metadata or {}
            values = column.flatten().to_numpy(zero_copy_only=False)
            dtype = jnp.dtype(described[b"dtype"].decode())
            columns[name] = values.view(dtype).reshape(-1, *json.loads(described[b"shape"]))
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        raise unreadable(path, error) from error
    return columns


def _read_end(path: str, size: int | None) -> bytes:
    assert size is not None
    end = filesystem.read_range(path, max(size - FOOTER, 0), size)
    length = 8 + int.from_bytes(end[-8:-4], "little")
    return filesystem.read_range(path, size - length, size) if len(end) < length <= size else end


def unreadable(path: str, error: Exception) -> UserError:
    """Returns the error of a file that is truncated or not a Parquet file."""
    return UserError(f"cannot read {path}: it is truncated or not a Parquet file ({reason(error)}); {ADVICE}")
