"""The manifest of a checkpoint, by which damage is noticed: it has a table of the arrays, and its own checksum."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax import UserError, printable, tree
from vit_jax.checkpoint.checkpoint_errors import DamagedCheckpoint
from vit_jax.checkpoint.fingerprint import fingerprints
from vit_jax.tree import ArrayTree

MAX_LISTED_NAMES = 8  # the most names that a message lists

ArrayTable = dict[str, list[Any]]  # name of an array -> dtype, shape, fingerprint


def describe_arrays(state: ArrayTree) -> tuple[ArrayTable, list[str]]:
    """Returns the table of a state's arrays for its manifest, and the names of the arrays that are not finite.

    Every process must call it.
    """
    leaves, by_name = tree.flatten(state), fingerprints(state)
    table = {name: [str(leaf.dtype), list(leaf.shape), by_name[name].digits] for name, leaf in leaves.items()}
    return table, [name for name, fingerprint in by_name.items() if not fingerprint.finite]


def add_checksum(manifest: dict[str, Any]) -> dict[str, Any]:
    """Returns a manifest with its checksum added."""
    return manifest | {"checksum": _checksum(manifest)}


def parse_manifest(text: bytes, step: int | None = None) -> dict[str, Any]:
    """Returns a manifest, without its checksum, from the JSON text of what `add_checksum` returned.

    Raises:
        DamagedCheckpoint: the text is not what was written, or the manifest is of another step than `step`, if given.
    """
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"about/metadata is not JSON ({printable(error, 100)})") from error
    if not isinstance(manifest, dict) or manifest.pop("checksum", None) != _checksum(manifest):
        raise DamagedCheckpoint("about/metadata does not agree with its checksum")
    if step not in (None, manifest["step"]):
        raise DamagedCheckpoint(f"it holds step {manifest['step']}")
    return manifest


def check_program(manifest: dict[str, Any], wanted: ArrayTree, where: str) -> None:
    """Compares the arrays in the manifest of an intact checkpoint, at the path `where`, with the program's state.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    if wrong := tree.differences(array_shapes(manifest), wanted):
        raise UserError(
            f"the checkpoint {where} is intact, but its arrays do not match those of this run: {'; '.join(wrong)}. Use "
            "the config and the version of vit_jax that wrote it, or choose a new --workdir."
        )


def check_metadata(manifest: dict[str, Any], metadata: ArrayTree, prefix: str = "") -> None:
    """Compares the arrays in the manifest with `metadata`, the shapes and types that Orbax finds in the checkpoint.

    Orbax itself would cast silently. Only the arrays whose names in the manifest begin with `prefix` are compared.

    Raises:
        DamagedCheckpoint: the shapes or types differ.
    """
    if wrong := tree.differences(metadata, array_shapes(manifest, prefix)):
        raise DamagedCheckpoint(f"its arrays are not described as they were saved: {list_names(wrong)}")


def check_arrays(manifest: dict[str, Any], state: ArrayTree, prefix: str = "") -> None:
    """Compares the fingerprints of the arrays of `state` with those in the manifest. Every process must call it.

    The name of an array in the manifest is `prefix` and its name in `state`.

    Raises:
        DamagedCheckpoint: some fingerprints differ.
    """
    (table, _), saved = describe_arrays(state), manifest["arrays"]
    wrong = [f"{prefix}{name}" for name, row in table.items() if row != saved[f"{prefix}{name}"]]
    if wrong:
        raise DamagedCheckpoint(f"the values are not those that were saved in {list_names(wrong)}")


def array_shapes(manifest: dict[str, Any], prefix: str = "") -> dict[str, jax.ShapeDtypeStruct]:
    """Returns name without `prefix` -> shape and dtype, for the arrays in the manifest whose names begin with it."""
    return {
        name.removeprefix(prefix): jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
        for name, (dtype, shape, _) in manifest["arrays"].items()
        if name.startswith(prefix)
    }


def list_names(names: Iterable[str]) -> str:
    """Returns names as words with commas between. Of many names, the first 8 and how many more there are."""
    names = list(names)
    more = f" and {len(names) - MAX_LISTED_NAMES:,} more" if len(names) > MAX_LISTED_NAMES else ""
    return f"{', '.join(names[:MAX_LISTED_NAMES])}{more}"


def _checksum(manifest: dict[str, Any]) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
