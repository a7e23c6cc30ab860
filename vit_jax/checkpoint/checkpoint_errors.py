"""Tells why a checkpoint cannot be read or written: it is damaged, its disk or store fails, or there is a bug."""

import contextlib
import errno
import functools
import sys
from collections.abc import Iterator
from typing import Any

from vit_jax import BUGS, UserError, out_of_files
from vit_jax.storage import filesystem

# Words of errors that concern a file system or store rather than a file: no sign of damage, and no bug.
ENVIRONMENT = (
    *("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED"),
    *("CANCELLED", "No space left", "quota exceeded", "Read-only file system", "timed out", "Input/output error"),
    *("Permission denied", "Too many open files", "Cannot allocate memory", "Stale file handle"),
)
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class DamagedCheckpoint(Exception):
    """A checkpoint is incomplete, cannot be read, or does not hold what was saved. The message says which part."""


@contextlib.contextmanager
def storage_errors(folder: str, verb: str) -> Iterator[None]:
    """Turns an error of a store or disk into a `UserError`.

    `UserError`, `DamagedCheckpoint` and `BUGS` pass unchanged. Any other error counts as an error of the store if the
    folder is remote. If the folder is local, an error that is not one of the disk passes unchanged, as a bug.

    Args:
        folder: the path of the checkpoints.
        verb: what is done with the checkpoints, for the message: `read` or `written`.

    Raises:
        UserError: the store or disk fails.
    """
    _silence_closed_loops()
    try:
        yield
    except (UserError, DamagedCheckpoint, *BUGS):
        raise
    except Exception as error:
        if not filesystem.is_remote(folder) and not _is_environment(error):
            raise
        raise UserError(f"the checkpoints in {folder} cannot be {verb}: {_first_line(error)}") from error


@contextlib.contextmanager
def damage_errors(folder: str) -> Iterator[None]:
    """Turns any error of reading a checkpoint into a `DamagedCheckpoint`, or a `UserError` if the disk or store fails.

    A bug counts as damage too, since a flipped bit may cause any error in the library that reads the checkpoint.
    `folder` is the path of the checkpoints, for the message.
    """
    _silence_closed_loops()
    try:
        yield
    except (UserError, DamagedCheckpoint):
        raise
    except Exception as error:
        if _is_environment(error):
            raise UserError(f"the checkpoints in {folder} cannot be read: {_first_line(error)}") from error
        raise DamagedCheckpoint(f"it cannot be read: {_first_line(error)}") from error


@functools.cache
def _silence_closed_loops() -> None:
    """Hides what TensorStore's other requests print on the terminal once one has failed: it would bury the reason."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def _is_environment(error: Exception) -> bool:
    if isinstance(error, OSError):  # a name that a flipped bit made is as absent as a file that was lost
        return not isinstance(error, ABSENT) and error.errno not in (errno.EINVAL, errno.ENAMETOOLONG)
    return isinstance(error, MemoryError) or any(words in str(error) for words in ENVIRONMENT)


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition(" [tensorstore_spec")[0].partition("\n")[0]
    return out_of_files(error) or text[:600].rstrip(".") or type(error).__name__
