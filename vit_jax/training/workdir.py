"""The folder of a run: its configuration, checkpoints, logs and, at the end, the exported model."""

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax import UserError, data, interop, monitoring, refuse, user_errors, without_queries
from vit_jax.checkpoint import Checkpoints, Restored
from vit_jax.config import check_data, check_resumes, hide_queries, load_config, save_config
from vit_jax.distributed import SINGLE_HOST, Coordinator, run_on_all
from vit_jax.monitoring import PROCESS_FILES, Ledger, MetricsCallback, MetricWriter, ProcessFile, last_logged_step
from vit_jax.program import Program
from vit_jax.step import TrainState
from vit_jax.storage import RunFiles, check_init_from, check_workdir
from vit_jax.training import run_summary
from vit_jax.training.early_stopping import EarlyStopping
from vit_jax.training.initial_weights import load_init
from vit_jax.training.teacher import Teacher, check_teacher

LOGS = ("metrics.jsonl", "train.log", *PROCESS_FILES)  # files that a resumed run continues


class Workdir:
    """The folder of a run, open for writing. It may be local, gs:// or s3://.

    As a context manager it finishes the checkpoint that is being saved when the block ends.

    Attributes:
        location: the folder as given.
        path: the folder itself or, for a remote one, a local folder whose files are uploaded.
        start: the number of steps that the run had made when this process opened it.
        evaluated: whether the state after `start` was evaluated; True at 0.
        stopping: what the evaluations so far say of an early end; see `note_evaluation`.
        processes: the record of the processes and of how they spend their time; set by `open_log`.
    """

    processes: ProcessFile

    def __init__(
        self,
        folder: str | Path,
        config: ConfigDict,
        program: Program,
        info: data.DataInfo,
        coordinator: Coordinator = SINGLE_HOST,
        teacher: Teacher | None = None,
    ):
        """Opens the folder and creates it if necessary. The hosts agree by means of `coordinator`.

        Raises:
            UserError: the folder holds a run whose configuration differs in fields that may not change, the rest of a
                run without usable checkpoints, or the weights in `init_from`; or it is remote and cannot be used.
        """
        self.location = location = check_workdir(folder)
        check_init_from(config.init_from, location)
        first = jax.process_index() == 0
        self._files = RunFiles(location, ("config.json", *(LOGS if first else ())))
        self.path = self._files.path
        self._log: MetricWriter | None = None
        self._warnings: list[str] = []
        self._failed: UserError | None = None
        self._config, self._program, self._teacher, self._coordinator = config, program, teacher, coordinator
        fetching = data.describe_fetching(config, info.opened, program.batch_sharding)
        self._notes = (*data.describe_splits(info.opened), *info.notes, *fetching)
        self._class_names = info.class_names or ()
        self._manifest = describe_run(program, info, teacher)  # of the checkpoints that this process saves
        with contextlib.ExitStack() as undone:
            undone.callback(self._files.close)
            saved = self.path / "config.json"
            before = load_config(saved) if saved.exists() else None
            named = before is not None and have_same_measure(before, config)
            self._checkpoints = Checkpoints(config, location, self.path, coordinator, info.evals, named)
            self.start, self.evaluated = self._checkpoints.latest or 0, True
            self.stopping = EarlyStopping()
            self._has_model = first and self._files.exists(interop.MODEL_FILE)
            # Checkpoints may have been damaged or removed since the model was exported: the metrics tell its step.
            self._model_step = max(self.start, *self._checkpoints.steps, last_logged_step(self.path) if first else 0)
            resumes = bool(self._checkpoints.steps)
            if not resumes and first:
                check_new_run(location, before, config, last_logged_step(self.path), self._has_model)
            self._changes = check_resumes(before, config, location) if before and resumes else []
            self._given, self._origin = dict[str, Any](), "random weights"
            if config.init_from is not None and not resumes:
                self._load_weights(config.init_from, info.class_names)
            undone.pop_all()

    def _load_weights(self, source: str, class_names: tuple[str, ...] | None) -> None:
        """Loads the weights to start from, and notes in the manifest what a resumed run has to know of them."""
        model = self._manifest["model"]
        self._given, self._origin, loaded = load_init(source, self._config, self._program, class_names)
        model |= interop.inherited(loaded)
        if self._config.adapt.rank:  # the adapters that are exported name the weights to which they belong
            method = model["resample"] if self._config.resample == "auto" else self._config.resample
            address, digest = without_queries(source), interop.digest_weights(source)
            self._manifest["start"] = {"weights": address, "resample": method, "digest": digest}

    def __enter__(self) -> "Workdir":
        """Returns the workdir."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Closes the workdir. An interruption gets a note that says where the same command will continue."""
        try:
            self.close()
        except BaseException as raised:
            error = raised
            raise
        finally:
            if error is not None and not isinstance(error, Exception):
                step = self._checkpoints.latest
                resumes = f"step {step} is saved. Run the same command again to continue from that step."
                error.add_note(
                    "nothing was saved yet; the same command will start from step 0." if step is None else resumes
                )

    def restore_or_init(self) -> tuple[TrainState, str]:
        """Returns the state to train from, placed on the mesh, and a sentence on where it comes from.

        Also sets `start`, `evaluated` and `stopping` to those of the restored checkpoint, as newer ones may be damaged.

        Raises:
            UserError: the checkpoint is of other data or another teacher, or beyond the end of the run; all checkpoints
                are damaged or cannot be read; or no checkpoint can be written.
        """
        program, restored = self._program, None
        for manifest in self._checkpoints.candidates():
            # On every host, before a state is read that may be of another program.
            warnings = run_on_all(self._coordinator, "the manifest", partial(self._check_manifest, manifest))[0]
            if restored := self._checkpoints.restore(manifest, program.state, program.state_shardings):
                break
        with self._until_failure():
            self._checkpoints.open()
        if restored:
            self.start, self.evaluated = restored.step, restored.manifest["evaluated"]
            if self._checkpoints.ranks_like(restored.manifest):  # else its evaluations say nothing of the present score
                self._set_stopping(EarlyStopping(**restored.manifest.get("stopping", {})))
            self._warnings = [*restored.set_aside, *warnings]
            stored = ("start", "model") if self._is_complete() else ("start",)
            self._manifest["model"] |= interop.inherited(restored.manifest.get("model", {}))
            self._manifest |= {key: restored.manifest[key] for key in stored if key in restored.manifest}
            for line in self._warnings if jax.process_index() == 0 else ():
                logging.getLogger(__name__).warning("%s", line)  # at once: what follows may fail
            return restored.state, f"Resuming {self.location} after step {self.start}."
        state = program.init(jax.random.key(self._config.seed), self._given)
        return state, f"Starting from {self._origin}."

    def _check_manifest(self, manifest: dict[str, Any]) -> list[str]:
        if self._teacher:
            check_teacher(self._teacher, manifest.get("teacher"), self.location)
        return check_manifest(manifest, self._config, self._manifest, self.location)

    def open_log(self, origin: str, ledger: Ledger, watch: MetricsCallback | None = None) -> MetricWriter:
        """Opens the logs, writes the summary of the run, and returns the writer of metrics.

        Args:
            origin: the sentence on where the state comes from, from `restore_or_init`.
            ledger: counts the seconds that this process spends in each category.
            watch: is called with the metrics too.

        Raises:
            UserError: the logs cannot be written.
        """
        config = self._config
        log = self._log = MetricWriter(
            self.path,
            self.start,
            self.evaluated,
            self.last_step,
            config.batch,
            config.data.num_classes,
            self._files.push,
            watch,
            self._open_wandb(),
        )
        devices = self._program.mesh.devices.flatten().tolist()
        teacher_macs = self._teacher.macs_per_image if self._teacher else 0
        self.processes = ProcessFile(self.path, self.start, self.last_step, ledger, devices, teacher_macs)
        lines = [*run_summary.banner_lines(config, self._program), *self._notes, f"Workdir: {self.location}", origin]
        log.write_text("\n".join(lines))
        for line in self._warnings:
            log.write_text(f"WARNING: {line}", to_terminal=False)
        if not self.start:
            log.write_text("\n".join(["Parameters:", *run_summary.parameter_table(self._program)]))
            classes = [f"{label}  {name}" for label, name in enumerate(self._class_names)]
            kind = "Numbers:" if config.task.kind == "regress" else "Classes:"
            log.write_text("\n".join([kind, *classes]), to_terminal=False)
        if self._changes:
            since = "Changed, but the run is complete:" if self._is_complete() else "Changed since the run was started:"
            log.write_text("\n".join([since, *self._changes]))
        return log

    def _open_wandb(self) -> monitoring.WandbRun | None:
        if self._config.wandb is None or jax.process_index() > 0:
            return None
        return monitoring.WandbRun(self._config.wandb, self.location, self.path, hide_queries(self._config.to_dict()))

    def write_config(self) -> None:
        """Writes `config.json`. From now on the run counts as started with these settings.

        Raises:
            UserError: the workdir cannot be written to.
        """
        if jax.process_index() == 0 and not self._is_complete():
            with user_errors(f"cannot write to the workdir {self.location}"):
                save_config(self._config, self.path / "config.json")
        with self._until_failure():
            self._files.flush()  # a store that refuses is reported before the first step

    def _is_complete(self) -> bool:  # changed settings had no effect on a complete run
        return 0 < self.start == self.last_step

    @property
    def last_step(self) -> int:
        """The last step of the run, as far as it is known: `total_steps`, unless the run ends early."""
        return max(self.start, self.stopping.last_step(self._config))

    def _set_stopping(self, stopping: EarlyStopping) -> None:
        self.stopping = stopping
        if self._config.stop_after is not None:
            self._manifest["stopping"] = stopping.to_json()

    def save(self, state: TrainState, step: int) -> None:
        """Starts to save the state after `step`. The checkpoint is written in the background.

        Raises:
            UserError: the disk or the store refuses this checkpoint or refused the previous one, or does not answer.
            NonFiniteLoss: the state is not finite. No checkpoint is written then.
        """
        self.processes.count_save(step)
        self._flush()  # a run that resumes from the checkpoint finds the metrics before it
        with self._until_failure():
            self._checkpoints.save(state, step, self._manifest)

    def note_evaluation(self, metrics: dict[str, float], stopping: EarlyStopping) -> None:
        """Starts to add an evaluation to the newest checkpoint. Its metrics decide whether that is the best one.

        Args:
            metrics: the metrics.
            stopping: what the evaluations, with this one, say of an early end.

        Raises:
            UserError: the store refuses the logs or does not answer.
        """
        self._flush()  # a checkpoint that says it was evaluated has its line of metrics
        self._set_stopping(stopping)
        more = {key: self._manifest[key] for key in ("stopping",) if key in self._manifest}
        self._checkpoints.add_metrics(metrics, more)

    def _flush(self) -> None:
        if self._log:
            self._log.flush()
        with self._until_failure():
            self._files.flush()

    def poll(self) -> None:
        """Checks, without waiting, the checkpoint that is being written.

        Once a checkpoint is newer than an exported model of a shorter run, that model and its adapters are deleted.

        Raises:
            UserError: the disk or the store refused the checkpoint, or does not answer.
        """
        with self._until_failure():
            self._checkpoints.poll()
        if self._has_model and (self._checkpoints.latest or 0) > self._model_step:
            self._has_model = False
            adapters = interop.ADAPTER_FILES if self._config.adapt.rank else ()
            for name in (interop.MODEL_FILE, *adapters):
                try:
                    self._files.unlink(name)  # of a shorter run
                except UserError as error:
                    logging.getLogger(__name__).warning("could not delete the older %s: %s", name, error)

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is finished.

        Raises:
            UserError: the disk or the store refuses the checkpoint, or does not answer.
        """
        with self._until_failure():
            self._checkpoints.wait()

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint; None: no checkpoint has a score."""
        return self._checkpoints.best

    def restore_best(self) -> Restored:
        """Returns the best checkpoint, with its state placed on the mesh. All hosts must call it.

        Raises:
            UserError: no checkpoint with a score is intact, or one cannot be read.
        """
        with self._until_failure():
            return self._checkpoints.restore_best(self._program.state, self._program.state_shardings)

    def export(self, state: TrainState) -> str:
        """Writes the weights as `model.npz` and `model.json`, and LoRA adapters if any; returns the path of the .npz.

        All hosts must call it. The arrays are gathered one at a time. The model is described as in the checkpoint: if
        no step was left to make, the settings of this process had no effect on it.
        """
        self.wait()
        model = interop.restore_model(self._manifest["model"])
        weights, adapt = jax.tree.map(GatheredArray, state.merged_params), self._config.adapt
        self.processes.note_state(self.last_step)
        if jax.process_index() == 0:
            interop.save(self.path / interop.MODEL_FILE, model, weights)
        else:
            for leaf in jax.tree.leaves(weights):  # gathers in the same order as host 0, and drops the result
                np.asarray(leaf)
        if adapt.rank:
            trained = jax.tree.map(lambda leaf: np.asarray(GatheredArray(leaf)), state.adapters)
            if jax.process_index() == 0:
                start = self._manifest.get("start", {})
                interop.save_adapter(self.path, model, trained, adapt.rank, adapt.alpha, **start)
        self.processes.complete()
        with self._until_failure():
            self._files.flush()
        return f"{self.location}/{interop.MODEL_FILE}"

    def close(self) -> None:
        """Waits for the checkpoint and the uploads, and closes the folder.

        Raises:
            UserError: the workdir is remote, and the store refuses or does not answer.
        """
        try:
            if self._log:
                self.processes.close()
            with self._until_failure():
                # First: they notice quickly that the store does not answer, while Orbax tries for long.
                self._files.flush(is_final=True)
                self._checkpoints.close()
        except BaseException:  # Ctrl-C in a notebook too, where the next run needs the local folder
            self._checkpoints.abandon(self._files.close)
            raise
        self._files.close()

    @contextlib.contextmanager
    def _until_failure(self) -> Iterator[None]:
        """Remembers the first UserError of a block, and raises it again at the start of each later block.

        Another attempt would wait for the store once more, and an upload that was given up may still arrive and replace
        a newer file.
        """
        if self._failed:
            raise self._failed
        try:
            yield
        except UserError as error:
            self._failed = error
            raise


