"""Where the checkpoints of a workdir lie: in a local folder, on gs://, or on s3:// by way of a local folder."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from vit_jax import UserError
from vit_jax.checkpoint.checkpoint_errors import DamagedCheckpoint
from vit_jax.checkpoint.checkpoint_manifest import parse_manifest
from vit_jax.storage import atomic_write, filesystem

FOLDER = "checkpoints"  # the folder of the checkpoints in a workdir
MANIFEST = "about/metadata"  # the file of the manifest in a checkpoint: what `manifest.add_checksum` made, as JSON
FINISHED = "commit_success.txt"  # the file by which Orbax marks a finished checkpoint on a bucket
SET_ASIDE = "damaged-"  # begins the name of the folder of a checkpoint that was set aside
INCOMPLETE = "it is incomplete: it has no state or no manifest"


@runtime_checkable
class CheckpointDirectory(Protocol):
    """The folder `checkpoints` of a workdir.

    Attributes:
        folder: the path of the folder, for messages.
        path: the local or remote folder in which Orbax reads and writes checkpoints.
    """

    folder: str
    path: str

    def list_steps(self) -> list[int]:
        """Returns the steps of the finished checkpoints, the newest first."""

    def list_set_aside(self) -> list[str]:
        """Returns the names of the folders that were set aside as damaged."""

    def read_manifest(self, step: int) -> dict[str, Any]:
        """Returns the manifest of a checkpoint, without its checksum.

        Raises:
            DamagedCheckpoint: the checkpoint is incomplete, or its manifest is damaged.
            UserError: the manifest cannot be read.
        """

    def write_manifest(self, step: int, manifest: dict[str, Any]) -> None:
        """Replaces the manifest of a checkpoint, completely or not at all. `manifest` includes its checksum.

        Raises:
            UserError: the store refuses or does not answer.
            OSError: the manifest cannot be written to the local disk.
        """

    def fetch(self, step: int) -> None:
        """Makes a checkpoint readable below `path`, by downloading what is missing there.

        Raises:
            UserError: the store refuses or does not answer.
        """

    def publish(self) -> None:
        """Brings `folder` up to date if it is not `path` itself.

        Uploads the finished checkpoints that were written at `path`, and removes those that were removed there.

        Raises:
            UserError: the store refuses or does not answer.
        """

    def set_aside(self, step: int) -> str:
        """Renames the folder of a damaged checkpoint, so that nothing takes it for a good one; returns the new path.

        Raises:
            UserError: the folder cannot be renamed.
        """


class LocalDirectory:
    """A `CheckpointDirectory` on a disk."""

    def __init__(self, folder: Path):
        """Takes a folder, which need not exist."""
        self.folder = self.path = str(folder)

    def list_steps(self) -> list[int]:
        """Returns the steps, the newest first: a local folder is named by its step once Orbax has finished it."""
        folders = Path(self.folder).iterdir() if Path(self.folder).is_dir() else ()
        return sorted((int(path.name) for path in folders if path.name.isdigit()), reverse=True)

    def list_set_aside(self) -> list[str]:
        """Returns the names of the folders that were set aside."""
        return sorted(path.name for path in Path(self.folder).glob(f"{SET_ASIDE}*"))

    def read_manifest(self, step: int) -> dict[str, Any]:
        """Returns the manifest; see `CheckpointDirectory`."""
        return read_manifest(Path(self.folder) / str(step))

    def write_manifest(self, step: int, manifest: dict[str, Any]) -> None:
        """Replaces the manifest; see `CheckpointDirectory`."""
        with atomic_write(Path(self.folder) / str(step) / MANIFEST) as partial:
            partial.write_text(json.dumps(manifest))

    def fetch(self, step: int) -> None:
        """Does nothing."""

    def publish(self) -> None:
        """Does nothing."""

    def set_aside(self, step: int) -> str:
        """Renames the folder; see `CheckpointDirectory`."""
        old, name = Path(self.folder) / str(step), free_name(step, self.list_set_aside())
        try:
            return str(old.rename(Path(self.folder) / name))
        except OSError as error:
            raise UserError(f"cannot rename {old}: {error.strerror or error}") from error


class BucketDirectory:
    """A `CheckpointDirectory` on a bucket that Orbax itself reads and writes: gs://."""

    def __init__(self, folder: str):
        """Takes a folder, which need not exist."""
        self.folder = self.path = folder

    def list_steps(self) -> list[int]:
        """Returns the steps of the finished checkpoints, the newest first."""
        return finished_steps(filesystem.list_files(self.folder))

    def list_set_aside(self) -> list[str]:
        """Returns the names of the folders that were set aside."""
        folders = {name.partition("/")[0] for name in filesystem.list_files(self.folder)}
        return sorted(name for name in folders if name.startswith(SET_ASIDE))

    def read_manifest(self, step: int) -> dict[str, Any]:
        """Returns the manifest; see `CheckpointDirectory`."""
        folder = filesystem.join_path(self.folder, str(step))
        names = filesystem.list_files(folder)
        if MANIFEST not in names or not any(name.startswith("state/") for name in names):
            raise DamagedCheckpoint(INCOMPLETE)
        return parse_manifest(filesystem.read_bytes(filesystem.join_path(folder, MANIFEST)), step)

    def write_manifest(self, step: int, manifest: dict[str, Any]) -> None:
        """Replaces the manifest; see `CheckpointDirectory`."""
        filesystem.write_bytes(filesystem.join_path(self.folder, str(step), MANIFEST), json.dumps(manifest).encode())

    def fetch(self, step: int) -> None:
        """Does nothing."""

    def publish(self) -> None:
        """Does nothing."""

    def set_aside(self, step: int) -> str:
        """Renames the folder; see `CheckpointDirectory`.

        The mark `FINISHED` is the first file that is removed from the old folder. Without it the folder does not count
        as a checkpoint.
        """
        old = filesystem.join_path(self.folder, str(step))
        new = filesystem.join_path(self.folder, free_name(step, self.list_set_aside()))
        filesystem.move_folder(old, sorted(filesystem.list_files(old), key=lambda name: name != FINISHED), new)
        return new


