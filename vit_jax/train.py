"""The training loop: build, restore, step, log, evaluate, save."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import jax
from ml_collections import ConfigDict

from vit_jax import UserError, data, evals, settings, sharding
from vit_jax.profile import Trace
from vit_jax.program import Program, make_program
from vit_jax.report import Report
from vit_jax.workdir import Workdir, check_place


def train(
    config: ConfigDict, workdir: str | Path, watch: Callable[[int, dict[str, float]], None] | None = None
) -> dict[str, float]:
    """Trains, or goes on training, and returns the metrics of the last evaluation.

    Runs in the calling process: parses no flags, joins no pod, never exits.

    Args:
        config: a configuration with the fields of `configs/base.py`.
        workdir: the run's folder; if it holds a run of the same configuration, that run goes on.
        watch: called on the first host with each step and its metrics that are logged, the earlier ones of a run that
            goes on included, which are then not told on the terminal; `vit_jax.analysis.plot.Live` draws them.

    Raises:
        UserError: something in the configuration, the data or the workdir is wrong.
        NonFiniteLoss: more losses in a row were not finite than `optim.max_nonfinite_skips`.
    """
    check_place(workdir)
    config, info, program = prepare(config)
    evaluators = evals.make(config, program, info.opened)

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(contextlib.closing(Workdir(workdir, config, program, info)))
        state, origin = folder.begin()
        log = stack.enter_context(contextlib.closing(folder.log(origin, watch)))
        start, end = folder.start, config.total_steps
        batches = data.make(config, program.batch_sharding, start, info.opened)
        stack.callback(batches.close)
        trace = stack.enter_context(contextlib.closing(Trace(folder.path / "profile", start, config.profile_steps)))
        report = Report(config, log, lambda: batches.waited)
        done = start
        try:
            for step in range(start + 1, end + 1):
                trace.before(step)
                state, values = program.train_step(state, next(batches))
                done = step
                report(step, values)
                trace.after(step, state)
                folder.poll()
                evaluates = step == end or step % config.eval_every == 0
                if evaluates or step % config.checkpoint_every == 0:
                    report.flush()
                    with log.paused():
                        metrics = evals.run(evaluators, state.weights) if evaluates else {}
                        log.write(step, metrics)
                        folder.save(state, step, metrics)
        except UserError:  # an unreadable image, say: what was learnt until then is kept
            if done > start and jax.process_count() == 1:  # the other hosts do not know, and would not save
                folder.save(state, done, {})
            raise
        if start == end:
            log.say("This run is complete." if end else "Nothing to train: total_steps is 0.")
            metrics = evals.run(evaluators, state.weights)
            if not end:
                log.write(0, metrics)
        if batches.replaced:
            log.say(f"Unreadable images, each replaced by the next readable one: {batches.replaced:,}.")
        log.say(f"Model: {folder.export(state)}")
        return metrics


def prepare(config: ConfigDict) -> tuple[ConfigDict, data.Info, Program]:
    """Returns what a run is made of: the configuration, completed from the data and with its durations in steps, what
    else the data tells, and the program. Nothing is written or compiled.

    Raises:
        UserError: something in the configuration or the data is wrong.
    """
    settings.check(config)
    mesh = sharding.make_mesh(config)
    config, info = data.complete(config)
    config = settings.resolve(config)
    return config, info, make_program(config, mesh, data.spec(config))
