"""Whose fault it is that a checkpoint cannot be read or written: its own, that of its disk or store, or a bug's."""

import contextlib
import errno
import functools
import sys
from collections.abc import Iterator
from typing import Any

from vit_jax import BUGS, UserError
from vit_jax.storage import filesystem

# What file systems and stores say of themselves, not of files: no sign of damage, and no bug.
ENVIRONMENT = (
    *("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED"),
    *("CANCELLED", "No space left", "quota exceeded", "Read-only file system", "timed out", "Input/output error"),
    *("Permission denied", "Too many open files", "Cannot allocate memory", "Stale file handle"),
)
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class DamagedCheckpoint(Exception):
    """A checkpoint is incomplete, cannot be read, or does not hold what was saved; says which part of it."""


@contextlib.contextmanager
def storage_errors(folder: str, verb: str) -> Iterator[None]:
    """Makes a UserError of what goes wrong with a store or disk; what else goes wrong with a local folder is a bug.

    Args:
        folder: of the checkpoints, for the message.
        verb: what is done with them: `read` or `written`.
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
    """Makes of what goes wrong while a checkpoint is read a DamagedCheckpoint or, if the disk or store is at fault, a
    UserError: a flipped bit may lead to any error of the library that reads it.
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
    """Keeps off the terminal what TensorStore's other requests print once one has failed: it buries the reason."""
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
    return text[:600].rstrip(".") or type(error).__name__
