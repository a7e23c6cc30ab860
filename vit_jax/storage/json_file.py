"""JSON files that people write."""

import json
from typing import Any

from vit_jax import UserError
from vit_jax.storage import filesystem


def read_json(path: str) -> Any:
    """Returns the value in a JSON file, local or remote.

    Raises:
        UserError: the file is missing or not JSON, or an object has two entries of the same key, of which Python would
            take the last.
    """
    try:
        return json.loads(filesystem.read_bytes(path), object_pairs_hook=unique_entries)
    except (ValueError, RecursionError) as error:  # the second: nested thousands of times
        raise UserError(f"cannot read {path}: {type(error).__name__}: {error}") from error


def unique_entries(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of the entries of a JSON object; raises ValueError if two of them have the same key."""
    value = dict(entries)
    if len(value) < len(entries):
        keys = [key for key, _ in entries]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} occurs twice in an object")
    return value
