"""The checkpoints of a workdir as folders, here or on a bucket: which there are, what they say, which are set aside."""

import json
import tempfile
from pathlib import Path
from typing import Any

import jax

from vit_jax import UserError
from vit_jax.checkpoint import manifest, retention, staging
from vit_jax.checkpoint.manifest import Damaged
from vit_jax.checkpoint.staging import FOLDER
from vit_jax.storage import filesystem

ABOUT = "about/metadata"  # of a checkpoint: what `manifest.sealed` made
ASIDE = "damaged-"  # begins the name of the folder of a checkpoint that was set aside


class Shelf:
    """The folder `checkpoints` of a workdir, local, gs:// or, through a spool here, s3://.

    Attributes:
        folder: its path.
        path: where checkpoints are read and written, the folder or the spool.
    """

    def __init__(self, workdir: str, here: Path | None = None):
        """Opens the folder, which need not exist; a folder `here` is where the spool of s3:// lies.

        Raises:
            UserError: see `staging.Spool`.
        """
        self._workdir, self._spool = workdir, staging.open_spool(workdir, here)
        spooled, self.folder = self._spool, staging.folder(workdir)
        self._here = spooled.path if spooled else None if staging.is_remote(workdir) else Path(self.folder)
        self.path = str(self._here or self.folder)

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints, the newest first: of remote ones those that are finished, of local ones
        all, as their folders got their names when they were finished.
        """
        if self._here is None:
            return sorted(staging.finished(self._workdir), reverse=True)
        folders = self._here.iterdir() if self._here.is_dir() else ()
        return sorted((int(path.name) for path in folders if path.name.isdigit()), reverse=True)

    def aside(self) -> list[str]:
        """Returns the names of the folders that were set aside."""
        if self._spool:
            names = self._spool.there
        elif self._here is None:
            names = {name.partition("/")[0] for name in filesystem.list_files(self.folder)}
        else:
            names = {path.name for path in Path(self.folder).glob(f"{ASIDE}*")}
        return sorted(name for name in names if name.startswith(ASIDE))

    def about(self, step: int) -> dict[str, Any]:
        """Returns what a checkpoint says of itself.

        Raises:
            Damaged: the checkpoint is incomplete, or what it says is damaged.
            UserError: it cannot be read.
        """
        where = filesystem.join_path(self.path, str(step))
        if self._spool:  # its state comes later
            return read_about(Path(where), has_state=True)
        if self._here:
            return read_about(Path(where))
        names = filesystem.list_files(where)
        if ABOUT not in names or not any(name.startswith("state/") for name in names):
            raise Damaged(INCOMPLETE)
        return _checked(filesystem.read_bytes(filesystem.join_path(where, ABOUT)), step)

    def write_about(self, step: int, about: dict[str, Any]) -> None:
        """Replaces what a checkpoint says of itself, whole or not at all, on the first host.

        Raises:
            UserError: that is not possible.
        """
        if jax.process_index() > 0:
            return
        with tempfile.TemporaryDirectory() as temporary:
            written = Path(temporary) / "about"
            if self._here:
                written = self._here / str(step) / f"{ABOUT}.partial"
            written.write_text(json.dumps(about))
            if staging.is_remote(self._workdir):
                filesystem.upload(written, filesystem.join_path(self.folder, str(step), ABOUT))
            if self._here:
                written.replace(self._here / str(step) / ABOUT)

    def bring(self, step: int) -> None:
        """Fetches a checkpoint that is to be read, if it is not within reach."""
        if self._spool:
            self._spool.fetch(step)

    def push(self) -> None:
        """Uploads what is finished, where that is not written at its place.

        Raises:
            UserError: the store refuses or does not answer.
        """
        if self._spool:
            self._spool.push()

    def set_aside(self, step: int) -> str:
        """Renames the folder of a damaged checkpoint, so that nothing takes it for a good one; returns the new path.

        Raises:
            UserError: that is not possible.
        """
        taken, name, number = self.aside(), f"{ASIDE}{step}", 1
        while name in taken:
            number += 1
            name = f"{ASIDE}{step}-{number}"
        new = filesystem.join_path(self.folder, name)
        if self._here:
            try:
                (self._here / str(step)).rename(self._here / name)
            except OSError as error:
                raise UserError(f"cannot set aside {self._here / str(step)}: {error.strerror or error}") from error
        if staging.is_remote(self._workdir):
            old = filesystem.join_path(self.folder, str(step))
            names = sorted(
                filesystem.list_files(old), key=lambda name: name != staging.MARK
            )  # without it, it counts no more
            filesystem.move_folder(old, names, new)
        return new


INCOMPLETE = "it is incomplete: it has no state or nothing about it"


def is_checkpoint(path: Path) -> bool:
    """Tells whether a folder is one checkpoint, as far as can be seen without reading it."""
    return (path / "state").is_dir() and (path / ABOUT).is_file()


def read_about(path: Path, has_state: bool = False) -> dict[str, Any]:
    """Returns what a checkpoint folder says of itself; `has_state`: the state is known to be elsewhere.

    Raises:
        Damaged: it is incomplete, or what it says is damaged.
        UserError: it cannot be read.
    """
    if not is_checkpoint(path) and not (has_state and (path / ABOUT).is_file()):
        raise Damaged(INCOMPLETE)
    return _checked(filesystem.read_bytes(str(path / ABOUT)), int(path.name) if path.name.isdigit() else None)


def _checked(text: bytes, step: int | None) -> dict[str, Any]:
    about = manifest.opened(text)
    if step not in (None, about["step"]):
        raise Damaged(f"it holds step {about['step']}")
    return about


def find(workdir: Path, best: bool = False) -> Path | None:
    """Returns the folder of the newest (or best) finished checkpoint of a workdir, or None. Writes nothing.

    Raises:
        UserError: the best is sought, and one of them is damaged.
    """
    return _pick([path for path in _folders(workdir) if is_checkpoint(path)], best)


def _folders(workdir: Path) -> list[Path]:
    folders = workdir / FOLDER
    return [path for path in folders.iterdir() if path.name.isdigit()] if folders.is_dir() else []


def _pick(found: list[Path], best: bool) -> Path | None:
    if not best:
        return max(found, key=lambda path: int(path.name), default=None)
    measured, by_step = {}, {int(path.name): path for path in found}
    for step, path in by_step.items():
        try:
            measured[step] = retention.from_json(_checked(filesystem.read_bytes(str(path / ABOUT)), step))
        except Damaged as error:
            raise UserError(f"the checkpoint {path} is damaged: {error}{others(path)}") from error
    # By the measure that the run went by last.
    order = retention.ranked(measured, measured[max(measured)].by) if measured else []
    return by_step[order[0]] if order else None


def others(path: Path) -> str:
    """Returns the end of a sentence on a damaged checkpoint: which others its workdir has."""
    steps = sorted(int(one.name) for one in _folders(path.parent.parent) if one != path and is_checkpoint(one))
    beside = path.parent.name == FOLDER and steps
    return f"; there are others of the same run, of the steps {', '.join(map(str, steps))}." if beside else "."


def latest(workdir: str) -> int | None:
    """Returns the step of the newest finished checkpoint of a workdir, or None. Writes nothing."""
    if staging.is_remote(workdir):
        return max(staging.finished(workdir), default=None)
    newest = find(Path(workdir))
    return int(newest.name) if newest else None


def here(workdir: str | Path, best: bool = False) -> Path:
    """Returns a local workdir itself, or a copy here of a remote one, with its newest (or best) checkpoint, if any.

    Raises:
        UserError: it is remote and cannot be read.
    """
    if not staging.is_remote(str(workdir)):
        return Path(workdir).expanduser()
    place = str(workdir)
    found = _pick([path for path in _folders(staging.bring(place)) if (path / ABOUT).is_file()], best)
    return staging.bring(place, int(found.name)) if found else staging.bring(place)


def weights_here(path: str | Path) -> Path:
    """Returns a local path itself, or a copy here of what holds the weights of a remote workdir, checkpoint folder or
    `model.npz`.

    Raises:
        UserError: it is remote and cannot be read.
    """
    return staging.bring_weights(str(path)) if staging.is_remote(str(path)) else Path(path).expanduser()
