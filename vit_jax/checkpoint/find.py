"""Finds the checkpoints of workdirs, and copies remote ones here. Never writes to a workdir."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vit_jax import UserError
from vit_jax.checkpoint import retention
from vit_jax.checkpoint.integrity import (
    FINISHED,
    FOLDER,
    MANIFEST,
    DamagedCheckpoint,
    checkpoint_folder,
    finished_steps,
    is_beside_state,
    is_checkpoint,
    read_manifest,
    step_folders,
    step_of,
)
from vit_jax.storage import expand_home, filesystem


def find_checkpoint(workdir: Path, best: bool = False) -> Path | None:
    """Returns the folder of the newest (or best) finished checkpoint of a local workdir; None: there is none.

    Raises:
        UserError: the best checkpoint is wanted, and the manifest of some checkpoint is damaged.
    """
    return _pick([path for path in step_folders(workdir / FOLDER) if is_checkpoint(path)], best)


def latest_step(workdir: str) -> int | None:
    """Returns the step of the newest finished checkpoint of a workdir, or None."""
    if filesystem.is_remote(workdir):
        return next(iter(finished_steps(filesystem.list_files(checkpoint_folder(workdir)))), None)
    newest = find_checkpoint(Path(workdir))
    return int(newest.name) if newest else None


def local_workdir(workdir: str | Path, best: bool = False) -> Path:
    """Returns a local workdir itself, or a local copy of a remote one.

    The copy has the configuration and, if there are checkpoints, the newest (or best) one. Of the other checkpoints it
    has all but the state.

    Raises:
        UserError: the workdir is remote and cannot be read.
    """
    location = str(workdir)
    if not filesystem.is_remote(location):
        return expand_home(workdir)
    copy = _copy_workdir(location)
    checkpoint = _pick([path for path in step_folders(copy / FOLDER) if (path / MANIFEST).is_file()], best)
    return _copy_workdir(location, int(checkpoint.name)) if checkpoint else copy


def local_checkpoint(location: str) -> Path:
    """Returns a local copy of a remote checkpoint folder, or of a remote workdir with its newest checkpoint.

    Raises:
        UserError: there is neither, or it cannot be read.
    """
    if FINISHED in filesystem.list_files(location):
        return Path(filesystem.local_copy_of_folder(location))
    return _copy_workdir(location, latest_step(location))


def _copy_workdir(workdir: str, step: int | None = None) -> Path:
    """Returns a local copy of a remote workdir: its configuration, and its finished checkpoints.

    The checkpoint of `step` is copied whole, all others without the state.

    Raises:
        UserError: the workdir does not exist or cannot be read.
    """
    steps = finished_steps(filesystem.list_files(checkpoint_folder(workdir)))

    def is_wanted(name: str) -> bool:
        first, _, rest = name.partition("/")
        is_whole = step is not None and step_of(rest) == step
        return name == "config.json" or (first == FOLDER and (is_whole or is_beside_state(rest, steps)))

    return Path(filesystem.local_copy_of_folder(workdir, is_wanted))


def _pick(folders: list[Path], best: bool) -> Path | None:
    """Returns the folder of the newest checkpoint, or of the best by the measure that the run used last.

    Returns None if there is no checkpoint, or if the best is wanted and none was measured.

    Raises:
        UserError: the best is wanted, and the manifest of a checkpoint is damaged.
    """
    if not best:
        return max(folders, key=lambda path: int(path.name), default=None)
    by_step = {int(path.name): path for path in folders}
    scores = {}
    for step, path in by_step.items():
        with report_damage(path):
            scores[step] = retention.from_json(read_manifest(str(path), needs_state=False))
    last = scores[max(scores)] if scores else None
    order = retention.ranked(scores, last.by, last.lowest) if last else []
    return by_step[order[0]] if order else None


def manifest_of(path: Path) -> dict[str, Any]:
    """Returns the manifest of one local checkpoint folder: its step, `model`, `data` and the table of its arrays.

    Raises:
        UserError: the checkpoint is damaged.
    """
    with report_damage(path):
        return read_manifest(str(path))


@contextlib.contextmanager
def report_damage(path: Path) -> Iterator[None]:
    """Turns a `DamagedCheckpoint` of one checkpoint into a `UserError`, which lists the others of its run."""
    try:
        yield
    except DamagedCheckpoint as error:
        raise UserError(f"the checkpoint {path} is damaged: {error}{_list_others(path)}") from error


def _list_others(path: Path) -> str:
    """Returns the end of a sentence on a damaged checkpoint, which lists the other checkpoints of its run, if any."""
    folders = step_folders(path.parent)
    steps = sorted(int(other.name) for other in folders if other != path and is_checkpoint(other))
    if path.parent.name != FOLDER or not steps:
        return "."
    return f"; the same run has others, of the steps {', '.join(map(str, steps))}."
