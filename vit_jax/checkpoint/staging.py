"""Checkpoints in a remote workdir: which are finished, and their way from there to here and back.

Orbax writes to gs:// itself. It cannot write to s3://: there it writes to a folder here, and what is finished is
uploaded, the file that says so last.
"""

from collections.abc import Collection
from pathlib import Path

import jax

from vit_jax import UserError
from vit_jax.storage import filesystem

is_remote = filesystem.is_remote

FOLDER = "checkpoints"
MARK = "commit_success.txt"  # by which Orbax tells a finished checkpoint


def folder(workdir: str | Path) -> str:
    """Returns the path of the checkpoints of a workdir."""
    return filesystem.absolute_path(filesystem.join_path(str(workdir), FOLDER))


def finished(workdir: str) -> list[int]:
    """Returns the steps of the finished checkpoints of a remote workdir."""
    return _finished(filesystem.list_files(folder(workdir)))


def bring(workdir: str, *whole: int) -> Path:
    """Returns a folder here with the configuration of a remote workdir, the checkpoints of the steps `whole`, and of
    the other finished ones all but the state.

    Raises:
        UserError: it is not there, or cannot be read.
    """
    steps = finished(workdir)

    def wanted(name: str) -> bool:
        first, _, rest = name.partition("/")
        return name == "config.json" or (first == FOLDER and _wanted(rest, steps, whole))

    return Path(filesystem.local_copy_of_folder(workdir, wanted))


def bring_weights(path: str) -> Path:
    """Returns a file or folder here that stands for a remote npz (with its JSON file, if there is one), checkpoint
    folder or workdir (its `model.npz`, else its newest checkpoint).

    Raises:
        UserError: it is not there, or cannot be read.
    """
    if path.endswith(".npz"):
        beside = f"{path.removesuffix('.npz')}.json"
        return Path(filesystem.local_copy(path, *([beside.rpartition("/")[2]] if filesystem.exists(beside) else [])))
    names = filesystem.list_files(path)
    if "model.npz" in names:
        return Path(filesystem.local_copy(filesystem.join_path(path, "model.npz"), "model.json"))
    if MARK in names:
        return Path(filesystem.local_copy_of_folder(path))
    return bring(path, *finished(path)[-1:])


def open_spool(workdir: str, path: Path | None) -> "Spool | None":
    """Returns a spool below `path` if the workdir is one that Orbax cannot write to; see `Spool`."""
    return Spool(workdir, path) if path and workdir.startswith("s3://") else None


class Spool:
    """A folder here in which Orbax writes what belongs to a remote workdir that it cannot write to.

    Attributes:
        path: the folder here.
        there: names of the folders that were in the remote one at first.
    """

    def __init__(self, workdir: str, path: Path):
        """Brings of the finished checkpoints all but the state.

        Raises:
            UserError: there are several hosts, or the store refuses or does not answer.
        """
        if jax.process_count() > 1:
            raise UserError(
                f"the workdir {workdir} takes checkpoints from one host only; on several take gs://BUCKET/... or a "
                "folder that all of them share."
            )
        self._remote, self.path = folder(workdir), path / FOLDER
        names = filesystem.list_files(self._remote)
        steps = _finished(names)
        self.there = {name.partition("/")[0] for name in names}
        self._ours = set(steps)
        self._cut = {_step(name) for name in names} - {-1} - self._ours  # or another process is uploading them
        self.path.mkdir(parents=True, exist_ok=True)
        filesystem.download(self._remote, [name for name in names if _wanted(name, steps, ())], self.path)

    def fetch(self, step: int) -> None:
        """Brings a checkpoint whole.

        Raises:
            UserError: the store refuses or does not answer.
        """
        names = [name for name in filesystem.list_files(self._remote) if _step(name) == step]
        filesystem.download(self._remote, [name for name in names if not (self.path / name).exists()], self.path)

    def push(self) -> None:
        """Uploads the finished checkpoints that are not there yet. Removes there those that are not here any more, and
        what was unfinished at the start and still is, but nothing that another process has written meanwhile.

        Raises:
            UserError: the store refuses or does not answer.
        """
        names = filesystem.list_files(self._remote)
        here = {int(path.name): path for path in self.path.iterdir() if path.name.isdigit()}
        there = set(_finished(names))
        for step in sorted(here.keys() - there):
            paths = [path for path in here[step].rglob("*") if path.is_file()]
            for path in sorted(paths, key=lambda path: path == here[step] / MARK):
                filesystem.upload(path, filesystem.join_path(self._remote, path.relative_to(self.path).as_posix()))
        self._ours |= here.keys()
        steps = (self._ours | (self._cut - there)) - here.keys()
        gone = [name for name in names if _step(name) in steps]
        for marks in (True, False):  # the marks first, so that none half removed counts
            filesystem.remove_files(self._remote, [name for name in gone if name.endswith(f"/{MARK}") == marks])


def _finished(names: list[str]) -> list[int]:
    marks = [name.split("/") for name in names if name.count("/") == 1 and name.endswith(f"/{MARK}")]
    return sorted(int(step) for step, _ in marks if step.isdigit())


def _step(name: str) -> int:
    first = name.partition("/")[0]
    return int(first) if first.isdigit() else -1


def _wanted(name: str, steps: Collection[int], whole: Collection[int]) -> bool:
    """Tells whether a file of a checkpoint is needed: of all `steps` but those in `whole`, the state is not."""
    step = _step(name)
    return step in whole or (step in steps and name.split("/")[1] != "state")
