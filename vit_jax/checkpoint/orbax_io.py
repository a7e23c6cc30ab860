"""Writes and reads the arrays of checkpoints with Orbax. No other module uses Orbax."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from vit_jax.checkpoint.checkpoint_errors import DamagedCheckpoint, damage_errors
from vit_jax.checkpoint.retention import Retention
from vit_jax.storage import check_utf8
from vit_jax.tree import ArrayTree

# The copies of an array share the work of saving it; for small arrays that would only cost compilations.
_LEAVES = ocp.type_handlers.create_type_handler_registry(
    (jax.Array, ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**22)),
    (np.ndarray, ocp.type_handlers.NumpyHandler()),
)


class OrbaxWriter:
    """Writes checkpoints into a folder, one at a time, and removes those that a policy does not preserve."""

    def __init__(self, path: str, preservation_policy: Retention):
        """Opens the folder and removes what was left unfinished there."""
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy,
            cleanup_tmp_directories=True,
            lightweight_initialize=True,
            async_options=ocp.AsyncOptions(barrier_sync_fn=wait_for_hosts),
        )
        self._manager = ocp.CheckpointManager(path, options=options, item_handlers=_handlers())

    def save(self, step: int, state: ArrayTree, manifest: dict[str, Any]) -> None:
        """Copies the state off the devices and starts to write it, with its manifest."""
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), about=ocp.args.JsonSave(manifest))
        self._manager.save(step, args=items)

    def wait(self) -> None:
        """Waits until the checkpoint is finished; only then does Orbax raise what went wrong."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends Orbax's threads."""
        self._manager.close()


def wait_for_hosts(*, key: str, timeout_ms: int) -> None:
    """Waits at one of Orbax's barriers.

    In a background thread that is handling an error, this raises the error instead of waiting: the other hosts wait
    for this one at another barrier.
    """
    error = sys.exc_info()[1]
    if error and threading.current_thread() is not threading.main_thread():
        raise error
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def read_state(
    path: str, check_metadata: Callable[[ArrayTree], None], wanted: ArrayTree, shardings: ArrayTree
) -> ArrayTree:
    """Returns the state of a checkpoint, its arrays placed by `shardings`.

    Args:
        path: the path of the checkpoint.
        check_metadata: takes the tree of shapes and types that Orbax finds; called before an array is read.
        wanted: the shapes and dtypes of the state.
        shardings: the placement of the state.

    Raises:
        DamagedCheckpoint: the checkpoint has no state.
    """
    places = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), wanted, shardings)
    kinds = ocp.checkpoint_utils.construct_restore_args(places)
    with _reader() as reader:
        check_metadata(_metadata(reader, path))
        item = ocp.args.Composite(state=ocp.args.PyTreeRestore(places, restore_args=kinds))
        return jax.block_until_ready(reader.restore(path, args=item).state)


def read_subtree(path: Path, check_metadata: Callable[[ArrayTree], None], which: str) -> dict[str, Any]:
    """Returns the part `which` of a state, such as `params`, as NumPy arrays.

    `check_metadata` is as for `read_state`, but takes the shapes and types of this part only.

    Raises:
        DamagedCheckpoint: the part cannot be read.
        UserError: the disk fails, or the path is not UTF-8.
    """
    check_utf8(str(path.absolute()))
    with damage_errors(str(path.parent)), _reader() as reader:
        saved = {which: _metadata(reader, str(path.absolute()))[which]}
        check_metadata(saved[which])
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
        item = ocp.args.PyTreeRestore(item=saved, restore_args=kinds, partial_restore=True)
        return reader.restore(str(path.absolute()), args=ocp.args.Composite(state=item)).state[which]


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
