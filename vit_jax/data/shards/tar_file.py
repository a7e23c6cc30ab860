"""A tar file of samples, as WebDataset lays them out: members of one key follow each other, `KEY.jpg`, `KEY.cls`.

The key of a member is its path up to the first dot of its file name. What follows that dot, in lower case, is its
extension. A tar file has no index: the headers of its members are read one after the other when it is opened.
"""

import functools
import io
import itertools
import os
import re
import tarfile
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from vit_jax import UserError, printable, user_errors

MAX_INDEXED = 4096  # files per process whose indices are kept: of 1,000 samples of 3 members each, 70 kB a file
MEMBER = re.compile(r"(?P<key>(?:.*/)?[^./][^./]*)\.(?P<extension>[^/]+)", re.DOTALL)
ADVICE = "copy or pack it again"
END = 2 * tarfile.BLOCKSIZE  # bytes of zeros that end an archive


class Sample(NamedTuple):
    """A sample of a tar file.

    Attributes:
        key: the key that all its members have.
        members: extension of a member, without the dot -> content of the member.
    """

    key: str
    members: dict[str, bytes]


class TarIndex(NamedTuple):
    """The index of the samples in a tar file.

    Attributes:
        keys: the encoded key of each sample; bytes [samples].
        firsts: the number of the first member of each sample; the last element is the number of all members.
        starts: the offset in the file at which the content of each member begins.
        ends: the offset at which the content of each member ends (exclusive).
        kinds: the index in `extensions` of the extension of each member.
        extensions: the different extensions of the members.
    """

    keys: np.ndarray
    firsts: Int64[np.ndarray, " samples+1"]
    starts: Int64[np.ndarray, " members"]
    ends: Int64[np.ndarray, " members"]
    kinds: Int32[np.ndarray, " members"]
    extensions: tuple[str, ...]


class TarFile:
    """A `ShardReader` whose records are samples."""

    def __init__(self, path: str, local: str):
        """Opens the file `local`, which is `path` itself or a local copy of it; error messages name `path`.

        Raises:
            UserError: the file is truncated, compressed or not a tar file.
        """
        with user_errors(f"cannot read {path}"):
            self._file = io.FileIO(local)
            status = os.fstat(self._file.fileno())
        self._index = tar_index(path, local, status.st_size, status.st_mtime_ns)

    def num_records(self) -> int:
        """Returns the number of samples."""
        return len(self._index.keys)

    def key(self, row: int) -> str:
        """Returns the key of a sample."""
        return bytes(self._index.keys[row]).decode("utf-8", "surrogateescape")

    def read(self, row: int) -> Sample:
        """Returns a sample; raises ValueError if the file has become shorter."""
        index = self._index
        members = slice(*index.firsts[row : row + 2].tolist())
        starts, ends = index.starts[members].tolist(), index.ends[members].tolist()
        stored = memoryview(os.pread(self._file.fileno(), ends[-1] - starts[0], starts[0]))
        if len(stored) != ends[-1] - starts[0]:
            raise ValueError(f"the file ends at byte {starts[0] + len(stored)}")
        contents = [bytes(stored[start - starts[0] : end - starts[0]]) for start, end in zip(starts, ends, strict=True)]
        names = [index.extensions[kind] for kind in index.kinds[members].tolist()]
        return Sample(self.key(row), dict(zip(names, contents, strict=True)))


@functools.lru_cache(MAX_INDEXED)
def tar_index(path: str, local: str, size: int, modified: int) -> TarIndex:
    """Returns where the samples of a file lie. The index is kept for later calls, also when the file is closed.

    Members that are not files, and members whose names have no extension, belong to no sample.

    Args:
        path: the path of the file, for error messages.
        local: the path at which it is read: the same, or that of a local copy.
        size: its size in bytes.
        modified: its modification time in nanoseconds, which tells files that replaced each other apart.

    Raises:
        UserError: the file is truncated, compressed or not a tar file.
    """
    try:
        with user_errors(f"cannot read {path}"), tarfile.open(local, "r:") as tar:
            listed = [(MEMBER.fullmatch(member.name), member) for member in tar]
            check_end(tar, size)
    except tarfile.TarError as error:
        raise UserError(
            f"cannot read {path}: it is truncated, compressed or no tar file ({error}); {ADVICE}"
        ) from error
    if linked := [info.name for match, info in listed if match and (info.islnk() or info.issym())]:
        raise UserError(f"cannot read {path}: {printable(linked[0])} is a link to another member; {ADVICE}")
    files = [(match, info) for match, info in listed if info.isreg()]
    if sparse := [info.name for _, info in files if info.issparse()]:
        raise UserError(f"cannot read {path}: {printable(sparse[0])} is stored as a sparse file; {ADVICE}")
    members = [(match["key"], match["extension"].lower(), info) for match, info in files if match]
    firsts = [at for at, (key, _, _) in enumerate(members) if at == 0 or key != members[at - 1][0]]
    for first, last in itertools.pairwise([*firsts, len(members)]):
        kinds_of_sample = [kind for _, kind, _ in members[first:last]]
        if len({*kinds_of_sample}) < len(kinds_of_sample):
            twice = next(kind for kind in kinds_of_sample if kinds_of_sample.count(kind) > 1)
            twins = f"two members {printable(members[first][0])}.{printable(twice)} follow each other"
            raise UserError(f"cannot read {path}: {twins}, so samples cannot be told apart; {ADVICE}")
    keys = [members[first][0].encode("utf-8", "surrogateescape") for first in firsts]
    starts = np.array([info.offset_data for _, _, info in members], np.int64)
    ends = starts + np.array([info.size for _, _, info in members], np.int64)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name for _, name, _ in members))}
    kinds = np.array([numbers[name] for _, name, _ in members], np.int32)
    return TarIndex(
        np.array(keys, "S"), np.array([*firsts, len(members)], np.int64), starts, ends, kinds, tuple(numbers)
    )


def check_end(tar: tarfile.TarFile, size: int) -> None:
    """Checks what follows the last member that was read: two blocks of zeros at least, and zeros up to a whole record.

    `tarfile` reads up to a damaged header, a block of zeros or the end of the file, and says nothing. More zeros are
    those of a file whose place was reserved before it was written.

    Args:
        tar: the archive, all of whose members were read.
        size: the size of its file in bytes.

    Raises:
        TarError: the members end earlier or later than the archive.
    """
    assert tar.fileobj
    tar.fileobj.seek(tar.offset)
    end = tar.fileobj.read(END + tarfile.RECORDSIZE)
    if end[: tarfile.BLOCKSIZE].strip(b"\0"):
        raise tarfile.TarError(f"the header at byte {tar.offset} is damaged")
    if len(end) < END:
        raise tarfile.TarError(f"it ends at byte {size} without the blocks that end an archive")
    if end.strip(b"\0"):
        place = tar.offset + len(end) - len(end.lstrip(b"\0"))
        raise tarfile.TarError(f"the archive ends at byte {tar.offset}, but there is more at byte {place}")
    if len(end) == END + tarfile.RECORDSIZE:
        raise tarfile.TarError(
            f"the archive ends at byte {tar.offset}, but zeros follow up to byte {size}, longer than a record"
        )
