"""Files that are replaced whole or not at all."""

import contextlib
import errno
import glob
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".partial"  # the suffix of the temporary files
ABANDONED = 24 * 3600.0  # seconds without a write after which a temporary file belongs to a killed process
MAX_NAME_LENGTH = 50  # characters of a file's name that its temporary file's name repeats: a name has at most 255 bytes


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`. The file written there replaces `path` when the block ends.

    Readers find the old file or the new one, never a part of it. This holds after a loss of power too, since the file
    and its folder are synced to the disk. If the block raises, the temporary file is removed and `path` stays as it
    was. Several processes may write the same path at once: the last one to finish determines the content.

    Raises:
        OSError: the file cannot be written, or `path` is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    _remove_abandoned(path)
    temporary = path.with_name(f"{path.name[:MAX_NAME_LENGTH]}.{secrets.token_hex(4)}{SUFFIX}")
    try:
        temporary.touch()  # with this process's default permissions, which some libraries narrow
        mode = temporary.stat().st_mode
        yield temporary
        if temporary.stat().st_mode != mode:
            with contextlib.suppress(OSError):  # file systems without permissions
                temporary.chmod(mode)
        _sync(temporary)
        temporary.replace(path)
        with contextlib.suppress(OSError):  # some network file systems do not sync folders
            _sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    """Removes temporary files of `path` that nobody has written to for `ABANDONED` seconds: their writer was killed."""
    for leftover in path.parent.glob(f"{glob.escape(path.name[:MAX_NAME_LENGTH])}.*{SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > ABANDONED:
                leftover.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # what file systems that cannot sync answer
            raise
    finally:
        os.close(descriptor)
