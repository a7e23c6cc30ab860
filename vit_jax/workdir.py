"""The folder of a run: its configuration, checkpoints, logs and, at the end, the exported model."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax import UserError, banner, data, interop, settings
from vit_jax.checkpoint import Checkpoints, latest
from vit_jax.log import Log, Watch
from vit_jax.mirror import check_place, open_mirror
from vit_jax.program import Program

LOGS = ("metrics.jsonl", "train.log")  # what a resumed run goes on writing


class Workdir:
    """A run's folder, open for writing: a local one, gs:// or s3://.

    Attributes:
        place: the folder.
        path: the folder itself, or one here whose files are uploaded.
        start: steps that the run has behind it.
    """

    def __init__(self, folder: str | Path, config: ConfigDict, program: Program, info: data.Info):
        """Opens the folder, made if need be.

        Raises:
            UserError: it holds another run: the configuration differs in more than may change, or the data do; or it
                is remote, and the store refuses or does not answer.
        """
        self.place = place = check_place(folder)
        self._mirror = open_mirror(place, ("config.json", *(LOGS if jax.process_index() == 0 else ())))
        self.path = self._mirror.path
        self._log: Log | None = None
        self.evaluated = True
        self._failed: UserError | None = None
        self._config, self._program = config, program
        self._model = dataclasses.replace(
            program.model, preprocess=info.preprocess, class_names=info.class_names, loss=config.task.loss
        )
        self._about = {"model": interop.about(self._model), "data": info.fingerprint}
        with contextlib.ExitStack() as undone:
            undone.callback(self._mirror.close)
            saved = self.path / "config.json"
            resumes = saved.exists() and latest(place) is not None
            self._changes = settings.check_resumes(settings.load(saved), config, str(place)) if resumes else []
            source = config.init_from
            self._given = {} if resumes or source is None else self._adapt(source)
            self._checkpoints = Checkpoints(config, place, self.path)
            self.start = self._checkpoints.latest or 0
            if self.start > config.total_steps:
                raise UserError(f"{place} is at step {self.start} already, beyond total_steps={config.total_steps}.")
            undone.pop_all()

    def begin(self) -> tuple[Any, str]:
        """Returns the state to go on from, placed on the mesh, and a sentence on where it comes from."""
        program, source = self._program, self._config.init_from
        if self.start:
            state, about = self._checkpoints.restore(self.start, program.state, program.state_shardings)
            if about["data"] != self._about["data"]:
                saved, now = about["data"], self._about["data"]
                raise UserError(f"{self.place} was trained on other data ({saved}, now {now}); choose a new --workdir.")
            return state, f"Resuming {self.place} after step {self.start}."
        state = program.init(jax.random.key(self._config.seed), self._given)
        kept = ", head included" if self._config.keep_head else ""
        return state, f"Starting from {source or 'random weights'}{kept}."

    def _adapt(self, source: str) -> dict[str, Any]:
        config, program = self._config, self._program
        try:
            model, params = interop.load(source)
            wanted = program.state.params
            adapted = interop.adapt(model, params, program.model, wanted, config.keep_head, config.resample)
            if config.keep_head:
                interop.check_classes(model.class_names, self._model.class_names)
            return adapted
        except UserError as error:
            raise UserError(f"init_from={source}: {str(error).removeprefix(f'{source}: ')}") from error

    def log(self, origin: str, watch: Watch | None = None) -> Log:
        """Returns the writer of the run's metrics from here on, once it has said and written what the run is; `watch`
        is told them too.

        Raises:
            UserError: the workdir is remote and cannot be written to.
        """
        total, batch = self._config.total_steps, self._config.batch
        complete = 0 < self.start == total  # then what was changed had no part in it
        if jax.process_index() == 0 and not complete:
            settings.save(self._config, self.path / "config.json")
            if total:
                with self._writing():
                    self._mirror.unlink(interop.WEIGHTS)  # of a shorter run
        log = self._log = Log(self.path, self.start, total, batch, self._mirror.push, watch)
        log.say("\n".join([*banner.lines(self._config, self._program), f"Workdir: {self.place}", origin]))
        if not self.start:
            log.say("\n".join(["Parameters:", *banner.parameter_table(self._program)]))
        if self._changes:
            since = "Changed, but the run is complete:" if complete else "Changed since the run was started:"
            log.say("\n".join([since, *self._changes]))
        with self._writing():
            self._mirror.flush()  # what cannot be written is known before the first step
        return log

    def check(self) -> None:
        """Raises what went wrong with the last save."""

    def save(self, state: Any, step: int, metrics: dict[str, float]) -> None:
        """Starts to save the state after `step`; `metrics` decide whether it is the best.

        Raises:
            UserError: the workdir is remote, and the store refuses or does not answer.
        """
        if self._log:
            self._log.flush()
        with self._writing():
            self._mirror.flush()  # a run that resumes from the checkpoint finds the metrics before it
            self._checkpoints.save(state, step, self._about, metrics)

    def export(self, state: Any) -> str:
        """Writes the weights as `model.npz` with `model.json`, and returns where they lie."""
        with self._writing():
            self._checkpoints.wait()
        replicate = jax.jit(lambda x: x, out_shardings=NamedSharding(self._program.mesh, P()))
        weights = jax.tree.map(lambda leaf: jax.device_get(replicate(leaf)), state.weights)
        if jax.process_index() == 0:
            interop.save(self.path / interop.WEIGHTS, self._model, weights)
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
