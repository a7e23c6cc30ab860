"""Checkpoints of a run: the training state, where the data stands, and what the model is. The only user of Orbax."""

import concurrent.futures
import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from vit_jax import NonFiniteLoss, UserError
from vit_jax.checkpoint import errors, fingerprint, manifest, retention
from vit_jax.checkpoint.directory import Shelf, find, here, is_checkpoint, latest, others, read_about, weights_here
from vit_jax.checkpoint.manifest import Damaged
from vit_jax.distributed import Share, alone, run_on_all

__all__ = ["Checkpoints", "Restored", "find", "here", "is_checkpoint", "latest", "read_weights", "weights_here"]

# The copies of an array share the work of saving it; for small arrays that would only cost compilations.
_LEAVES = ocp.type_handlers.create_type_handler_registry(
    (jax.Array, ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**22)),
    (np.ndarray, ocp.type_handlers.NumpyHandler()),
)


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a run goes on from.

    Attributes:
        step: updates made.
        state: the training state, placed.
        about: what was saved about it.
        aside: a sentence on each damaged checkpoint that was set aside.
    """

    step: int
    state: Any
    about: dict[str, Any]
    aside: list[str]


class Checkpoints:
    """The checkpoints `<workdir>/checkpoints/<step>`, written in the background.

    Kept are the last `manager.keep_last` and the best `manager.keep_best` by `manager.best_metric` on the
    split and with the preprocessing of its evaluation; see `retention.ranked`.

    Attributes:
        steps: whose checkpoints there are at first, the newest first, damaged or not.
        latest: the last step whose checkpoint is whole, on its disk or store, as far as is known before it is read;
            None: there is none yet.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: str | Path,
        here: Path | None = None,
        share: Share = alone,
        evaluations: retention.Evaluations | None = None,
        scores_are_named: bool = False,
    ):
        """Looks at the checkpoints of a workdir. Writes nothing there.

        Args:
            config: of the run.
            workdir: its folder.
            here: a folder here by way of which those of s3:// are read and written.
            share: how the hosts agree.
            evaluations: what they look at; None: only what the configuration says of it is known.
            scores_are_named: scores without a name, of version 0.1.0, are of `manager.best_metric` as it is now.

        Raises:
            UserError: they are remote, and the store refuses or does not answer; or there are none but such as were
                set aside as damaged.
        """
        self._share = share
        self._shelf = Shelf(str(workdir), here)
        keep, self._scores_are_named = config.checkpoint, scores_are_named
        self._metric, self._evaluations = keep.best_metric, evaluations or _told(config)
        measure = retention.measure_of(self._evaluations, self._metric)
        self._retention = retention.Retention(keep.keep_last, keep.keep_best, measure)
        self._writer = concurrent.futures.ThreadPoolExecutor(1)
        self._writing: list[concurrent.futures.Future] = []  # in their order
        self._manager_: ocp.CheckpointManager | None = None
        self._failed = False
        self._about: dict[str, Any] = {}  # what the newest checkpoint says of itself
        look = self._survey if jax.process_index() == 0 else lambda: ""  # the first host's list decides
        found = json.loads(run_on_all(self._share, "checkpoints", look)[0])
        self.steps: list[int] = found["steps"]
        self._bare = [int(step) for step, about in found["evaluations"].items() if "metrics" not in about]
        for step, about in found["evaluations"].items():
            self._retention.measured[int(step)] = retention.from_json(self._named(about))
        self.latest: int | None = max(self._retention.measured, default=None)
        if found["aside"] and not self.steps:
            raise UserError(
                f"{workdir} holds no checkpoint to go on from, only such as were set aside as damaged "
                f"({manifest.listed(found['aside'])}). To start anew, remove them or choose a new --workdir."
            )

    def save(self, state: Any, step: int, about: dict[str, Any]) -> None:
        """Starts to save the state after `step`, with JSON `about` the model and the data, unless it is there.

        Raises:
            UserError: the disk or store does not take it, or did not take the one saved before.
            NonFiniteLoss: a value of the state is NaN or infinite; nothing is written.
        """
        self.wait()
        if step == self.latest:
            return
        marks = fingerprint.marks(state)
        if bad := [name for name, mark in marks.items() if not mark.finite]:
            raise NonFiniteLoss(
                f"after step {step} the state is not finite in {manifest.listed(bad)}; it was not saved, and "
                f"{self._last_good()}."
            )
        arrays = manifest.table(state, marks)
        self._about = about | {"step": step, **self._evaluated({}), "arrays": arrays}
        sealed = manifest.sealed(self._about)
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), about=ocp.args.JsonSave(sealed))
        self._retention.measured[step] = retention.from_json(self._about)
        with self._saving():
            self._manager.save(step, args=items)
        self._writing.append(self._writer.submit(self._finish, step))

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """Starts to add what was measured of the newest checkpoint, saved or restored, once that is whole."""
        self._about |= self._evaluated(metrics)
        self._retention.measured[self._about["step"]] = retention.from_json(self._about)
        self._writing.append(self._writer.submit(self._write_about, dict(self._about)))

    def poll(self) -> None:
        """Raises what went wrong with the checkpoint that is being written, as soon as it is known. Costs nothing."""
        while self._writing and self._writing[0].done():
            self._take_result()

    def wait(self) -> None:
        """Waits for what is being saved, since Orbax's manager is for one thread at a time; raises what went wrong."""
        while self._writing:
            self._take_result()

    def restore(
        self, wanted: Any, shardings: Any, accept: Callable[[dict[str, Any]], object] = bool
    ) -> Restored | None:
        """Returns the newest state that is whole, its arrays placed by `shardings`, or None if there is no checkpoint.

        Those found damaged are set aside, as soon as one before them was found to be good.

        Args:
            wanted: shapes of the state.
            shardings: placement of the state.
            accept: is given what a checkpoint says of itself before its state is read; what it raises is raised.

        Raises:
            UserError: all are damaged, the state is of another program, or the disk or store does not let it be read.
        """
        damage: dict[int, str] = {}
        for step in self.steps:
            try:
                state, about = self._read(step, wanted, shardings, accept)
            except Damaged as error:
                damage[step] = str(error)
                continue
            aside = json.loads(run_on_all(self._share, "set aside", lambda: self._set_aside(damage))[0])
            self.latest, self._about = step, about
            return Restored(step, state, about, aside)
        if damage:
            told = "; ".join(f"{step}: {reason}" for step, reason in damage.items())
            raise UserError(
                f"every checkpoint in {self._shelf.folder} is damaged ({told}). Nothing was changed there. Put an "
                "intact copy in its place, or choose a new --workdir: a run never starts anew by itself."
            )
        return None

    def open(self) -> None:
        """Prepares to save.

        Raises:
            UserError: the disk or store refuses or does not answer.
        """
        if self._manager_ is None:
            with self._saving():
                options = ocp.CheckpointManagerOptions(
                    preservation_policy=self._retention, cleanup_tmp_directories=True, lightweight_initialize=True
                )
                self._manager_ = ocp.CheckpointManager(self._shelf.path, options=options, item_handlers=_handlers())
                for step in self._bare if self._scores_are_named else ():
                    self._write_name(step)

    def close(self) -> None:
        """Finishes saving and ends the background threads."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            if self._manager_ is not None:  # it says again what was raised already
                with contextlib.suppress(Exception) if self._failed else self._saving():
                    self._manager_.close()

    def abandon(self) -> None:
        """Closes without waiting for it: the store does not answer."""

        def close() -> None:
            with contextlib.suppress(Exception):
                self.close()

        threading.Thread(target=close, daemon=True).start()

    @property
    def _manager(self) -> ocp.CheckpointManager:
        self.open()
        assert self._manager_ is not None
        return self._manager_

    def _finish(self, step: int) -> None:
        """Waits, in the background, until a checkpoint is whole: only then Orbax tells what went wrong."""
        with self._saving():
            self._manager.wait_until_finished()
            self._shelf.push()
        self.latest = step

    def _write_about(self, about: dict[str, Any]) -> None:
        """Replaces, in the background, what the newest checkpoint says of itself."""
        if self.latest == about["step"]:  # or it could not be written
            with self._saving():
                self._shelf.write_about(about["step"], manifest.sealed(about))

    def _take_result(self) -> None:
        """Waits for what has been begun first."""
        writing = self._writing.pop(0)
        self._failed |= writing.exception() is not None
        writing.result()

    def _evaluated(self, metrics: dict[str, float]) -> dict[str, Any]:
        return retention.to_json(self._evaluations, self._metric, metrics)

    def _named(self, about: dict[str, Any]) -> dict[str, Any]:
        """Returns what a checkpoint of version 0.1.0 says of itself with the name of its score, if that is known."""
        if "metrics" in about or not self._scores_are_named:
            return about
        metrics = {} if about["score"] is None else {self._metric: about["score"]}
        return about | self._evaluated(metrics) | {"evaluated": about["evaluated"]}

    def _write_name(self, step: int) -> None:
        """Writes the name of its score into a checkpoint: later the configuration may be another."""
        with contextlib.suppress(Damaged):  # it was set aside
            self._shelf.write_about(step, manifest.sealed(self._named(self._shelf.about(step))))

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Tells, of what goes wrong while saving, what there is to go on from."""
        try:
            with errors.told(self._shelf.folder, "written"):
                yield
        except UserError as error:
            self._failed = True
            raise type(error)(f"{str(error).rstrip('.')}; {self._last_good()}.") from error

    def _last_good(self) -> str:
        return "there is no checkpoint yet" if self.latest is None else f"the last good checkpoint is {self.latest}"

    def _survey(self) -> str:
        """Returns, as JSON, the steps, the newest first; of those that look whole, what was measured; and what was set
        aside before.
        """
        evaluations = {}
        with errors.told(self._shelf.folder, "read"):
            steps, aside = self._shelf.steps(), self._shelf.aside()
            for step in steps:
                with contextlib.suppress(Damaged):  # told when it is to be read
                    about = self._shelf.about(step)
                    evaluations[step] = {key: value for key, value in about.items() if key not in ("arrays", "model")}
        return json.dumps({"steps": steps, "evaluations": evaluations, "aside": aside})

    def _read(self, step: int, wanted: Any, shardings: Any, accept: Callable) -> tuple[Any, dict[str, Any]]:
        """Returns a state and what was saved about it. All hosts read, or none goes on.

        Raises:
            Damaged: on whichever host.
            UserError: likewise.
        """
        read: list[Any] = []

        def attempt() -> str:
            about = self._shelf.about(step)
            accept(about)
            manifest.check_wanted(about, wanted, f"{self._shelf.folder}/{step}")
            self._shelf.bring(step)
            with errors.reading(self._shelf.folder):
                read[:] = _read_state(f"{self._shelf.path}/{step}", about, wanted, shardings), about
            return ""

        self._sound(f"read {step}", attempt)
        state, about = read
        self._sound(f"compare {step}", lambda: manifest.check_arrays(about, state))
        return state, about

    def _sound(self, topic: str, work: Callable[[], object]) -> None:
        """Raises Damaged on every host if `work` does on one."""

        def attempt() -> str:
            try:
                work()
            except Damaged as error:
                return str(error)
            return ""

        if reasons := list(dict.fromkeys(filter(None, run_on_all(self._share, topic, attempt)))):
            raise Damaged("; ".join(reasons))

    def _set_aside(self, damage: dict[int, str]) -> str:
        """Renames the folders of damaged checkpoints, on the first host; returns, as JSON, a sentence on each."""
        told = []
        for step, reason in damage.items() if jax.process_index() == 0 else ():
            new = self._shelf.set_aside(step)
            told.append(f"checkpoint {step} is damaged and was set aside as {new}: {reason}.")
        return json.dumps(told)


