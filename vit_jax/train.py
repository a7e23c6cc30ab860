"""The training loop: build, restore, step, log, save, evaluate."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

from ml_collections import ConfigDict

from vit_jax import evals
from vit_jax.analysis import load_drawing
from vit_jax.config import keep_choices
from vit_jax.distributed import Supervisor, preflight_checks
from vit_jax.kernel_trials import check_kernels, settle_attention
from vit_jax.monitoring import Category
from vit_jax.program import prepare
from vit_jax.shared_step import share_step
from vit_jax.storage import check_workdir
from vit_jax.training import Run, Workdir, load_teacher, place_teacher, report_end, take_model


def train(
    config: ConfigDict,
    workdir: str | Path,
    watch: Callable[[int, dict[str, float]], None] | None = None,
    supervisor: Supervisor | None = None,
) -> dict[str, float]:
    """Trains, or resumes training, and returns the metrics of the exported model.

    Runs in the calling process: parses no flags, joins no pod, never exits.

    Args:
        config: a configuration with the fields of `configs/base.py`.
        workdir: the run's folder; if it holds a run of the same configuration, that run is resumed.
        watch: called as watch(step, metrics) on the first host for each logged step, those of earlier starts too. The
            metrics are then not printed. What it raises ends the run. `vit_jax.analysis.plot.Live` draws them.
        supervisor: watches for SIGTERM and for lost and stuck hosts, if the caller has entered it; None: nothing does.

    Raises:
        UserError: something in the configuration, the data, the workdir or the hosts is wrong.
        NonFiniteLoss: more losses in a row were not finite than `optim.max_nonfinite_skips`.
        Preempted: a host got SIGTERM; what was learnt is saved.
        LostHosts: a host did not arrive where the others waited for it.
    """
    supervisor = supervisor or Supervisor()
    supervisor.begin_run(config.stall_limit)
    location = check_workdir(workdir)
    if config.report:
        load_drawing()  # tells at once if what it needs is missing
    with supervisor.phase("opening the data", patient=True):
        check = functools.partial(check_kernels, coordinator=supervisor)
        config = settle_attention(take_model(keep_choices(config, location)), location, supervisor)
        teacher = load_teacher(config)
        config, info, program = prepare(config, check, teacher.model if teacher else None)
        if config.step_numbers == "arguments":
            program = share_step(program, config)
    with contextlib.ExitStack() as stack:
        sharding = program.batch_sharding
        stack.enter_context(
            preflight_checks(supervisor, config, info, sharding, program.state, location, supervisor.raise_later)
        )
        evaluators = evals.make_evaluators(config, program, info.opened)
        with supervisor.phase("opening the workdir", patient=True):
            run_workdir = stack.enter_context(Workdir(location, config, program, info, supervisor, teacher))
        with supervisor.phase("restoring", Category.RESTORING if run_workdir.start else None):
            state, origin = run_workdir.restore_or_init()
        log = stack.enter_context(contextlib.closing(run_workdir.open_log(origin, supervisor.ledger, watch)))
        teacher_params = place_teacher(teacher, config, program, info, run_workdir.start, log, supervisor)
        if run_workdir.start < run_workdir.last_step:
            log.write_text("Compiling the evaluation step and the training step.")
            with supervisor.phase("trying the evaluation step", Category.COMPILING):
                evals.check_fits(config, program, program.eval_batch, state.eval_params)
        run_workdir.write_config()
        run = stack.enter_context(Run(config, sharding, info, run_workdir, log, evaluators, supervisor, state))
        run.evaluate_restored()
        for step, batch in run.steps():
            train_step = program.final_step(*run.final_steps) if run.final_steps else program.train_step
            state, values = train_step(run.state, batch, *teacher_params)
            run.record(step, state, values)
            if run.save_due():
                run.save()  # first: whatever an evaluation fails with, nothing is lost
            if run.evaluation_due():
                run.evaluate()
        metrics = run.finish()
        report_end(config, program, run_workdir, log, supervisor, run.state.eval_params, run.step)
        return metrics
