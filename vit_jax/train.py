"""The training loop: build, restore, step, log, evaluate, save."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax import Preempted, UserError, data, distributed, evals
from vit_jax.distributed import Guard
from vit_jax.monitoring import Trace, TrainMetrics
from vit_jax.program import prepare
from vit_jax.storage import check_place
from vit_jax.workdir import Workdir


@contextlib.contextmanager
def keeping(step: int) -> Iterator[None]:
    """Adds to what goes wrong inside that it costs no training: the state after `step` is saved."""
    words = f"step {step} is saved, and the same command goes on from there"
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


@contextlib.contextmanager
def closing(folder: Workdir) -> Iterator[Workdir]:
    """Closes a run's folder at the end, and adds to an interruption what the same command does."""
    try:
        with contextlib.closing(folder):
            yield folder
    except Exception:
        raise
    except BaseException as interruption:
        unsaved = "nothing was saved yet: the same command begins anew."
        goes_on = f"the same command goes on after step {folder.saved}, which is saved."
        interruption.add_note(unsaved if folder.saved is None else goes_on)
        raise


def train(
    config: ConfigDict,
    workdir: str | Path,
    watch: Callable[[int, dict[str, float]], None] | None = None,
    guard: Guard | None = None,
) -> dict[str, float]:
    """Trains, or goes on training, and returns the metrics of the last evaluation.

    Runs in the calling process: parses no flags, joins no pod, never exits.

    Args:
        config: a configuration with the fields of `configs/base.py`.
        workdir: the run's folder; if it holds a run of the same configuration, that run goes on.
        watch: called on the first host with each step and its metrics that are logged, the earlier ones of a run that
            goes on included, which are then not told on the terminal; `vit_jax.analysis.plot.Live` draws them.
        guard: watches for SIGTERM, lost and stuck hosts, if it is entered.

    Raises:
        UserError: something in the configuration, the data, the workdir or the hosts is wrong.
        NonFiniteLoss: more losses in a row were not finite than `optim.max_nonfinite_skips`.
        Preempted: SIGTERM came to a host; what was learnt is saved.
        LostHosts: a host did not come where the others waited for it.
    """
    guard = guard or Guard()
    place = check_place(workdir)
    guard.at("opening the data", patient=True)
    config, info, program = prepare(config)

    with contextlib.ExitStack() as stack:
        passed = distributed.passed(guard.share, guard.fail, config, info, program.batch_sharding, program.state, place)
        stack.enter_context(passed)
        evaluators = evals.make(config, program, info.opened)
        guard.at("opening the workdir", patient=True)
        folder = stack.enter_context(closing(Workdir(place, config, program, info, guard.share)))
        guard.at("restoring")
        state, origin = folder.begin()
        if folder.start < config.total_steps:
            guard.at("trying the evaluation step")
            evals.check_fits(program, state.weights)
        guard.at("beginning")
        log = stack.enter_context(contextlib.closing(folder.log(origin, watch)))
        start, end = folder.start, config.total_steps
        batches = data.train_batches(config, program.batch_sharding, start, info.opened)
        stack.callback(batches.close)
        trace = stack.enter_context(contextlib.closing(Trace(folder.path / "profile", start, config.profile_steps)))
        report = TrainMetrics(config, log, lambda: batches.waited)
        guard.save_every = config.checkpoint_every_minutes * 60 or None
        guard.saved()  # opening and restoring may have taken long
        done = start

        def evaluate(state: Any, step: int) -> dict[str, float]:
            guard.at(f"evaluation after step {step}")
            with keeping(step):
                metrics = evals.run(evaluators, state.weights, guard.tick)
            log.write(step, metrics)
            folder.add_metrics(metrics)
            return metrics

        def save(state: Any, step: int) -> None:
            guard.at(f"saving step {step}")
            folder.save(state, step)
            guard.saved()

        try:
            metrics = {}
            if start and not folder.evaluated and (start == end or start % config.eval_every == 0):
                metrics = evaluate(state, start)
            for step in range(start + 1, end + 1):
                trace.before(step)
                guard.at(f"data of step {step}")
                try:
                    batch = next(batches)
                except UserError:  # an unreadable image, say: what was learnt until then is kept
                    if done == start or guard.pod.hosts > 1:  # the other hosts do not know, and would not save
                        raise
                    report.flush()
                    save(state, done)
                    with keeping(done):
                        raise
                guard.at(f"step {step}")
                state, values = program.train_step(state, batch)
                done = step
                report(step, values)
                trace.after(step, state)
                guard.tick()
                folder.poll()
                evaluates = step == end or step % config.eval_every == 0
                if guard.save_due() or evaluates or step % config.checkpoint_every == 0:
                    report.flush()
                    with log.paused():
                        save(state, step)  # first: whatever an evaluation fails with, nothing is lost
                        metrics = evaluate(state, step) if evaluates else {}
        except Preempted:
            report.flush()
            if done > start:
                save(state, done)
            raise Preempted(f"preempted after step {done}, which is saved; the same command goes on.") from None
        guard.at("the end", patient=True)
        if start == end and not metrics:
            log.say("This run is complete." if end else "Nothing to train: total_steps is 0.")
            metrics = evals.run(evaluators, state.weights, guard.tick)
            if not end:
                log.write(0, metrics)
        if batches.replaced:
            log.say(f"Unreadable images, each replaced by the next readable one: {batches.replaced:,}.")
        log.say(f"Model: {folder.export(state)}")
        return metrics
