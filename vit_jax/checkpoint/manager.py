"""Checkpoints of a run: the training state, where the data stands, and what the model is."""

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
from vit_jax.checkpoint.directory import open_directory
from vit_jax.checkpoint.errors import DamagedCheckpoint, storage_errors
from vit_jax.checkpoint.manifest import add_checksum, describe_arrays, list_names
from vit_jax.checkpoint.orbax_io import OrbaxWriter
from vit_jax.checkpoint.restore import Restored, restore_newest
from vit_jax.distributed import SINGLE_HOST, Coordinator, run_on_all
from vit_jax.tree import ArrayTree


class Checkpoints:
    """The checkpoints `<workdir>/checkpoints/<step>`, written in the background.

    The last `checkpoint.keep_last` are kept, and the best `checkpoint.keep_best` by `checkpoint.best_metric` on the
    split and with the preprocessing of its evaluation; see `retention.ranked`.

    Attributes:
        steps: of the checkpoints that were there at first, the newest first, damaged or not.
        latest: the last step whose checkpoint is finished, as far as is known before it is read; None: there is none.
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
        """Looks at the checkpoints of a workdir. Writes nothing there.

        Args:
            config: of the run.
            workdir: its folder.
            staging: a local folder by way of which those of s3:// are read and written.
            coordinator: how the hosts agree.
            evaluations: what the evaluations look at; None: only what the configuration says is known.
            scores_are_named: scores without a name, of version 0.1.0, are of `checkpoint.best_metric` as it is now.

        Raises:
            UserError: they are remote, and the store refuses or does not answer; or all of them were set aside as
                damaged.
        """
        self._coordinator = coordinator
        self._directory = open_directory(workdir, staging)
        keep, self._scores_are_named = config.checkpoint, scores_are_named
        self._metric = keep.best_metric
        self._evaluations = evaluations or retention.evaluations_of(config)
        measure = retention.measure_of(self._evaluations, self._metric)
        self._retention = retention.Retention(keep.keep_last, keep.keep_best, measure)
        self._tasks = BackgroundTasks()
        self._writer: OrbaxWriter | None = None
        self._manifest: dict[str, Any] = {}  # of the newest checkpoint
        look = self._list if jax.process_index() == 0 else lambda: None  # the list of host 0 decides
        listing = run_on_all(coordinator, "checkpoints", look)[0]
        self.steps: list[int] = listing["steps"]
        self._older: list[int] = []  # whose manifests do not say all that is known of their scores
        for step, manifest in listing["manifests"].items():
            named = self._named(manifest)
            self._retention.measured[int(step)] = retention.from_json(named)
            self._older += [int(step)] if named != manifest else []
        self.latest: int | None = max(self._retention.measured, default=None)
        if listing["set_aside"] and not self.steps:
            raise UserError(
                f"all checkpoints in {workdir} are damaged and were renamed ({list_names(listing['set_aside'])}). To "
                "train from step 0, choose a new --workdir, or move the files of this one to another folder."
            )

    def open(self) -> None:
        """Prepares to save.

        Raises:
            UserError: the disk or store refuses or does not answer.
        """
        if self._writer is None:
            with self._writing():
                self._writer = OrbaxWriter(self._directory.path, self._retention)
                for step in self._older:
                    self._name_score(step)

    def save(self, state: ArrayTree, step: int, about: dict[str, Any]) -> None:
        """Starts to save the state after `step`, with JSON `about` the model and the data, unless it is saved.

        Raises:
            UserError: the disk or store refuses it, or refused the one before.
            NonFiniteLoss: a value of the state is NaN or infinite; nothing is written.
        """
        self.wait()
        if step == self.latest:
            return
        arrays, nonfinite = describe_arrays(state)
        if nonfinite:
            raise NonFiniteLoss(
                f"after step {step} the state is not finite in {list_names(nonfinite)}; it was not saved, and "
                f"{self._describe_latest()}."
            )
        self._manifest = about | {"step": step, **self._evaluation({}), "arrays": arrays}
        self._retention.measured[step] = retention.from_json(self._manifest)
        self.open()
        assert self._writer
        with self._writing():
            self._writer.save(step, state, add_checksum(self._manifest))
        self._tasks.start(self._finish, step)

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """Starts to add metrics to the newest checkpoint, saved or restored, as soon as that is finished."""
        self._manifest |= self._evaluation(metrics)
        self._retention.measured[self._manifest["step"]] = retention.from_json(self._manifest)
        self._tasks.start(self._write_manifest, dict(self._manifest))

    def poll(self) -> None:
        """Raises what went wrong with the checkpoint that is being written, as soon as it is known. Costs nothing."""
        self._tasks.poll()

    def wait(self) -> None:
        """Waits for what is being saved, since Orbax's manager is for one thread at a time; raises what went wrong."""
        self._tasks.wait()

    def restore(
        self, wanted: ArrayTree, shardings: ArrayTree, accept: Callable[[dict[str, Any]], object] = bool
    ) -> Restored | None:
        """Returns the newest state that is intact, or None if there is no checkpoint; see `restore_newest`."""
        restored = restore_newest(self._directory, self.steps, self._coordinator, wanted, shardings, accept)
        if restored:
            self.latest, self._manifest = restored.step, restored.about
        return restored

    def close(self) -> None:
        """Finishes saving and ends the background threads."""
        try:
            self.wait()
        finally:
            self._tasks.close()
            if self._writer is not None:  # after a failure it raises again what was raised already
                with contextlib.suppress(Exception) if self._tasks.failed else self._writing():
                    self._writer.close()

    def abandon(self, finish: Callable[[], None]) -> None:
        """Closes without waiting for it, as the store does not answer; `finish` is called afterwards."""

        def close() -> None:
            with contextlib.suppress(Exception):
                self.close()
            finish()

        threading.Thread(target=close, daemon=True).start()

    def _list(self) -> dict[str, Any]:
        """Returns the steps, the newest first; the short manifests of those that look intact; what was set aside."""
        manifests = {}
        with storage_errors(self._directory.folder, "read"):
            steps, set_aside = self._directory.list_steps(), self._directory.list_set_aside()
            for step in steps:
                with contextlib.suppress(DamagedCheckpoint):  # reported when it is to be read
                    manifest = self._directory.read_manifest(step)
                    manifests[step] = {key: value for key, value in manifest.items() if key not in ("arrays", "model")}
        return {"steps": steps, "manifests": manifests, "set_aside": set_aside}

    def _finish(self, step: int) -> None:
        """Waits, in the background, until a checkpoint is finished, and uploads it if need be."""
        assert self._writer
        with self._writing():
            self._writer.wait()
            self._directory.publish()
        self.latest = step

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replaces, in the background, the manifest of the newest checkpoint."""
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
        """Writes what its score measures into a checkpoint: later the configuration or the images may be others."""
        if jax.process_index() == 0:
            with contextlib.suppress(DamagedCheckpoint):  # it was set aside
                manifest = self._named(self._directory.read_manifest(step))
                self._directory.write_manifest(step, add_checksum(manifest))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Adds to what goes wrong while saving which checkpoint there is to resume from."""
        try:
            with storage_errors(self._directory.folder, "written"):
                yield
        except UserError as error:
            self._tasks.failed = True
            raise type(error)(f"{str(error).rstrip('.')}; {self._describe_latest()}.") from error

    def _describe_latest(self) -> str:
        return "there is no checkpoint yet" if self.latest is None else f"the last good checkpoint is {self.latest}"