class GatheredArray:
    """A sharded array that is gathered when it is converted to NumPy, and not kept afterwards.

    Attributes:
        shape: the shape of the whole array.
        dtype: the dtype of the array.
    """

    def __init__(self, array: jax.Array):
        """Takes an array with any sharding."""
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Gathers the array. All processes must convert the same arrays in the same order."""
        sharding = self._array.sharding
        if self._array.is_fully_addressable:  # then one device suffices
            first = min(sharding.device_set, key=lambda device: device.id)
            whole = jax.device_put(self._array, SingleDeviceSharding(first))
        else:
            whole = jax.jit(lambda array: array, out_shardings=NamedSharding(sharding.mesh, P()))(self._array)
        return np.asarray(whole, dtype)  # the gathered copy is freed together with the result


def describe_run(program: Program, info: data.DataInfo, teacher: Teacher | None) -> dict[str, Any]:
    """Returns what the manifests of a run's checkpoints say of its model, data and teacher.

    A run that starts from weights adds to `model` how they were resampled and their licence and, if it trains adapters,
    `start`: which weights they belong to. A resumed run takes both from the checkpoint.
    """
    manifest = {"model": interop.describe_model(program.model), "data": info.fingerprint, "sample": info.sample}
    return manifest | ({"teacher": {"source": without_queries(teacher.source)} | teacher.identity} if teacher else {})


def check_manifest(manifest: dict[str, Any], config: ConfigDict, own: dict[str, Any], location: str) -> list[str]:
    """Checks that a run may resume from a checkpoint, and returns at most one warning.

    There is a warning if the checkpoint is of other data and `data.accept_change` allows that, or if images were
    replaced while their names stayed the same.

    Args:
        manifest: the manifest of the checkpoint.
        config: the configuration of this run.
        own: the manifest of this run's checkpoints, with `data` (fingerprint) and `sample` (of the images).
        location: the workdir, for messages.

    Raises:
        UserError: the data differ and that is not allowed, or the checkpoint is beyond the end of the run.
    """
    step, total = manifest["step"], config.total_steps
    if step > total:
        passed = f"the run in {location} is at step {step} already, beyond total_steps={total}"
        raise UserError(f"{passed}; set --config.total_steps={step} or more, or choose a new --workdir.")
    if changes := check_data(manifest["data"], own["data"], config.data.accept_change, location):
        return [f"the data is not that of the earlier steps, as data.accept_change allows: {'; '.join(changes)}."]
    if manifest.get("sample", own["sample"]) == own["sample"]:
        return []
    return [
        f"images of {config.data.source} {config.data.split} were replaced under their names after step {step}: a "
        "sample of their contents differs. The run goes on with those that are there now; if that is not intended, "
        "restore them, or choose a new --workdir."
    ]


def check_new_run(location: str, before: ConfigDict | None, config: ConfigDict, reached: int, has_model: bool) -> None:
    """Checks that a run which starts at step 0 in a folder without checkpoints destroys nothing there.

    Args:
        location: the folder, for messages.
        before: the configuration in the folder, or None.
        config: the configuration of this run.
        reached: the last step of the metrics in the folder; 0: there are none.
        has_model: whether the folder has an exported model.

    Raises:
        UserError: the folder has the model of a run, metrics of so many steps that there must have been checkpoints,
            metrics without a configuration, or the beginning of a run with another configuration.
    """
    advice = "choose another --workdir, or move the files you want to keep to another folder"
    if before is not None and (reached or has_model):  # else there is nothing to lose, as the run failed at once
        check_resumes(before, config, location)
    source = without_queries(config.init_from or "") or None
    untrained = before is not None and (before.total_steps, before.init_from) == (0, source)
    refuse(
        (
            has_model and not untrained,
            f"the workdir {location} contains a run's {interop.MODEL_FILE}, but no checkpoint to resume from; "
            f"{advice}.",
        ),
        (
            before is None and reached,
            f"the workdir {location} contains the metrics of a run, but no config.json; {advice}.",
        ),
        (
            before and reached > 2 * min(before.checkpoint_every, before.eval_every),  # the last save may be unfinished
            f"the workdir {location} contains the metrics of a run of {reached:,} steps, but none of its checkpoints; "
            f"{advice}.",
        ),
    )


def have_same_measure(one: ConfigDict, other: ConfigDict) -> bool:
    """Returns whether two configurations choose the best checkpoint by the same metric on the same data."""
    evaluations = [
        data.describe_evals(config)[config.checkpoint.best_metric.partition("/")[0]] for config in (one, other)
    ]
    same_data = (one.data.source, one.data.data_dir) == (other.data.source, other.data.data_dir)
    return one.checkpoint.best_metric == other.checkpoint.best_metric and evaluations[0] == evaluations[1] and same_data
