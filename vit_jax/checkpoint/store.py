"""Where the checkpoints of a workdir lie, and how Orbax writes and reads them. No other module uses Orbax."""

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from vit_jax import UserError
from vit_jax.checkpoint.find import report_damage
from vit_jax.checkpoint.integrity import (
    FINISHED,
    FOLDER,
    MANIFEST,
    DamagedCheckpoint,
    array_shapes,
    check_arrays,
    check_metadata,
    checkpoint_folder,
    damage_errors,
    finished_steps,
    is_beside_state,
    is_checkpoint,
    read_manifest,
    step_folders,
    step_of,
)
from vit_jax.checkpoint.retention import Retention
from vit_jax.models import merge_adapters
from vit_jax.optim import averaged_params, has_average
from vit_jax.storage import check_utf8, filesystem
from vit_jax.tree import ArrayTree

SET_ASIDE = "damaged-"  # begins the name of the folder of a checkpoint that was set aside
ORBAX_BUCKETS = "gs://"  # where Orbax itself can write

# The copies of an array share the work of saving it; for small arrays that would only cost compilations.
_LEAVES = ocp.type_handlers.create_type_handler_registry(
    (jax.Array, ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**22)),
    (np.ndarray, ocp.type_handlers.NumpyHandler()),
)


class CheckpointStore:
    """The folder `checkpoints` of a workdir: on a disk, on gs://, or on s3://, where Orbax cannot write.

    In the last case Orbax writes to a local folder, the stage. Finished checkpoints are uploaded from there; of each
    checkpoint, the file that marks it as finished is uploaded last.

    Attributes:
        folder: the path of the folder.
        path: the folder in which Orbax writes and reads: the stage if there is one, else `folder`.
    """

    def __init__(self, workdir: str | Path, staging: Path | None = None):
        """Takes a workdir, which need not exist. If there is a stage, downloads the checkpoints without their states.

        Args:
            workdir: the folder of the run.
            staging: the local folder that holds the stage, if one is needed; None: nothing will be saved or restored.

        Raises:
            UserError: several hosts need a stage, or the store refuses or does not answer.
        """
        self.folder = self.path = checkpoint_folder(workdir)
        self._manager: ocp.CheckpointManager | None = None
        if staging and filesystem.is_remote(self.folder) and not self.folder.startswith(ORBAX_BUCKETS):
            self.path = str(staging / FOLDER)
            self._open_stage()
        self._is_staged = self.path != self.folder

    def _open_stage(self) -> None:
        if jax.process_count() > 1:
            raise UserError(
                f"{self.folder} can be used by one host only; for a run on several hosts, use gs://BUCKET/... or a "
                "folder that all hosts share."
            )
        names = filesystem.list_files(self.folder)
        steps = finished_steps(names)
        self._ours = set(steps)
        self._unfinished = {step_of(name) for name in names} - {None} - self._ours  # or being written elsewhere
        Path(self.path).mkdir(parents=True, exist_ok=True)
        filesystem.download(self.folder, [name for name in names if is_beside_state(name, steps)], Path(self.path))

    def list_steps(self) -> list[int]:
        """Returns the steps of the finished checkpoints, the newest first.

        A local folder is named by its step once Orbax has finished it. On a bucket, the mark `FINISHED` tells it.
        """
        if filesystem.is_remote(self.path):
            return finished_steps(filesystem.list_files(self.path))
        return sorted((int(path.name) for path in step_folders(Path(self.path))), reverse=True)

    def list_set_aside(self) -> list[str]:
        """Returns the names of the folders that were set aside as damaged."""
        if filesystem.is_remote(self.folder):
            names = {name.partition("/")[0] for name in filesystem.list_files(self.folder)}
            return sorted(name for name in names if name.startswith(SET_ASIDE))
        return sorted(path.name for path in Path(self.folder).glob(f"{SET_ASIDE}*"))

    def read_manifest(self, step: int) -> dict[str, Any]:
        """Returns the manifest of a checkpoint; see `read_manifest`. In a stage, the state may still be missing."""
        return read_manifest(filesystem.join_path(self.path, str(step)), needs_state=not self._is_staged)

    def write_manifest(self, step: int, manifest: dict[str, Any]) -> None:
        """Replaces the manifest of a checkpoint, completely or not at all. `manifest` includes its checksum.

        Raises:
            UserError: the manifest cannot be written.
        """
        for root in dict.fromkeys((self.folder, self.path)):
            filesystem.write_bytes(filesystem.join_path(root, str(step), MANIFEST), json.dumps(manifest).encode())

    def set_aside(self, step: int) -> str:
        """Renames the folder of a damaged checkpoint, so that nothing takes it for a good one; returns the new path.

        On a bucket the mark `FINISHED` is the first file that is removed from the old folder. Without it the folder
        does not count as a checkpoint.

        Raises:
            UserError: the folder cannot be renamed.
        """
        name = free_name(step, self.list_set_aside())
        for root in dict.fromkeys((self.path, self.folder)):
            filesystem.move_folder(
                filesystem.join_path(root, str(step)), filesystem.join_path(root, name), removed_first=FINISHED
            )
        return filesystem.join_path(self.folder, name)

    @property
    def is_open(self) -> bool:
        """Whether `open` was called."""
        return self._manager is not None

    def open(self, retention: Retention) -> None:
        """Prepares to save: removes what was left unfinished. From now on `retention` tells what is kept."""
        options = ocp.CheckpointManagerOptions(
            preservation_policy=retention,
            cleanup_tmp_directories=True,
            lightweight_initialize=True,
            async_options=ocp.AsyncOptions(barrier_sync_fn=wait_for_hosts),
        )
        self._manager = ocp.CheckpointManager(self.path, options=options, item_handlers=_handlers())

    def save(self, step: int, state: ArrayTree, manifest: dict[str, Any]) -> None:
        """Copies the state off the devices and starts to write it, with its manifest, which includes its checksum."""
        assert self._manager
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), about=ocp.args.JsonSave(manifest))
        self._manager.save(step, args=items)

    def finish(self) -> None:
        """Waits until the checkpoint is written, and brings a bucket up to date with its stage.

        Only now does Orbax raise what went wrong.

        Raises:
            UserError: the store refuses or does not answer.
        """
        assert self._manager
        self._manager.wait_until_finished()
        if self._is_staged:
            self._upload_stage()

    def _upload_stage(self) -> None:
        """Uploads the finished checkpoints that the bucket lacks, and removes others from the bucket.

        Removed are the checkpoints that were removed from the stage, and those that were unfinished on the bucket at
        the start and still are. Checkpoints that another process has written meanwhile stay.
        """
        names, stage = filesystem.list_files(self.folder), Path(self.path)
        here, there = set(self.list_steps()), set(finished_steps(names))
        for step in sorted(here - there):
            paths = [path for path in (stage / str(step)).rglob("*") if path.is_file()]
            for path in sorted(paths, key=lambda path: path == stage / str(step) / FINISHED):
                filesystem.upload(path, filesystem.join_path(self.folder, path.relative_to(stage).as_posix()))
        self._ours |= here
        removed = (self._ours | (self._unfinished - there)) - here
        gone = [name for name in names if step_of(name) in removed]
        for marks in (True, False):  # the marks first, so that nothing half removed counts
            filesystem.remove_files(self.folder, [name for name in gone if name.endswith(f"/{FINISHED}") == marks])

    def read_state(self, step: int, manifest: dict[str, Any], wanted: ArrayTree, shardings: ArrayTree) -> ArrayTree:
        """Returns the state of a checkpoint, its arrays placed by `shardings`.

        Args:
            step: the step of the checkpoint. What a stage lacks of it is downloaded.
            manifest: its manifest, by which the shapes and types are checked before an array is read.
            wanted: the shapes and dtypes of the state.
            shardings: the placement of the state.

        Raises:
            DamagedCheckpoint: the state cannot be read, or has other shapes or types than the manifest says.
            UserError: the disk or store fails.
        """
        if self._is_staged:
            names = [name for name in filesystem.list_files(self.folder) if step_of(name) == step]
            missing = [name for name in names if not (Path(self.path) / name).exists()]
            filesystem.download(self.folder, missing, Path(self.path))
        with damage_errors(self.folder):
            return read_arrays(filesystem.join_path(self.path, str(step)), manifest, wanted, shardings)

    def close(self) -> None:
        """Waits, and ends Orbax's threads."""
        if self._manager is not None:
            self._manager.close()


