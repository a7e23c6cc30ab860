"""Files that are replaced whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".partial"  # of the temporary files


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; the file written there replaces `path` when the block ends.

    The file is synced to the disk first. If the block raises, the temporary file is removed.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = Path(f"{path}{SUFFIX}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
