"""The training loop: build, restore, step, log, evaluate, save."""

from pathlib import Path

from ml_collections import ConfigDict

from vit_jax import data, evals, settings, sharding
from vit_jax.profile import Trace
from vit_jax.program import Program, make_program
from vit_jax.report import Report
from vit_jax.workdir import Workdir


def build(config: ConfigDict) -> tuple[ConfigDict, data.Info, Program]:
    """Returns the completed configuration, what the data tells, and the program; opens the data, makes no array.

    Raises:
        UserError: something in the configuration or the data is wrong.
    """
    settings.check(config)
    mesh = sharding.make_mesh(config)
    config, info = data.complete(config)
    config = settings.resolve(config)
    return config, info, make_program(config, mesh, data.spec(config))


def train(config: ConfigDict, workdir: str | Path) -> dict[str, float]:
    """Trains, or goes on training, and returns the metrics of the last evaluation.

    Runs in the calling process: parses no flags, joins no pod, never exits.

    Args:
        config: a configuration with the fields of `configs/base.py`.
        workdir: the run's folder; if it holds a run of the same configuration, that run goes on.

    Raises:
        UserError: something in the configuration, the data or the workdir is wrong.
        NonFiniteLoss: more losses in a row were not finite than `optim.max_nonfinite_skips`.
    """
    config, info, program = build(config)
    folder = Workdir(Path(workdir).expanduser(), config, program, info)
    state, origin = folder.begin()
    start, end = folder.start, config.total_steps
    batches = data.make(config, program.batch_sharding, start)
    evaluators = evals.make(config, program)
    log = folder.log(origin)
    report = Report(config, log)
    trace = Trace(folder.path / "profile", start, config.profile_steps)
    metrics: dict[str, float] = {}
    try:
        for step in range(start + 1, end + 1):
            trace.before(step)
            state, values = program.train_step(state, next(batches))
            report(step, values)
            trace.after(step, state)
            evaluates = step == end or step % config.eval_every == 0
            if evaluates or step % config.checkpoint_every == 0:
                report.flush()
                with log.paused():
                    if evaluates:
                        metrics = evals.run(evaluators, state.weights)
                        log.write(step, metrics)
                    folder.save(state, step, metrics if evaluates else {})
        if start >= end:
            log.say("This run is complete.")
            metrics = evals.run(evaluators, state.weights)
            log.write(end, metrics)
        if batches.replaced:
            log.say(f"Unreadable images replaced by the next readable one: {batches.replaced:,}.")
        log.say(f"Model: {folder.export(state)}")
        return metrics
    finally:
        trace.close()
        batches.close()
        log.close()
        folder.close()