def free_name(step: int, taken: list[str]) -> str:
    """Returns the new name of a damaged checkpoint's folder: `damaged-STEP`, or `damaged-STEP-2` and so on if taken."""
    name, number = f"{SET_ASIDE}{step}", 1
    while name in taken:
        number += 1
        name = f"{SET_ASIDE}{step}-{number}"
    return name


def read_arrays(path: str, manifest: dict[str, Any], wanted: ArrayTree, shardings: ArrayTree) -> ArrayTree:
    """Returns the state in the checkpoint folder `path`; see `CheckpointStore.read_state`. Errors of Orbax pass."""
    places = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), wanted, shardings)
    kinds = ocp.checkpoint_utils.construct_restore_args(places)
    with _reader() as reader:
        check_metadata(manifest, _metadata(reader, path))
        item = ocp.args.Composite(state=ocp.args.PyTreeRestore(places, restore_args=kinds))
        return jax.block_until_ready(reader.restore(path, args=item).state)


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the weights in one checkpoint folder as NumPy arrays, and the checkpoint's manifest.

    They are the weights that a run evaluates: the moving average if the run has one, schedule-free AdamW's average if
    that is the optimizer, else the parameters. Adapters are merged into the kernels.

    Raises:
        UserError: the folder holds no checkpoint, or a damaged one. The message says what is damaged, and which other
            checkpoints the run has.
    """
    if not is_checkpoint(path):
        raise UserError(f"{path} is not a checkpoint: a checkpoint contains `state` and `about`.")
    with report_damage(path):
        manifest = read_manifest(str(path))
        groups = {name.partition("/")[0] for name in manifest["arrays"]}
        weights = _read_group(path, manifest, "ema" if "ema" in groups else "params")
        if has_average(array_shapes(manifest, "opt_state/")):
            opt_state = _read_group(path, manifest, "opt_state")
            weights = averaged_params(weights, opt_state["z"], opt_state["b1"])
    return jax.tree.map(np.asarray, merge_adapters(weights)), manifest


def _read_group(path: Path, manifest: dict[str, Any], which: str) -> dict[str, Any]:
    """Returns one part of a state, such as `params`; raises DamagedCheckpoint unless its arrays are as saved."""
    group = _read_subtree(path, manifest, which)
    check_arrays(manifest, group, f"{which}/")
    return group


def _read_subtree(path: Path, manifest: dict[str, Any], which: str) -> dict[str, Any]:
    """Returns the part `which` of a state, such as `params`, as NumPy arrays.

    Args:
        path: the local folder of the checkpoint.
        manifest: its manifest, by which the shapes and types are checked before an array is read.
        which: the name of the part.

    Raises:
        DamagedCheckpoint: the part cannot be read, or has other shapes or types than the manifest says.
        UserError: the disk fails, or the path is not UTF-8.
    """
    location = str(path.absolute())
    check_utf8(location)
    with damage_errors(str(path.parent)), _reader() as reader:
        saved = {which: _metadata(reader, location)[which]}
        check_metadata(manifest, saved[which], f"{which}/")
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
        item = ocp.args.PyTreeRestore(item=saved, restore_args=kinds, partial_restore=True)
        return reader.restore(location, args=ocp.args.Composite(state=item)).state[which]


def wait_for_hosts(*, key: str, timeout_ms: int) -> None:
    """Waits at one of Orbax's barriers.

    In a background thread that is handling an error, this raises the error instead of waiting: the other hosts wait
    for this one at another barrier.
    """
    error = sys.exc_info()[1]
    if error and threading.current_thread() is not threading.main_thread():
        raise error
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def _handlers(**options: Any) -> dict[str, ocp.CheckpointHandler]:
    state = ocp.PyTreeCheckpointHandler(type_handler_registry=_LEAVES, **options)
    return {"state": state, "about": ocp.JsonCheckpointHandler(**options)}


@contextlib.contextmanager
def _reader() -> Iterator[ocp.Checkpointer]:
    """Yields a reader that waits for no other process, so that a process that fails does not keep others waiting."""
    me = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"read_{me}"
    )
    composite = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
        **_handlers(multiprocessing_options=options),
    )
    with ocp.Checkpointer(composite, multiprocessing_options=options) as reader:
        yield reader


def _metadata(reader: ocp.Checkpointer, path: str) -> ArrayTree:
    state = reader.metadata(path).item_metadata.state
    if state is None:
        raise DamagedCheckpoint("its state is empty")
    return state.tree
