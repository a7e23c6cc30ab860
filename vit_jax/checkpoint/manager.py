"""Saves and restores the checkpoints of a run."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax import NonFiniteLoss, UserError
from vit_jax.checkpoint import retention
from vit_jax.checkpoint.integrity import (
    DamagedCheckpoint,
    add_checksum,
    check_arrays,
    check_program,
    describe_arrays,
    list_names,
    storage_errors,
)
from vit_jax.checkpoint.store import CheckpointStore
from vit_jax.config import is_lowest_best
from vit_jax.distributed import SINGLE_HOST, Coordinator, run_on_all
from vit_jax.tree import ArrayTree


@dataclasses.dataclass(frozen=True)
class Restored:
    """The checkpoint from which a run is resumed.

    Attributes:
        step: the number of updates that the run had made.
        state: the training state, placed on the mesh.
        manifest: the manifest of the checkpoint.
        set_aside: a sentence on each damaged checkpoint that was set aside.
    """

    step: int
    state: ArrayTree
    manifest: dict[str, Any]
    set_aside: list[str]


class BackgroundTasks:
    """Tasks that one thread runs in the order in which they were started. `poll` and `wait` raise their errors.

    Attributes:
        failed: whether `poll` or `wait` has raised an error. The owner of the tasks may set it earlier.
    """

    def __init__(self) -> None:
        """Starts no thread yet."""
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._begun: list[concurrent.futures.Future] = []
        self.failed = False

    def start(self, task: Callable[..., None], *args: Any) -> None:
        """Adds a task: the call `task(*args)`."""
        self._begun.append(self._thread.submit(task, *args))

    def poll(self) -> None:
        """Raises the error of a task that is over, if it failed. Does not wait."""
        while self._begun and self._begun[0].done():
            self._take_result()

    def wait(self) -> None:
        """Waits for the tasks in their order. Raises the error of the first that failed, before later ones are over."""
        while self._begun:
            self._take_result()

    def close(self) -> None:
        """Waits for all tasks and ends the thread. Raises no errors of tasks."""
        self._thread.shutdown()

    def _take_result(self) -> None:
        first = self._begun.pop(0)
        self.failed |= first.exception() is not None
        first.result()


class Checkpoints:
    """The checkpoints `<workdir>/checkpoints/<step>`, written in the background.

    The newest `checkpoint.keep_last` checkpoints are kept, and the best `checkpoint.keep_best` by
    `checkpoint.best_metric`. Only values from the same evaluation (split, preprocessing and images) are compared; see
    `retention.ranked`.

    Attributes:
        steps: the steps of the checkpoints that the workdir had at first, the newest first, damaged or not.
        latest: the newest step with a finished checkpoint, or None. Until it is read, only its manifest is known to be
            intact.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: str | Path,
        staging: Path | None = None,
        coordinator: Coordinator = SINGLE_HOST,
        evaluations: retention.Evaluations | None = None,
        scores_are_named: bool = False,
    ):
        """Lists the checkpoints of a workdir and reads their manifests. Writes nothing to the workdir.

        Args:
            config: the configuration of the run.
            workdir: the folder of the run.
            staging: a local folder by way of which checkpoints on s3:// are read and written.
            coordinator: how the hosts agree.
            evaluations: what the evaluations look at; None: as far as `config` states it.
            scores_are_named: whether scores without a name, which version 0.1.0 wrote, are taken for values of the
                present `checkpoint.best_metric`.

        Raises:
            UserError: the store refuses or does not answer, all checkpoints were set aside as damaged, or several hosts
                use s3://.
        """
        self._coordinator = coordinator
        self._store = CheckpointStore(workdir, staging)
        keep, self._scores_are_named = config.checkpoint, scores_are_named
        self._metric, self._lowest = keep.best_metric, is_lowest_best(config)
        self._evaluations = evaluations or retention.evaluations_of(config)
        measure = retention.define_score(self._evaluations, self._metric)
        self._retention = retention.Retention(keep.keep_last, keep.keep_best, measure, self._lowest)
        self._tasks = BackgroundTasks()
        self._damage: dict[int, str] = {}  # step -> why its checkpoint cannot be restored
        self._manifest: dict[str, Any] = {}  # of the newest checkpoint
        # The list of host 0 decides. JAX may number the processes otherwise, which does not matter for what one writes.
        look = self._list if coordinator.host == 0 else lambda: None
        listing = run_on_all(coordinator, "checkpoints", look)[0]
        self.steps: list[int] = listing["steps"]
        self._older: list[int] = []  # steps whose manifests lack what is now known of their scores
        for step, manifest in listing["manifests"].items():
            named = self._named(manifest)
            self._retention.scores[int(step)] = retention.from_json(named)
            self._older += [int(step)] if named != manifest else []
        self.latest: int | None = max(self._retention.scores, default=None)
        if listing["set_aside"] and not self.steps:
            raise UserError(
                f"all checkpoints in {workdir} are damaged and were renamed ({list_names(listing['set_aside'])}). To "
                "train from step 0, choose a new --workdir, or move the files of this one to another folder."
            )

    def open(self) -> None:
        """Prepares to save: opens Orbax's writer, and adds to older manifests what their scores measure.

        Raises:
            UserError: the disk or store refuses or does not answer.
        """
        if not self._store.is_open:
            with self._save_errors():
                self._store.open(self._retention)
                for step in self._older:
                    self._name_score(step)

    def save(self, state: ArrayTree, step: int, manifest: dict[str, Any]) -> None:
        """Starts to save the state after `step`, once the checkpoint before it is finished.

        Does nothing if `step` is `latest`. `manifest` is the part of the manifest that describes the model and the
        data; the rest is added here.

        Raises:
            UserError: the disk or store refuses the checkpoint, or refused the one before it.
            NonFiniteLoss: a value of the state is NaN or infinite; nothing is written.
        """
        self.wait()
        if step == self.latest:
            return
        arrays, nonfinite = describe_arrays(state)
        if nonfinite:
            raise NonFiniteLoss(
                f"after step {step} the state has infinite or NaN values in {list_names(nonfinite)} and was not saved; "
                f"{self._describe_latest()}. Lower base_lr, or set grad_norm_clip."
            )
        self._manifest = manifest | {"step": step, **self._evaluation({}), "arrays": arrays}
        self._retention.scores[step] = retention.from_json(self._manifest)
        self.open()
        with self._save_errors():
            self._store.save(step, state, add_checksum(self._manifest))
        self._tasks.start(self._finish, step)

    def add_metrics(self, metrics: dict[str, float], more: dict[str, Any] | None = None) -> None:
        """Adds metrics to the newest checkpoint, saved or restored, in the background once it is finished.

        `more` replaces further entries of its manifest.
        """
        self._manifest |= self._evaluation(metrics) | (more or {})
        self._retention.scores[self._manifest["step"]] = retention.from_json(self._manifest)
        self._tasks.start(self._write_manifest, dict(self._manifest))

    def poll(self) -> None:
        """Raises the error of a save in the background, if one has failed. Does not wait."""
        self._tasks.poll()

    def wait(self) -> None:
        """Waits until nothing is being saved, since one thread at a time may use Orbax. Raises errors of saving."""
        self._tasks.wait()

    def candidates(self) -> Iterator[dict[str, Any]]:
        """Yields the manifest of the newest checkpoint, for the caller to check before its state is restored.

        If `restore` finds the checkpoint damaged, the manifest of the one before follows, and so on. Nothing is yielded
        if there is no checkpoint. Every host must ask for the same number of manifests.

        Raises:
            UserError: all checkpoints are damaged, or some host cannot read one.
        """
        for step in self.steps:
            try:
                manifest = self._run_intact(f"manifest {step}", functools.partial(self._store.read_manifest, step))
            except DamagedCheckpoint as error:
                self._damage[step] = str(error)
            else:
                yield manifest
        if self._damage:
            reasons = "; ".join(f"{step}: {reason}" for step, reason in self._damage.items())
            raise UserError(
                f"every checkpoint in {self._store.folder} is damaged ({reasons}). Nothing was changed there. Put an "
                "intact copy in its place, or choose a new --workdir: a run never restarts from step 0 automatically."
            )

    def restore(self, manifest: dict[str, Any], wanted: ArrayTree, shardings: ArrayTree) -> Restored | None:
        """Returns the state of a checkpoint, or None, on every host, if it is damaged on some host.

        The damaged checkpoints that were tried before are set aside once an older one was found to be intact. If all
        are damaged, none is. Every host must call it.

        Args:
            manifest: the manifest of the checkpoint, from `candidates`.
            wanted: the shapes and dtypes of the state.
            shardings: the placement of the state.

        Raises:
            UserError: the arrays are not those of `wanted`, or the disk or store of some host fails.
        """
        step = manifest["step"]

        def read() -> ArrayTree:
            check_program(manifest, wanted, f"{self._store.folder}/{step}")
            return self._store.read_state(step, manifest, wanted, shardings)

        try:
            state = self._run_intact(f"read {step}", read)
            self._run_intact(f"compare {step}", lambda: check_arrays(manifest, state))
        except DamagedCheckpoint as error:
            self._damage[step] = str(error)
            return None
        work = self._set_aside if self._coordinator.host == 0 else list
        set_aside = run_on_all(self._coordinator, "set aside", work)[0]
        self.latest, self._manifest = step, manifest
        return Restored(step, state, manifest, set_aside)

    @property
    def best(self) -> int | None:
        """The step of the best checkpoint; None: no checkpoint has a score."""
        return next(iter(self._retention.best_first()), None)

    def ranks_like(self, manifest: dict[str, Any]) -> bool:
        """Returns whether a checkpoint was saved by a run that ranked by the same score as now."""
        return self._retention.ranks_like(retention.from_json(self._named(manifest)))

    def restore_best(self, wanted: ArrayTree, shardings: ArrayTree) -> Restored:
        """Returns the best checkpoint that is intact on all hosts; saves go on from the newest one as before.

        The arguments are those of `restore`. Every host must call it.

        Raises:
            UserError: a save failed, no checkpoint with a score is intact, or the disk or store of some host fails.
        """
        self.wait()
        for step in self._retention.best_first():
            try:
                manifest = self._run_intact(f"manifest of {step}", functools.partial(self._store.read_manifest, step))
                read = functools.partial(self._store.read_state, step, manifest, wanted, shardings)
                state = self._run_intact(f"read best {step}", read)
                self._run_intact(f"compare best {step}", functools.partial(check_arrays, manifest, state))
            except DamagedCheckpoint as error:
                self._damage[step] = str(error)
            else:
                return Restored(step, state, manifest, [])
        reasons = "; ".join(f"{step}: {reason}" for step, reason in self._damage.items())
        raise UserError(
            f"no checkpoint in {self._store.folder} can be exported ({reasons}); put an intact copy in its place, and "
            "run the same command again."
        )

    def close(self) -> None:
        """Finishes saving and ends the background threads. Raises the error of a save that failed."""
        try:
            self.wait()
        finally:
            self._tasks.close()
            # After a failure Orbax raises again what was raised already.
            with contextlib.suppress(Exception) if self._tasks.failed else self._save_errors():
                self._store.close()

    def abandon(self, finish: Callable[[], None]) -> None:
        """Closes in a thread, because the store does not answer, and ignores errors. The thread then calls `finish`."""

        def close() -> None:
            with contextlib.suppress(Exception):
                self.close()
            finish()

        threading.Thread(target=close, daemon=True).start()

    def _list(self) -> dict[str, Any]:
        """Returns what the folder of the checkpoints contains.

        Returns:
            `steps`, the newest first; `manifests`: step -> manifest without arrays and model, for the checkpoints that
            look intact; and `set_aside`, the names of the folders that were set aside.
        """
        manifests = {}
        with storage_errors(self._store.folder, "read"):
            steps, set_aside = self._store.list_steps(), self._store.list_set_aside()
            for step in steps:
                with contextlib.suppress(DamagedCheckpoint):  # it is reported when the checkpoint is to be read
                    manifest = self._store.read_manifest(step)
                    manifests[step] = {key: value for key, value in manifest.items() if key not in ("arrays", "model")}
        return {"steps": steps, "manifests": manifests, "set_aside": set_aside}

    def _run_intact(self, topic: str, work: Callable[[], Any]) -> Any:
        """Returns what `work()` returns on this host.

        Raises:
            DamagedCheckpoint: on every host, if `work` raised it on one.
        """
        results = []

        def attempt() -> str | None:
            try:
                results.append(work())
            except DamagedCheckpoint as error:
                return str(error)
            return None

        if reasons := list(dict.fromkeys(filter(None, run_on_all(self._coordinator, topic, attempt)))):
            raise DamagedCheckpoint("; ".join(reasons))
        return results[0]

    def _set_aside(self) -> list[str]:
        """Renames the folders of the damaged checkpoints; returns a sentence on each."""
        return [
            f"checkpoint {step} is damaged and was renamed to {self._store.set_aside(step)}: {reason}."
            for step, reason in self._damage.items()
        ]

    def _finish(self, step: int) -> None:
        """Waits, in the background, until a checkpoint is finished, uploads it if need be, and sets `latest`."""
        with self._save_errors():
            self._store.finish()
        self.latest = step

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replaces, in the background, the manifest of the newest checkpoint, if it is finished and this is host 0."""
        if self.latest == manifest["step"] and jax.process_index() == 0:  # else it could not be written
            with self._save_errors():
                self._store.write_manifest(manifest["step"], add_checksum(manifest))

    def _evaluation(self, metrics: dict[str, float]) -> dict[str, Any]:
        return retention.to_json(self._evaluations, self._metric, metrics, self._lowest)

    def _named(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if self._scores_are_named:
            manifest = retention.name_score(manifest, self._evaluations, self._metric)
        return retention.add_samples(manifest, self._evaluations)

    def _name_score(self, step: int) -> None:
        """Writes into a checkpoint what its score measures: the configuration or the images may be others later."""
        if jax.process_index() == 0:
            with contextlib.suppress(DamagedCheckpoint):  # it was set aside
                manifest = self._named(self._store.read_manifest(step))
                self._store.write_manifest(step, add_checksum(manifest))

    @contextlib.contextmanager
    def _save_errors(self) -> Iterator[None]:
        """Adds to a `UserError` raised while saving which checkpoint a run can resume from; see `storage_errors`."""
        try:
            with storage_errors(self._store.folder, "written"):
                yield
        except UserError as error:
            self._tasks.failed = True
            raise type(error)(f"{str(error).rstrip('.')}; {self._describe_latest()}.") from error

    def _describe_latest(self) -> str:
        return "there is no checkpoint yet" if self.latest is None else f"the last good checkpoint is {self.latest}"
