"""Checkpoints of a run: the training state, where the data stands, and what the model is. The only user of Orbax."""

import concurrent.futures
import contextlib
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict
from orbax.checkpoint.checkpoint_managers import preservation_policy as preserve

from vit_jax import BUGS, UserError, spool
from vit_jax.spool import FOLDER

# The copies of an array share the work of saving it; for small arrays that would only cost compilations.
_LEAVES = ocp.type_handlers.create_type_handler_registry(
    (jax.Array, ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**22)),
    (np.ndarray, ocp.type_handlers.NumpyHandler()),
)


class Checkpoints:
    """The checkpoints `<workdir>/checkpoints/<step>`, written in the background.

    Kept are the last `checkpoint.keep_last` and the best `checkpoint.keep_best` by `checkpoint.best_metric`; one
    without that metric, or where it is NaN, is never best.
    """

    def __init__(self, config: ConfigDict, workdir: str | Path, here: Path | None = None):
        """Opens the checkpoints of a workdir, those of s3:// in the folder `here`.

        Raises:
            UserError: they are remote, and the store refuses or does not answer.
        """
        self._spool = spool.open_spool(str(workdir), here)
        self._uploader = concurrent.futures.ThreadPoolExecutor(1)
        self._uploading: concurrent.futures.Future | None = None
        self._metric = config.checkpoint.best_metric
        best = preserve.BestN(
            get_metric_fn=_score, n=config.checkpoint.keep_best, keep_checkpoints_without_metrics=False
        )
        keep = preserve.AnyPreservationPolicy([preserve.LatestN(config.checkpoint.keep_last), best])
        options = ocp.CheckpointManagerOptions(preservation_policy=keep, best_fn=_score, cleanup_tmp_directories=True)
        self._folder = spool.folder(workdir)
        path = self._spool.path if self._spool else self._folder
        with _told(self._folder):
            self._manager = ocp.CheckpointManager(path, options=options, item_handlers=_handlers())

    @property
    def latest(self) -> int | None:
        """The last step saved, or None."""
        return self._manager.latest_step()

    def save(self, state: Any, step: int, about: dict[str, Any], metrics: dict[str, float]) -> None:
        """Starts to save the state after `step`, with JSON `about` the model and the data, unless it is there; raises
        what went wrong with the save before.
        """
        self._await_upload()
        if step == self.latest:
            return
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), about=ocp.args.JsonSave(about))
        score = metrics.get(self._metric, -math.inf)
        with _told(self._folder):
            self._manager.save(step, args=items, metrics={"score": -math.inf if math.isnan(score) else score})
        if self._spool:
            self._uploading = self._uploader.submit(self._finish, self._spool)

    def restore(self, step: int, state: Any, shardings: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the state saved after `step`, placed by `shardings`, and what was saved about it."""
        places = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
        kinds = ocp.checkpoint_utils.construct_restore_args(places)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeRestore(places, restore_args=kinds), about=ocp.args.JsonRestore()
        )
        with _told(self._folder):
            restored = self._manager.restore(step, args=items)
        return restored.state, restored.about

    def wait(self) -> None:
        """Waits for what is being saved; raises what went wrong with it."""
        self._await_upload()
        with _told(self._folder):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes saving and ends the background threads."""
        try:
            self._await_upload()
        finally:
            self._uploader.shutdown()
            with _told(self._folder):
                self._manager.close()

    def abandon(self) -> None:
        """Closes without waiting for it: the store does not answer."""

        def close() -> None:
            with contextlib.suppress(Exception):
                self.close()

        threading.Thread(target=close, daemon=True).start()

    def _finish(self, spooled: spool.Spool) -> None:
        with _told(self._folder):
            self._manager.wait_until_finished()
        spooled.push()

    def _await_upload(self) -> None:
        """The manager is for one thread at a time."""
        uploading, self._uploading = self._uploading, None
        if uploading is not None:
            uploading.result()


@contextlib.contextmanager
def _told(folder: str) -> Iterator[None]:
    """Makes a sentence of what goes wrong with the checkpoints of a remote workdir: its store, or the disk from
    which they are uploaded. In a local one it is a bug.
    """
    try:
        yield
    except BUGS:
        raise
    except Exception as error:
        if not spool.is_remote(folder):
            raise
        reason = str(error).strip().partition(" [tensorstore_spec")[0].partition("\n")[0]
        raise UserError(f"the checkpoints in {folder} cannot be used: {reason or type(error).__name__}") from error


def _handlers() -> dict[str, ocp.CheckpointHandler]:
    state = ocp.PyTreeCheckpointHandler(type_handler_registry=_LEAVES)
    return {"state": state, "about": ocp.JsonCheckpointHandler()}


def _score(metrics: dict[str, float]) -> float:
    return metrics["score"]


def find(workdir: Path, best: bool = False) -> Path | None:
    """Returns the folder of the newest (or best) finished checkpoint of a workdir, or None. Writes nothing."""
    folders = workdir / FOLDER
    found = [path for path in folders.iterdir() if path.name.isdigit()] if folders.is_dir() else []
    if not best:
        return max(found, key=lambda path: int(path.name), default=None)
    scores = {path: _score(json.loads((path / "metrics" / "metrics").read_text())) for path in found}
    measured = [path for path in found if scores[path] > -math.inf]
    return max(measured, key=lambda path: (scores[path], int(path.name)), default=None)


def latest(workdir: str) -> int | None:
    """Returns the step of the newest finished checkpoint of a workdir, or None. Writes nothing."""
    if spool.is_remote(workdir):
        return max(spool.finished(workdir), default=None)
    newest = find(Path(workdir))
    return int(newest.name) if newest else None


def here(workdir: str | Path, best: bool = False) -> Path:
    """Returns a local workdir itself, or a copy here of a remote one, with its newest (or best) checkpoint, if any.

    Raises:
        UserError: it is remote and cannot be read.
    """
    if not spool.is_remote(str(workdir)):
        return Path(workdir).expanduser()
    place = str(workdir)
    found = find(spool.bring(place), best)
    return spool.bring(place, int(found.name)) if found else spool.bring(place)


def weights_here(path: str | Path) -> Path:
    """Returns a local path itself, or a copy here of what holds the weights of a remote workdir, checkpoint folder or
    `model.npz`.

    Raises:
        UserError: it is remote and cannot be read.
    """
    return spool.bring_weights(str(path)) if spool.is_remote(str(path)) else Path(path).expanduser()


def is_checkpoint(path: Path) -> bool:
    """Tells whether a folder is one checkpoint."""
    return (path / "state").is_dir() and (path / "about").is_dir()


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the weights of one checkpoint folder as NumPy arrays (the moving average when it was on), and what was
    saved about them, without the optimizer's state.

    Raises:
        UserError: the folder holds no checkpoint.
    """
    if not is_checkpoint(path):
        raise UserError(f"{path} is not a checkpoint: it has no state and about inside.")
    handlers = _handlers() | {"metrics": ocp.JsonCheckpointHandler(filename="metrics")}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as reader:
        described = reader.metadata(path.absolute()).item_metadata.state
        if described is None:
            raise UserError(f"{path} is not a checkpoint: its state is empty.")
        saved = described.tree
        which = "params" if saved["ema"] is None else "ema"
        item = {which: saved[which]}
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        state = ocp.args.PyTreeRestore(item=item, restore_args=kinds, partial_restore=True)
        items = ocp.args.Composite(state=state, about=ocp.args.JsonRestore())
        restored = reader.restore(path.absolute(), args=items)
    return restored.state[which], restored.about
