"""ArrayRecord files: their names, reading of single records, and writing."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator

from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from vit_jax import UserError
from vit_jax.data.shards import tf_example
from vit_jax.storage import atomic_write

SHARD_NAME = re.compile(r"(?P<split>.+)-(?P<number>\d{5,})-of-(?P<total>\d{5,})\.array_record")

# A record is compressed already, and read alone. Measured on photographs of 110 KB: 39,000 random reads a second (of
# cached files, one core), 33,000 with zstd, which saves 0.6 % of the bytes, 3,200 in groups of 16. Records of 2.5 KB
# (in the same order): 21,000, 21,000 (9 % saved), 80,000; there decoding takes longer than reading. Pixels of 258 KB:
# 14,000, 6,100 with snappy (12 % saved), 4,200 with zstd:3 (23 %); reading as many bytes without a checksum, 38,000.
WRITER_OPTIONS = "group_size:1,uncompressed"
READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # as ArrayRecord recommends for random access


class ArrayRecordFile:
    """A `ShardReader` whose records are byte strings."""

    def __init__(self, path: str, local: str):
        """Opens the file `local`, which is `path` itself or a local copy of it; error messages name `path`.

        Raises:
            UserError: the file is truncated or not an ArrayRecord file.
        """
        self._reader = ArrayRecordReader(os.fsencode(local), READER_OPTIONS)
        if not self._reader.ok():
            try:
                self._reader.close()
            except RuntimeError as error:  # only closing the reader gives the reason
                raise UserError(
                    f"cannot read {path}: it is truncated or not an ArrayRecord file "
                    f"({str(error).partition(';')[0]}); copy or pack it again"
                ) from None

    def num_records(self) -> int:
        """Returns the number of records."""
        return self._reader.num_records()

    def read(self, row: int) -> bytes:
        """Returns a record; raises ValueError if it is damaged."""
        try:
            [record] = self._reader.read([row])
        except RuntimeError as error:
            raise ValueError(str(error).partition(";")[0]) from error
        return record


def file_name(split: str, number: int, total: int) -> str:
    """Returns the file name of shard `number`, counted from 0, of the `total` shards of a split."""
    return f"{split}-{number:05}-of-{total:05}.array_record"


def open_writer(path: str) -> ArrayRecordWriter:
    """Returns a writer of records of a local file; raises OSError if the file cannot be written."""
    with open(path, "wb"):  # the writer does not report that it cannot write
        return ArrayRecordWriter(os.fsencode(path), WRITER_OPTIONS)


def write_shard(path: str, examples: Iterable[tuple[bytes, list[int] | list[float]]]) -> tuple[int, int]:
    """Writes a local shard of (encoded image, labels), whole or not at all; returns its numbers of records and bytes.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
        Exception: raised by `examples`, unchanged.
    """
    written = 0
    with contextlib.ExitStack() as stack:
        with report_write_errors(path):
            temporary = str(stack.enter_context(atomic_write(path)))
            writer = open_writer(temporary)
        try:
            for image, labels in examples:
                with report_write_errors(path):
                    writer.write(tf_example.serialise_example(image, labels))
                written += 1
        finally:
            with report_write_errors(path):
                writer.close()
        with report_write_errors(path):
            if ArrayRecordFile(path, temporary).num_records() != written:
                raise OSError("the file does not contain what was written")
            stack.close()
            return written, os.path.getsize(path)


@contextlib.contextmanager
def report_write_errors(path: str) -> Iterator[None]:
    """Turns the errors of writing to a path into a UserError; the block must do nothing else that can fail."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot write {path}: {error}") from error
