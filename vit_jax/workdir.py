"""The folder of a run: its configuration, checkpoints, logs and, at the end, the exported model."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax import UserError, data, interop, monitoring
from vit_jax.checkpoint import Checkpoints
from vit_jax.config import check_data, check_resumes, load_config, save_config
from vit_jax.distributed import Share, alone
from vit_jax.monitoring import MetricWriter, Watch, last_step
from vit_jax.program import Program
from vit_jax.storage import check_apart, check_place, open_mirror

LOGS = ("metrics.jsonl", "train.log")  # what a resumed run goes on writing


class Gathered:
    """An array on the devices, whole in memory here only while it is looked at.

    Attributes:
        shape: of the array.
        dtype: of the array.
    """

    def __init__(self, leaf: jax.Array):
        """Takes the array, however it is split."""
        self._leaf, self.shape, self.dtype = leaf, leaf.shape, leaf.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Gathers it; every process must do so, in the same order."""
        sharding = self._leaf.sharding
        if self._leaf.is_fully_addressable:  # then to one device, not to all
            first = min(sharding.device_set, key=lambda device: device.id)
            whole = jax.device_put(self._leaf, SingleDeviceSharding(first))
        else:
            whole = jax.jit(lambda leaf: leaf, out_shardings=NamedSharding(sharding.mesh, P()))(self._leaf)
        return np.asarray(whole, dtype)  # what NumPy looks at goes with it


