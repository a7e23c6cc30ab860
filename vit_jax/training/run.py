"""A training run in progress: its state, and the logs, saves and evaluations between the training steps."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from vit_jax import Preempted, UserError, data, evals
from vit_jax.distributed import Supervisor, run_on_all
from vit_jax.monitoring import Category, MetricWriter, Trace, TrainMetrics, ledger_lines
from vit_jax.step import StepMetrics, TrainState
from vit_jax.tasks import Batch
from vit_jax.training.early_stopping import EarlyStopping
from vit_jax.training.workdir import Workdir


class Run:
    """The steps of a run, its logs, saves and evaluations. A context manager that closes the data and the trace.

    Attributes:
        state: the training state after `step` updates.
        step: the number of updates made, including those before a restart.
        metrics: the metrics of the last evaluation in this process; empty before one.
    """

    def __init__(
        self,
        config: ConfigDict,
        batch_sharding: NamedSharding,
        info: data.DataInfo,
        workdir: Workdir,
        log: MetricWriter,
        evaluators: dict[str, evals.Evaluator],
        supervisor: Supervisor,
        state: TrainState,
    ):
        """Opens the training batches that follow step `workdir.start`; `state` is the training state at that step."""
        self.state, self.step, self.metrics = state, workdir.start, dict[str, float]()
        self._config, self._workdir, self._log = config, workdir, log
        self._evaluators, self._supervisor = evaluators, supervisor
        self._failure: Exception | None = None  # the error of this host's data that makes all hosts end
        self._batches = data.train_batches(config, batch_sharding, workdir.start, info.opened)
        self._trace = Trace(workdir.path / "profile", workdir.start, config.profile_steps)
        self._train_metrics = TrainMetrics(config, log, lambda: self._batches.waited)
        supervisor.enter_phase("beginning")
        supervisor.set_save_interval(config.checkpoint_every_minutes * 60)

    def __enter__(self) -> "Run":
        """Returns the run."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Closes the trace and the data; if the run is preempted, saves the state first."""
        self._supervisor.ledger.enter(Category.SAVING if isinstance(error, Preempted) else Category.UNKNOWN)
        with contextlib.closing(self._batches), contextlib.closing(self._trace):
            if isinstance(error, Preempted):
                self._save_preempted()

    def steps(self) -> Iterator[tuple[int, Batch]]:
        """Iterates over (step, batch) for the steps that are left.

        `step` counts from 1 to `total_steps`, or to the step at which the run ends early.

        Raises:
            UserError: the data cannot be read. With one host, the state after the last step is saved before.
        """
        while self.step < self._workdir.last_step:
            step = self.step + 1
            self._trace.before(step)
            with self._supervisor.phase(f"data of step {step}", Category.DATA):
                batch = self._next_batch(step)
            category = self._workdir.processes.category(step)
            if self.final_steps and step == self.final_steps[0] + 1:
                category = Category.COMPILING
            self._supervisor.enter_phase(f"step {step}", category)
            yield step, batch

    @property
    def final_steps(self) -> tuple[int, int] | None:
        """The steps between which the learning rate falls to 0, once an early end is decided; else None."""
        return self._workdir.stopping.final_steps(self._config)

    def record(self, step: int, state: TrainState, values: StepMetrics) -> None:
        """Takes the new state and the metrics of a training step, both on the devices, and logs what is due.

        Raises:
            NonFiniteLoss: more losses in a row were not finite than `optim.max_nonfinite_skips`.
            Preempted: the hosts have agreed to end after this step.
            UserError: the previous checkpoint could not be written.
        """
        self.state, self.step = state, step
        self._workdir.processes.count_step(step, values)
        self._train_metrics(step, values)
        self._trace.after(step, state)
        self._supervisor.count_step()
        self._supervisor.raise_pending()
        self._workdir.poll()

    def save_due(self) -> bool:
        """Returns whether the state must be saved now: after `checkpoint_every` steps, after `checkpoint_every_minutes`
        minutes, or before an evaluation.
        """
        return self._supervisor.save_due() or self.evaluation_due() or self.step % self._config.checkpoint_every == 0

    def evaluation_due(self) -> bool:
        """Returns whether an evaluation is due after the current step."""
        return bool(self._due_evaluators())

    def _due_evaluators(self) -> dict[str, evals.Evaluator]:
        return evals.due_evaluators(self._config, self._evaluators, self.step, self._workdir.last_step)

    def save(self) -> None:
        """Starts to save the state. The checkpoint is written in the background.

        Raises:
            UserError: the disk or the store refuses this checkpoint, or refused the previous one.
            NonFiniteLoss: the state is not finite. Nothing is written then.
        """
        self._train_metrics.flush()
        with self._log.paused(), self._supervisor.phase(f"saving step {self.step}", Category.SAVING):
            self._workdir.save(self.state, self.step)
            self._supervisor.note_save()

    def evaluate(self) -> None:
        """Runs the due evaluations on the state, which must be saved, and adds the metrics to the newest checkpoint.

        Raises:
            UserError: an evaluation failed. The message says from which step the same command continues.
        """
        with self._log.paused(), self._supervisor.phase(f"evaluation after step {self.step}", Category.EVALUATING):
            with note_saved_step(self.step):
                self.metrics = evals.run_evaluators(
                    self._due_evaluators(), self.state.eval_params, self._supervisor.count_step
                )
            self._supervisor.raise_pending()
            self._log.write_metrics(self.step, self.metrics)
            stopping = self._count_evaluation()
            self._workdir.note_evaluation(self.metrics, stopping)
            if stopping.is_decided(self._config) and stopping.step == self.step < self._config.total_steps:
                self._log.set_total(self._workdir.last_step)
                self._log.write_text(stopping.describe(self._config))

    def _count_evaluation(self) -> EarlyStopping:
        """Returns what the evaluations, with the last one, say of an early end: on all hosts what host 0 finds."""
        config, stopping, metric = self._config, self._workdir.stopping, self._config.checkpoint.best_metric
        if config.stop_after is None or metric not in self.metrics or stopping.is_decided(config):
            return stopping

        def count() -> dict[str, Any]:
            return stopping.count(config, self.step, self.metrics[metric]).to_json()

        return EarlyStopping(**run_on_all(self._supervisor, "early stopping", count)[0])

    def evaluate_restored(self) -> None:
        """Evaluates the restored state if an evaluation is due at its step and was not made before the restart."""
        if self.step and not self._workdir.evaluated and self.evaluation_due():
            self.evaluate()

    def finish(self) -> dict[str, float]:
        """Exports the model and returns its metrics: those of the last evaluation or, with `stop_after`, of the best.

        A run that had no steps left to make is evaluated first.
        """
        self._supervisor.enter_phase("the end", Category.EVALUATING, patient=True)
        ended = self.step
        if self._config.stop_after is not None:
            self._take_best()
        if self._workdir.start == ended and not self.metrics:
            self._log.write_text(describe_end(ended, self._config.total_steps))
            self.metrics = evals.run_evaluators(self._evaluators, self.state.eval_params, self._supervisor.count_step)
            if not self.step:
                self._log.write_metrics(0, self.metrics)
        if self._batches.replaced:
            replaced = f"{self._batches.replaced:,}"
            self._log.write_text(f"Unreadable images, each replaced by the next readable one: {replaced}.")
        self._supervisor.raise_pending()
        self._supervisor.ledger.enter(Category.SAVING)
        model = self._workdir.export(self.state)
        self._log.write_text("\n".join([f"Model: {model}", *ledger_lines(self._workdir.processes.starts)]))
        return self.metrics

    def _take_best(self) -> None:
        """Replaces the last state, its step and its metrics by those of the best checkpoint."""
        best = self._workdir.best_step
        if best in (None, self.step):
            return
        self._workdir.wait()
        jax.tree.map(lambda leaf: leaf.delete(), self.state)  # the devices may not hold two states
        restored = self._workdir.restore_best()
        self.state, self.step, found = restored.state, restored.step, restored.manifest["metrics"]
        if self.metrics:
            self.metrics = {name: math.nan if value is None else value for name, value in found.items()}
        self._log.write_text(f"The best checkpoint is exported, that of step {self.step:,}.")

    def _next_batch(self, step: int) -> Batch:
        batches, hosts = self._batches, self._supervisor.hosts
        try:
            batch = next(batches)
        except Exception:  # an unreadable image, for example: the state of the steps before is saved
            if self.step == self._workdir.start or hosts > 1:
                raise
            self.save()
            with note_saved_step(self.step):
                raise
        if batches.failure and stop_all_hosts(self._supervisor, self._workdir.last_step - step - batches.ready):
            self._failure = batches.failure
        return batch

    def _save_preempted(self) -> None:
        self._supervisor.raise_pending()  # another run may have taken the workdir
        if self.step > self._workdir.start:
            self.save()
        self._log.write_text("\n".join(ledger_lines(self._workdir.processes.starts)))
        if self.step:
            end_all_hosts(self._supervisor, self._workdir, self.step, self._failure)