class StagedDirectory:
    """A `CheckpointDirectory` on s3://, where Orbax cannot write.

    Orbax writes to a local folder. Finished checkpoints are uploaded from there; of each checkpoint, the file that
    marks it as finished is uploaded last.
    """

    def __init__(self, folder: str, path: Path):
        """Downloads the finished checkpoints without their states.

        Args:
            folder: the folder of the checkpoints on the bucket.
            path: the local folder, which is created if needed.

        Raises:
            UserError: there are several hosts, or the store refuses or does not answer.
        """
        if jax.process_count() > 1:
            raise UserError(
                f"{folder} can be used by one host only; for a run on several hosts, use gs://BUCKET/... or a folder "
                "that all hosts share."
            )
        self.folder, self.path = folder, str(path)
        self._bucket, self._local = BucketDirectory(folder), LocalDirectory(path)
        names = filesystem.list_files(folder)
        steps = finished_steps(names)
        self._ours = set(steps)
        self._unfinished = {step_of(name) for name in names} - {None} - self._ours  # or being written elsewhere
        path.mkdir(parents=True, exist_ok=True)
        filesystem.download(folder, [name for name in names if is_about(name, steps)], path)

    def list_steps(self) -> list[int]:
        """Returns the steps of the finished checkpoints, the newest first."""
        return self._local.list_steps()

    def list_set_aside(self) -> list[str]:
        """Returns the names of the folders that were set aside."""
        return self._bucket.list_set_aside()

    def read_manifest(self, step: int) -> dict[str, Any]:
        """Returns the manifest; see `CheckpointDirectory`. The state may still be missing: `fetch` downloads it."""
        return read_manifest(Path(self.path) / str(step), needs_state=False)

    def write_manifest(self, step: int, manifest: dict[str, Any]) -> None:
        """Replaces the manifest on the bucket and in the local folder; see `CheckpointDirectory`."""
        self._bucket.write_manifest(step, manifest)
        self._local.write_manifest(step, manifest)

    def fetch(self, step: int) -> None:
        """Downloads the files of a checkpoint that are missing in the local folder; see `CheckpointDirectory`."""
        names = [name for name in filesystem.list_files(self.folder) if step_of(name) == step]
        missing = [name for name in names if not (Path(self.path) / name).exists()]
        filesystem.download(self.folder, missing, Path(self.path))

    def publish(self) -> None:
        """Uploads the finished checkpoints that the bucket lacks, and removes others from the bucket.

        Removed are the checkpoints that were removed from the local folder, and those that were unfinished on the
        bucket at the start and still are. Checkpoints that another process has written meanwhile stay.

        Raises:
            UserError: the store refuses or does not answer.
        """
        names = filesystem.list_files(self.folder)
        here, there = set(self._local.list_steps()), set(finished_steps(names))
        for step in sorted(here - there):
            folder = Path(self.path) / str(step)
            paths = [path for path in folder.rglob("*") if path.is_file()]
            for path in sorted(paths, key=lambda path: path == folder / FINISHED):
                filesystem.upload(path, filesystem.join_path(self.folder, path.relative_to(self.path).as_posix()))
        self._ours |= here
        removed = (self._ours | (self._unfinished - there)) - here
        gone = [name for name in names if step_of(name) in removed]
        for marks in (True, False):  # the marks first, so that nothing half removed counts
            filesystem.remove_files(self.folder, [name for name in gone if name.endswith(f"/{FINISHED}") == marks])

    def set_aside(self, step: int) -> str:
        """Renames the folder on the bucket and the local one; see `CheckpointDirectory`."""
        self._local.set_aside(step)
        return self._bucket.set_aside(step)