class Workdir:
    """A run's folder, open for writing: a local one, gs:// or s3://.

    Attributes:
        place: the folder.
        path: the folder itself, or one here whose files are uploaded.
        start: steps that the run has behind it.
        evaluated: the state after `start` was evaluated before it was saved, whether that was due or not; True at 0.
    """

    def __init__(
        self, folder: str | Path, config: ConfigDict, program: Program, info: data.DataInfo, share: Share = alone
    ):
        """Opens the folder, made if need be; `share` is how its hosts agree.

        Raises:
            UserError: it holds another run: the configuration differs in more than may change; or what a run has left
                that cannot go on, having no or only damaged checkpoints; or what this run would start from; or it is
                remote, and the store refuses or does not answer.
        """
        self.place = place = check_place(folder)
        check_apart(config.init_from, place)
        self._mirror = open_mirror(place, ("config.json", *(LOGS if jax.process_index() == 0 else ())))
        self.path = self._mirror.path
        self._log: MetricWriter | None = None
        self._warnings: list[str] = []
        self._failed: UserError | None = None
        self._config, self._program = config, program
        self._model = dataclasses.replace(
            program.model, preprocess=info.preprocess, class_names=info.class_names, loss=config.task.loss
        )
        self._about = {"model": interop.about(self._model), "data": info.fingerprint}
        with contextlib.ExitStack() as undone:
            undone.callback(self._mirror.close)
            saved = self.path / "config.json"
            before = load_config(saved) if saved.exists() else None
            named = before is not None and _ranks_alike(before, config)
            self._checkpoints = Checkpoints(config, place, self.path, share, info.evals, named)
            self.start, self.evaluated = self._checkpoints.latest or 0, True
            first = jax.process_index() == 0
            self._has_model = first and self._mirror.exists(interop.WEIGHTS)
            # Checkpoints may have been damaged or removed since it was written: the metrics tell how far the run was.
            self._model_step = max(self.start, *self._checkpoints.steps, last_step(self.path) if first else 0)
            resumes, source = bool(self._checkpoints.steps), config.init_from
            if not resumes and first:
                self._check_new(before)
            self._changes = check_resumes(before, config, place) if before and resumes else []
            self._given = {} if resumes or source is None else self._adapt(source)
            undone.pop_all()

    def _check_new(self, before: ConfigDict | None) -> None:
        """Lets a run start anew only where nothing is lost by it: where it was killed before its first save, say.

        Raises:
            UserError: the model of a run lies here, or metrics of steps that were saved once, or another run began.
        """
        advice = "choose another --workdir, or move what is to be kept to another folder"
        reached = last_step(self.path)
        if before is not None and (reached or self._has_model):  # or there is nothing to lose: it failed at once
            check_resumes(before, self._config, self.place)
        untrained = before is not None and (before.total_steps, before.init_from) == (0, self._config.init_from)
        if self._has_model and not untrained:
            raise UserError(
                f"the workdir {self.place} holds a run's {interop.WEIGHTS}, but no checkpoint to go on from; {advice}."
            )
        if before is None and reached:
            raise UserError(f"the workdir {self.place} holds the metrics of a run, but no config.json; {advice}.")
        if before and reached > 2 * min(before.checkpoint_every, before.eval_every):  # the last save may not be whole
            raise UserError(
                f"the workdir {self.place} holds the metrics of a run of {reached:,} steps, but none of its "
                f"checkpoints; {advice}."
            )

    @property
    def saved(self) -> int | None:
        """The last step whose checkpoint is whole, as far as is known; None: there is none yet."""
        return self._checkpoints.latest

    def begin(self) -> tuple[Any, str]:
        """Returns the state to go on from, placed on the mesh, and a sentence on where it comes from.

        Raises:
            UserError: the checkpoint is of other data, or beyond the run's end; all checkpoints are damaged; or they
                cannot be read, or none written.
        """
        program, source = self._program, self._config.init_from
        restored = self._checkpoints.restore(program.state, program.state_shardings, self._accept)
        with self._writing():
            self._checkpoints.open()
        if restored:
            self.start, self.evaluated = restored.step, restored.about["evaluated"]
            self._warnings = [*restored.aside, *self._accept(restored.about)]
            for line in self._warnings if jax.process_index() == 0 else ():
                logging.getLogger(__name__).warning("%s", line)  # at once: what follows may fail
            return restored.state, f"Resuming {self.place} after step {self.start}."
        state = program.init(jax.random.key(self._config.seed), self._given)
        kept = ", head included" if self._config.keep_head else ""
        return state, f"Starting from {source or 'random weights'}{kept}."

    def _accept(self, about: dict[str, Any]) -> list[str]:
        """Returns a warning if the run goes on from a checkpoint on other data, and that is accepted."""
        step, total = about["step"], self._config.total_steps
        if step > total:
            raise UserError(f"{self.place} is at step {step} already, beyond total_steps={total}.")
        accepts = self._config.data.accept_change
        changes = check_data(about["data"], self._about["data"], accepts, str(self.place))
        told = f"the data are not those of the run until here, as data.accept_change allows: {'; '.join(changes)}."
        return [told] if changes else []

    def _adapt(self, source: str) -> dict[str, Any]:
        config, program = self._config, self._program
        try:
            # Resized once, from the patches as they were trained, and only if that was asked for.
            keys = ("patch_size", "resolution") if config.resample == "flexi" else ()
            asked = {key: program.model.field(key) for key in keys}
            model, params = interop.load(source, resample=config.resample, **asked)
            wanted = program.state.params
            adapted = interop.adapt(model, params, program.model, wanted, config.keep_head, config.resample)
            if config.keep_head:
                interop.check_classes(model.class_names, self._model.class_names)
            return adapted
        except UserError as error:
            raise UserError(f"init_from={source}: {str(error).removeprefix(f'{source}: ')}") from error

    def log(self, origin: str, watch: Watch | None = None) -> MetricWriter:
        """Returns the writer of the run's metrics from here on, once it has said and written what the run is; `watch`
        is told them too.

        Raises:
            UserError: the workdir is remote and cannot be written to.
        """
        total, batch = self._config.total_steps, self._config.batch
        complete = 0 < self.start == total  # then what was changed had no part in it
        if jax.process_index() == 0 and not complete:
            save_config(self._config, self.path / "config.json")
        classes = self._config.data.num_classes
        log = self._log = MetricWriter(
            self.path, self.start, self.evaluated, total, batch, classes, self._mirror.push, watch
        )
        log.say("\n".join([*monitoring.banner_lines(self._config, self._program), f"Workdir: {self.place}", origin]))
        for line in self._warnings:
            log.say(f"WARNING: {line}", aloud=False)
        if not self.start:
            log.say("\n".join(["Parameters:", *monitoring.parameter_table(self._program)]))
        if self._changes:
            since = "Changed, but the run is complete:" if complete else "Changed since the run was started:"
            log.say("\n".join([since, *self._changes]))
        with self._writing():
            self._mirror.flush()  # what cannot be written is known before the first step
        return log

    def save(self, state: Any, step: int) -> None:
        """Starts to save the state after `step`.

        Raises:
            UserError: the disk or store refuses it, or did so with the one before, or does not answer.
            NonFiniteLoss: the state is not finite; nothing is written.
        """
        self._flush()  # a run that resumes from the checkpoint finds the metrics before it
        with self._writing():
            self._checkpoints.save(state, step, self._about)

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """Starts to add the metrics of its evaluation to the newest checkpoint; they decide whether it is the best.

        Raises:
            UserError: the store refuses the logs or does not answer.
        """
        self._flush()  # a checkpoint that says it was evaluated has its line of metrics
        self._checkpoints.add_metrics(metrics)

    def _flush(self) -> None:
        if self._log:
            self._log.flush()
        with self._writing():
            self._mirror.flush()

    def poll(self) -> None:
        """Raises what went wrong with the checkpoint that is being written, as soon as it is known. Costs nothing.

        Raises:
            UserError: the disk or store refuses it, or does not answer.
        """
        with self._writing():
            self._checkpoints.poll()
        if self._has_model and (self._checkpoints.latest or 0) > self._model_step:
            self._has_model = False
            try:
                self._mirror.unlink(interop.WEIGHTS)  # of a shorter run; the newest checkpoint holds more
            except UserError as error:
                logging.getLogger(__name__).warning("the older %s stays: %s", interop.WEIGHTS, error)

    def export(self, state: Any) -> str:
        """Writes the weights as `model.npz` with `model.json`, array by array, and returns where they lie."""
        with self._writing():
            self._checkpoints.wait()
        weights = jax.tree.map(Gathered, state.weights)
        if jax.process_index() == 0:
            interop.save(self.path / interop.WEIGHTS, self._model, weights)
        else:
            for leaf in jax.tree.leaves(weights):  # in the same order; dropped at once
                np.asarray(leaf)
        return f"{self.place}/{interop.WEIGHTS}"

    def close(self) -> None:
        """Finishes what is being saved.

        Raises:
            UserError: the workdir is remote, and the store refuses or does not answer.
        """
        try:
            with self._writing():
                self._mirror.flush()  # first: it says in time if the store does not answer, while Orbax tries for long
                self._checkpoints.close()
        except UserError:
            self._checkpoints.abandon()
            raise
        self._mirror.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Lets nothing be written after the store has failed: it would wait again, and what was given up may still
        arrive and replace what is newer.
        """
        if self._failed:
            raise self._failed
        try:
            yield
        except UserError as error:
            self._failed = error
            raise


def _ranks_alike(one: ConfigDict, other: ConfigDict) -> bool:
    """Returns whether two configurations find the best checkpoint by the same measure."""
    evaluations = [
        data.describe_evals(config)[config.checkpoint.best_metric.partition("/")[0]] for config in (one, other)
    ]
    same_data = (one.data.source, one.data.data_dir) == (other.data.source, other.data.data_dir)
    return one.checkpoint.best_metric == other.checkpoint.best_metric and evaluations[0] == evaluations[1] and same_data
