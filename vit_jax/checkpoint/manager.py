"""Saves and restores the checkpoints of a run."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax import NonFiniteLoss, UserError
from vit_jax.checkpoint import retention
from vit_jax.checkpoint.background import BackgroundTasks
from vit_jax.checkpoint.checkpoint_errors import DamagedCheckpoint, storage_errors
from vit_jax.checkpoint.checkpoint_manifest import add_checksum, describe_arrays, list_names
from vit_jax.checkpoint.directory import open_directory
from vit_jax.checkpoint.orbax_io import OrbaxWriter
from vit_jax.checkpoint.restore import Restored, restore_newest
from vit_jax.distributed import SINGLE_HOST, Coordinator, run_on_all
from vit_jax.tree import ArrayTree


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
        self._directory = open_directory(workdir, staging)
        keep, self._scores_are_named = config.checkpoint, scores_are_named
        self._metric = keep.best_metric
        self._evaluations = evaluations or retention.evaluations_of(config)
        measure = retention.define_score(self._evaluations, self._metric)
        self._retention = retention.Retention(keep.keep_last, keep.keep_best, measure)
        self._tasks = BackgroundTasks()
        self._writer: OrbaxWriter | None = None
        self._manifest: dict[str, Any] = {}  # of the newest checkpoint
        look = self._list if jax.process_index() == 0 else lambda: None  # the list of host 0 decides
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
        if self._writer is None:
            with self._writing():
                self._writer = OrbaxWriter(self._directory.path, self._retention)
                for step in self._older:
                    self._name_score(step)

    def save(self, state: ArrayTree, step: int, about: dict[str, Any]) -> None:
        """Starts to save the state after `step`, once the checkpoint before it is finished.

        Does nothing if `step` is `latest`. `about` is JSON that describes the model and the data.

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
        self._manifest = about | {"step": step, **self._evaluation({}), "arrays": arrays}
        self._retention.scores[step] = retention.from_json(self._manifest)
        self.open()
        assert self._writer
        with self._writing():
            self._writer.save(step, state, add_checksum(self._manifest))
        self._tasks.start(self._finish, step)

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """Adds metrics to the newest checkpoint, saved or restored, in the background once it is finished."""
        self._manifest |= self._evaluation(metrics)
        self._retention.scores[self._manifest["step"]] = retention.from_json(self._manifest)
        self._tasks.start(self._write_manifest, dict(self._manifest))

    def poll(self) -> None:
        """Raises the error of a save in the background, if one has failed. Does not wait."""
        self._tasks.poll()

    def wait(self) -> None:
        """Waits until nothing is being saved, since one thread at a time may use Orbax. Raises errors of saving."""
        self._tasks.wait()

    def restore(
        self, wanted: ArrayTree, shardings: ArrayTree, check_manifest: Callable[[dict[str, Any]], object] = bool
    ) -> Restored | None:
        """Returns the newest state that is intact, or None if there is no checkpoint; see `restore_newest`."""
        restored = restore_newest(self._directory, self.steps, self._coordinator, wanted, shardings, check_manifest)
        if restored:
            self.latest, self._manifest = restored.step, restored.about
        return restored

    def close(self) -> None:
        """Finishes saving and ends the background threads. Raises the error of a save that failed."""
        try:
            self.wait()
        finally:
            self._tasks.close()
            if self._writer is not None:  # after a failure it raises again what was raised already
                with contextlib.suppress(Exception) if self._tasks.failed else self._writing():
                    self._writer.close()

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
        with storage_errors(self._directory.folder, "read"):
            steps, set_aside = self._directory.list_steps(), self._directory.list_set_aside()
            for step in steps:
                with contextlib.suppress(DamagedCheckpoint):  # it is reported when the checkpoint is to be read
                    manifest = self._directory.read_manifest(step)
                    manifests[step] = {key: value for key, value in manifest.items() if key not in ("arrays", "model")}
        return {"steps": steps, "manifests": manifests, "set_aside": set_aside}

    def _finish(self, step: int) -> None:
        """Waits, in the background, until a checkpoint is finished, uploads it if need be, and sets `latest`."""
        assert self._writer
        with self._writing():
            self._writer.wait()
            self._directory.publish()
        self.latest = step

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replaces, in the background, the manifest of the newest checkpoint, if it is finished and this is host 0."""
        if self.latest == manifest["step"] and jax.process_index() == 0:  # else it could not be written
            with self._writing():
                self._directory.write_manifest(manifest["step"], add_checksum(manifest))

    def _evaluation(self, metrics: dict[str, float]) -> dict[str, Any]:
        return retention.to_json(self._evaluations, self._metric, metrics)

    def _named(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if self._scores_are_named:
            manifest = retention.name_score(manifest, self._evaluations, self._metric)
        return retention.add_samples(manifest, self._evaluations)

    def _name_score(self, step: int) -> None:
        """Writes into a checkpoint what its score measures: the configuration or the images may be others later."""
        if jax.process_index() == 0:
            with contextlib.suppress(DamagedCheckpoint):  # it was set aside
                manifest = self._named(self._directory.read_manifest(step))
                self._directory.write_manifest(step, add_checksum(manifest))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Adds to a `UserError` raised while saving which checkpoint a run can resume from; see `storage_errors`."""
        try:
            with storage_errors(self._directory.folder, "written"):
                yield
        except UserError as error:
            self._tasks.failed = True
            raise type(error)(f"{str(error).rstrip('.')}; {self._describe_latest()}.") from error

    def _describe_latest(self) -> str:
        return "there is no checkpoint yet" if self.latest is None else f"the last good checkpoint is {self.latest}"
