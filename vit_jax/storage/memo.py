"""Small results that take long to compute, kept for later processes in files of the cache folder.

A disk that refuses costs only time: what cannot be read is computed again, and what cannot be written is not kept.
"""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from vit_jax import UserError, encode_text
from vit_jax.storage import cache
from vit_jax.storage.atomic import atomic_write

Result = TypeVar("Result")


def recall(kind: str, key: str, parse: Callable[[str], Result]) -> Result | None:
    """Returns the result that was kept under a key, or None if there is none, or a damaged one.

    Args:
        kind: what the result is, the name of a folder in the cache.
        key: everything on which the result depends; a change makes another key.
        parse: makes the result from the text that was kept; raises ValueError or TypeError if the text is damaged.
    """
    with contextlib.suppress(UserError, OSError, ValueError, TypeError):
        return parse(_path(kind, key).read_text())
    return None


def remember(kind: str, key: str, text: str) -> None:
    """Keeps a result, as text that `recall` can parse, in place of an earlier one under this key."""
    with contextlib.suppress(UserError, OSError):
        path = _path(kind, key)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        with atomic_write(path) as temporary:
            temporary.write_text(text)


def _path(kind: str, key: str) -> Path:
    return cache.root() / kind / hashlib.sha256(encode_text(key)).hexdigest()
