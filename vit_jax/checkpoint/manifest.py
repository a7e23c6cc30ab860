"""What a checkpoint says of itself, so that damage is noticed: a table of its arrays, under a checksum of its own."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax import UserError, shown, tree
from vit_jax.checkpoint import fingerprint
from vit_jax.checkpoint.fingerprint import Mark

MOST = 8  # names told of many

Table = dict[str, list[Any]]  # name of an array -> dtype, shape, fingerprint


class Damaged(Exception):
    """A checkpoint is incomplete, cannot be read, or does not hold what was saved; says which part of it."""


def table(state: Any, marks: Mapping[str, Mark]) -> Table:
    """Returns what is kept of every array of a state."""
    return {name: [str(leaf.dtype), list(leaf.shape), marks[name].digits] for name, leaf in tree.flatten(state).items()}


def sealed(about: dict[str, Any]) -> dict[str, Any]:
    """Returns JSON with its checksum."""
    return about | {"checksum": _checksum(about)}


def opened(text: bytes) -> dict[str, Any]:
    """Returns the JSON that `sealed` made, from its text.

    Raises:
        Damaged: it is not what was written.
    """
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"about/metadata is no JSON ({shown(error, 100)})") from error
    if not isinstance(about, dict) or about.pop("checksum", None) != _checksum(about):
        raise Damaged("about/metadata does not agree with its checksum")
    return about


def check_wanted(about: dict[str, Any], wanted: Any, where: str) -> None:
    """Compares what an intact checkpoint says it holds with the state of the program.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    if wrong := tree.differences(shapes(about), wanted):
        raise UserError(f"the checkpoint {where} is intact, but not of this program's state: {'; '.join(wrong)}.")


def check_described(about: dict[str, Any], described: Any, prefix: str = "") -> None:
    """Compares the table with what the storage library finds written, from which it would cast without a word.

    Raises:
        Damaged: they differ.
    """
    if wrong := tree.differences(described, shapes(about, prefix)):
        raise Damaged(f"its arrays are not described as they were saved: {listed(wrong)}")


def check_arrays(about: dict[str, Any], state: Any, prefix: str = "") -> None:
    """Compares the fingerprints of arrays with those saved. Every process must call it.

    Raises:
        Damaged: some differ.
    """
    found, saved = table(state, fingerprint.marks(state)), about["arrays"]
    wrong = [f"{prefix}{name}" for name, row in found.items() if row != saved[f"{prefix}{name}"]]
    if wrong:
        raise Damaged(f"not the values that were saved in {listed(wrong)}")


def shapes(about: dict[str, Any], prefix: str = "") -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the arrays in the table whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
        for name, (dtype, shape, _) in about["arrays"].items()
        if name.startswith(prefix)
    }


def listed(names: Iterable[str]) -> str:
    """Returns names as words, cut when there are many."""
    names = list(names)
    more = f" and {len(names) - MOST:,} more" if len(names) > MOST else ""
    return f"{', '.join(names[:MOST])}{more}"


def _checksum(about: dict[str, Any]) -> str:
    text = json.dumps(about, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