def _told(config: ConfigDict) -> retention.Evaluations:
    """Returns what a configuration says of its evaluations."""
    return {name: {"split": e.split, "preprocess": e.preprocess, "contents": ""} for name, e in config.evals.items()}


def _handlers(**options: Any) -> dict[str, ocp.CheckpointHandler]:
    state = ocp.PyTreeCheckpointHandler(type_handler_registry=_LEAVES, **options)
    return {"state": state, "about": ocp.JsonCheckpointHandler(**options)}


@contextlib.contextmanager
def _reader() -> Iterator[ocp.Checkpointer]:
    """Gives a reader that waits for no other process, so that one that fails leaves none waiting."""
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


def _described(reader: ocp.Checkpointer, path: str) -> Any:
    described = reader.metadata(path).item_metadata.state
    if described is None:
        raise Damaged("its state is empty")
    return described.tree


def _read_state(path: str, about: dict[str, Any], wanted: Any, shardings: Any) -> Any:
    places = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), wanted, shardings)
    kinds = ocp.checkpoint_utils.construct_restore_args(places)
    with _reader() as reader:
        manifest.check_described(about, _described(reader, path))
        item = ocp.args.Composite(state=ocp.args.PyTreeRestore(places, restore_args=kinds))
        return jax.block_until_ready(reader.restore(path, args=item).state)


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the weights of one checkpoint folder as NumPy arrays (the moving average when it was on), and what was
    saved about them, without the optimizer's state.

    Raises:
        UserError: the folder holds no checkpoint, or a damaged one: says in what, and which others there are.
    """
    if not is_checkpoint(path):
        raise UserError(f"{path} is not a checkpoint: it has no state and about inside.")
    try:
        about = read_about(path)
        which = "ema" if any(name.startswith("ema/") for name in about["arrays"]) else "params"
        with errors.reading(str(path.parent)), _reader() as reader:
            saved = {which: _described(reader, str(path.absolute()))[which]}
            manifest.check_described(about, saved[which], f"{which}/")
            kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
            item = ocp.args.PyTreeRestore(item=saved, restore_args=kinds, partial_restore=True)
            weights = reader.restore(str(path.absolute()), args=ocp.args.Composite(state=item)).state[which]
        manifest.check_arrays(about, weights, f"{which}/")
    except Damaged as error:
        raise UserError(f"the checkpoint {path} is damaged: {error}{others(path)}") from error
    return weights, about