def stop_all_hosts(supervisor: Supervisor, left: int) -> bool:
    """Makes all hosts save the same step and end, because the data of this host failed.

    This host still has some batches, so that it can reach the step that the hosts agree on.

    Args:
        supervisor: the supervisor of the run.
        left: the number of the run's steps for which this host has no batch. If it is not positive, nothing is asked.

    Returns:
        Whether the hosts will end. False with a single host.
    """
    return supervisor.hosts > 1 and left > 0 and supervisor.stop_all()


def end_all_hosts(supervisor: Supervisor, workdir: Workdir, step: int, failure: Exception | None) -> NoReturn:
    """Waits until all hosts have saved `step`, then raises the reason why they end.

    Args:
        supervisor: the supervisor of the run.
        workdir: the folder of the run.
        step: the step whose save has begun.
        failure: the error of this host's data, if that is the reason.

    Raises:
        UserError: the save was refused, or the data of a host cannot be read.
        Preempted: otherwise.
    """

    def fail() -> None:
        if failure:
            raise failure

    run_on_all(supervisor, "the last save", workdir.wait)
    with note_saved_step(step):
        run_on_all(supervisor, "the reason for the end", fail)
    raise Preempted(
        f"preempted; the state after step {step} is saved. Run the same command again to continue."
    ) from None


def describe_end(step: int, total: int) -> str:
    """Returns the line of the log for a run that has no steps left to make, after `step` of `total` steps."""
    if not step:
        return "Nothing to train: total_steps is 0."
    if step < total:
        advice = "To train again, choose another --workdir; to train longer, raise or unset stop_after."
        return f"This run is complete: it stopped early, after {step:,} of {total:,} steps. {advice}"
    advice = "To train again, choose another --workdir; to train longer, raise total_steps."
    return f"This run is complete ({step:,} of {step:,} steps). {advice}"


@contextlib.contextmanager
def note_saved_step(step: int) -> Iterator[None]:
    """Adds to errors inside the block that `step` is saved and that the same command continues from there.

    Raises:
        UserError: in place of a UserError, or of JAX's error if a device has too little memory.
    """
    words = f"step {step} is saved; run the same command again to continue from that step"
    try:
        yield
    except UserError as error:
        raise type(error)(f"{str(error).rstrip('.')}; {words}.") from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        what = f"an evaluation needs more memory than the devices have ({str(error).splitlines()[0]})"
        raise UserError(f"{what}; lower --config.batch_eval; {words}.") from error
    except Exception as error:
        error.add_note(f"{words}.")
        raise
