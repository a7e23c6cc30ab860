"""Whose fault it is that a checkpoint is not read or written: its own, that of its disk or store, or a bug."""

import contextlib
import errno
import functools
import sys
from collections.abc import Iterator
from typing import Any

from vit_jax import BUGS, UserError
from vit_jax.checkpoint import staging
from vit_jax.checkpoint.manifest import Damaged

# What a file system or a store says of itself, not of the files: no sign of damage, and no bug.
OUTSIDE = {"PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED"}
OUTSIDE |= {"CANCELLED", "No space left", "quota exceeded", "Read-only file system", "Input/output error"}
OUTSIDE |= {"Permission denied", "Too many open files", "Cannot allocate memory", "Stale file handle", "timed out"}
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@contextlib.contextmanager
def told(folder: str, verb: str) -> Iterator[None]:
    """Makes a UserError of what goes wrong with a store or disk; what else goes wrong with a local folder is a bug."""
    _hush()
    try:
        yield
    except (UserError, Damaged, *BUGS):
        raise
    except Exception as error:
        if not staging.is_remote(folder) and not _is_outside(error):
            raise
        raise UserError(f"the checkpoints in {folder} cannot be {verb}: {_reason(error)}") from error


@contextlib.contextmanager
def reading(folder: str) -> Iterator[None]:
    """Makes of what goes wrong while a checkpoint is read either Damaged or, if it is not the checkpoint's fault, a
    UserError: a flipped bit may lead to any error of those who read it.
    """
    _hush()
    try:
        yield
    except (UserError, Damaged):
        raise
    except Exception as error:
        if _is_outside(error):
            raise UserError(f"the checkpoints in {folder} cannot be read: {_reason(error)}") from error
        raise Damaged(f"it cannot be read: {_reason(error)}") from error


@functools.cache
def _hush() -> None:
    """Keeps off the terminal what TensorStore's other requests say once one has failed: it buries the reason."""
    before = sys.unraisablehook

    def hook(what: Any) -> None:
        if str(what.exc_value) != "Event loop is closed":
            before(what)

    sys.unraisablehook = hook


def _is_outside(error: Exception) -> bool:
    if isinstance(error, OSError):  # a name that a flipped bit made is as absent as a file that was lost
        return not isinstance(error, ABSENT) and error.errno not in (errno.EINVAL, errno.ENAMETOOLONG)
    return isinstance(error, MemoryError) or any(word in str(error) for word in OUTSIDE)


def _reason(error: Exception) -> str:
    text = str(error).strip().partition(" [tensorstore_spec")[0].partition("\n")[0]
    return text[:600].rstrip(".") or type(error).__name__