def open_directory(workdir: str | Path, staging: Path | None = None) -> CheckpointDirectory:
    """Returns the directory of the checkpoints of a workdir.

    Checkpoints on s3:// can only be saved and restored by way of a local folder, `staging`.

    Raises:
        UserError: see `StagedDirectory`.
    """
    folder = checkpoint_folder(workdir)
    if not filesystem.is_remote(folder):
        return LocalDirectory(Path(folder))
    if staging and folder.startswith("s3://"):
        return StagedDirectory(folder, staging / FOLDER)
    return BucketDirectory(folder)


def checkpoint_folder(workdir: str | Path) -> str:
    """Returns the path of the folder with the checkpoints of a workdir, absolute if it is local."""
    return filesystem.absolute_path(filesystem.join_path(str(workdir), FOLDER))


def is_checkpoint(path: Path) -> bool:
    """Returns whether a local folder is one checkpoint, as far as can be seen without reading it."""
    return (path / "state").is_dir() and (path / MANIFEST).is_file()


def read_manifest(path: Path, needs_state: bool = True) -> dict[str, Any]:
    """Returns the manifest of the checkpoint in a local folder, without its checksum.

    Raises:
        DamagedCheckpoint: the manifest is missing, damaged or of another step than the folder's name says; or the state
            is missing, unless `needs_state` is False.
        UserError: the manifest cannot be read.
    """
    if not (path / MANIFEST).is_file() or (needs_state and not is_checkpoint(path)):
        raise DamagedCheckpoint(INCOMPLETE)
    return parse_manifest(filesystem.read_bytes(str(path / MANIFEST)), int(path.name) if path.name.isdigit() else None)


def finished_steps(names: Iterable[str]) -> list[int]:
    """Returns the steps of the finished checkpoints, the newest first, from the names of all files on a bucket."""
    marks = [name.split("/") for name in names if name.count("/") == 1 and name.endswith(f"/{FINISHED}")]
    return sorted((int(step) for step, _ in marks if step.isdigit()), reverse=True)


def step_of(name: str) -> int | None:
    """Returns the step of the checkpoint to which a file belongs, or None. `name` is relative to the checkpoints."""
    first = name.partition("/")[0]
    return int(first) if first.isdigit() else None


def is_about(name: str, steps: Collection[int | None]) -> bool:
    """Returns whether a file belongs to a checkpoint of one of these steps, but not to its state."""
    return step_of(name) in steps and name.split("/")[1] != "state"


def free_name(step: int, taken: list[str]) -> str:
    """Returns the new name of a damaged checkpoint's folder: `damaged-STEP`, or `damaged-STEP-2` and so on if taken."""
    name, number = f"{SET_ASIDE}{step}", 1
    while name in taken:
        number += 1
        name = f"{SET_ASIDE}{step}-{number}"
    return name
