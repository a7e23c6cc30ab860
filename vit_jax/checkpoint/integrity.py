"""What belongs to a checkpoint, how its damage is noticed, and how damage is told from a disk or store that fails.

A checkpoint has a state and a manifest, JSON with a table of the state's arrays and a checksum of its own.
"""

import contextlib
import errno
import functools
import hashlib
import json
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax import BUGS, UserError, out_of_files, printable, tree
from vit_jax.checkpoint.fingerprint import fingerprints
from vit_jax.storage import filesystem
from vit_jax.tree import ArrayTree

FOLDER = "checkpoints"  # the folder of the checkpoints in a workdir
MANIFEST = "about/metadata"  # the file of the manifest in a checkpoint: what `add_checksum` returned, as JSON
FINISHED = "commit_success.txt"  # the file by which Orbax marks a finished checkpoint on a bucket
INCOMPLETE = "it is incomplete: it has no state or no manifest"
MAX_LISTED_NAMES = 8  # the most names that a message lists
# Words of errors that concern a file system or store rather than a file: no sign of damage, and no bug.
ENVIRONMENT = (
    *("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED"),
    *("CANCELLED", "No space left", "quota exceeded", "Read-only file system", "timed out", "Input/output error"),
    *("Permission denied", "Too many open files", "Cannot allocate memory", "Stale file handle"),
)
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

ArrayTable = dict[str, list[Any]]  # name of an array -> dtype, shape, fingerprint


class DamagedCheckpoint(Exception):
    """A checkpoint is incomplete, cannot be read, or does not hold what was saved. The message says which part."""


def checkpoint_folder(workdir: str | Path) -> str:
    """Returns the path of the folder with the checkpoints of a workdir, absolute if it is local."""
    location = str(workdir)
    if filesystem.is_remote(location):
        return filesystem.join_path(location, FOLDER)
    return str(Path(location, FOLDER).absolute())


def step_folders(folder: Path) -> list[Path]:
    """Returns the folders of a local folder that are named by a step, in no order; [] if there is no such folder."""
    return [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []


def is_checkpoint(path: Path) -> bool:
    """Returns whether a local folder is one checkpoint, as far as can be seen without reading it."""
    return (path / "state").is_dir() and (path / MANIFEST).is_file()


def read_manifest(folder: str, needs_state: bool = True) -> dict[str, Any]:
    """Returns the manifest of the checkpoint in a folder, local or remote, without its checksum.

    Raises:
        DamagedCheckpoint: the manifest is missing, damaged or of another step than the folder's name says; or the state
            is missing, unless `needs_state` is False.
        UserError: the manifest cannot be read.
    """
    path = filesystem.join_path(folder, MANIFEST)
    parent, _, step = folder.rpartition("/")
    with storage_errors(parent, "read"):
        try:
            if filesystem.is_remote(folder):
                names = filesystem.list_files(folder)
                has_state = any(name.startswith("state/") for name in names)
                text = filesystem.read_bytes(path) if MANIFEST in names else None
            else:
                has_state, text = Path(folder, "state").is_dir(), Path(path).read_bytes()
        except ABSENT:
            text = None
    if text is None or (needs_state and not has_state):
        raise DamagedCheckpoint(INCOMPLETE)
    return parse_manifest(text, int(step) if step.isdigit() else None)


def finished_steps(names: Iterable[str]) -> list[int]:
    """Returns the steps of the finished checkpoints, the newest first, from the names of all files on a bucket."""
    marks = [name.split("/") for name in names if name.count("/") == 1 and name.endswith(f"/{FINISHED}")]
    return sorted((int(step) for step, _ in marks if step.isdigit()), reverse=True)


def step_of(name: str) -> int | None:
    """Returns the step of the checkpoint to which a file belongs, or None. `name` is relative to the checkpoints."""
    first = name.partition("/")[0]
    return int(first) if first.isdigit() else None


def is_beside_state(name: str, steps: Collection[int | None]) -> bool:
    """Returns whether a file belongs to a checkpoint of one of these steps, but not to its state."""
    return step_of(name) in steps and name.split("/")[1] != "state"


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
