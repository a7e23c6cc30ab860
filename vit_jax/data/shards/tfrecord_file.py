"""A TFRecord file, read record by record.

A record is its length (uint64), the checksum of the length, its bytes, and their checksum; numbers are little-endian.
A checksum is a CRC-32C that is rotated right by 15 bits, plus a constant. So it is sound also for data that contain
checksums (TensorFlow, `tensorflow/core/lib/hash/crc32c.h`). The file has no index: the lengths of its records are read
one after the other when it is opened, which takes 1.5 microseconds a record.
"""

import array
import functools
import io
import os
import struct

import google_crc32c

from vit_jax import UserError, user_errors

MAX_INDEXED = 4096  # files per process whose indices are kept: of 1,000 records each, 8 kB a file
HEAD, TAIL = struct.Struct("<QI"), struct.Struct("<I")
MASK_DELTA = 0xA282EAD8
ADVICE = "copy or prepare it again"


class TFRecordFile:
    """A `ShardReader` whose records are byte strings."""

    def __init__(self, path: str, local: str):
        """Opens the file `local`, which is `path` itself or a local copy of it; error messages name `path`.

        Raises:
            UserError: the file is truncated or not a TFRecord file.
        """
        with user_errors(f"cannot read {path}"):
            self._file = io.FileIO(local)
            status = os.fstat(self._file.fileno())
        self._starts = record_starts(path, local, status.st_size, status.st_mtime_ns)

    def num_records(self) -> int:
        """Returns the number of records."""
        return len(self._starts) - 1

    def read(self, row: int) -> bytes:
        """Returns a record; raises ValueError, with the offset in the file, if its checksum fails."""
        start, end = self._starts[row : row + 2]
        stored = os.pread(self._file.fileno(), end - start, start)
        record = stored[HEAD.size : -TAIL.size]
        if len(stored) != end - start or masked_checksum(record) != TAIL.unpack(stored[-TAIL.size :])[0]:
            raise ValueError(f"its checksum, at byte {end - TAIL.size} of the file, fails")
        return record


@functools.lru_cache(MAX_INDEXED)
def record_starts(path: str, local: str, size: int, modified: int) -> "array.array[int]":
    """Returns the offset at which each record of a file begins, and the offset at which the last record ends.

    The index is kept for later calls, also when the file is closed: a process may keep more indices than open files.

    Args:
        path: the path of the file, for error messages.
        local: the path at which it is read: the same, or that of a local copy.
        size: its size in bytes.
        modified: its modification time in nanoseconds, which tells files that replaced each other apart.

    Raises:
        UserError: the file is truncated or not a TFRecord file.
    """
    starts = array.array("q", [0])
    with user_errors(f"cannot read {path}"), io.FileIO(local) as file:
        while (start := starts[-1]) < size:
            head = os.pread(file.fileno(), HEAD.size, start)
            if len(head) == HEAD.size:
                length, checksum = HEAD.unpack(head)
                if masked_checksum(head[:8]) != checksum:
                    raise UserError(
                        f"cannot read {path}: it is damaged or not a TFRecord file (the checksum at byte "
                        f"{start + 8} is wrong); {ADVICE}"
                    )
                end = start + HEAD.size + length + TAIL.size
            if len(head) < HEAD.size or end > size:
                cut = f"the record at byte {start} does not end within the {size} bytes of the file"
                raise UserError(f"{path} is truncated: {cut}; {ADVICE}")
            starts.append(end)
    return starts


def masked_checksum(content: bytes) -> int:
    """Returns the checksum of some bytes, as TFRecord files state it."""
    checksum = google_crc32c.value(content)
    return ((checksum >> 15 | checksum << 17) + MASK_DELTA) & 0xFFFFFFFF
