"""Writes the report of a finished run: the file of its mistakes, and an HTML page."""

import dataclasses
import functools
import logging
import posixpath
from collections.abc import Callable

import jax
from ml_collections import ConfigDict

from vit_jax import UserError, evals
from vit_jax.analysis import PAGE, make_page
from vit_jax.config import EVAL_KINDS
from vit_jax.distributed import Supervisor
from vit_jax.inference import Inference
from vit_jax.monitoring import Category, MetricWriter, read_run, write_page
from vit_jax.training.workdir import Workdir
from vit_jax.tree import ArrayTree


def report_end(
    config: ConfigDict,
    program: Inference,
    workdir: Workdir,
    log: MetricWriter,
    supervisor: Supervisor,
    params: ArrayTree,
    step: int,
) -> None:
    """Writes the mistakes and the HTML page of a finished run into its folder, if `config.report` is set.

    The mistakes are written only if there is a single host and an evaluation classifies. The run is complete and saved
    by now. Failures are written to the log and change neither the other files nor the exit code.

    Args:
        config: the configuration of the run.
        program: the functions of its model.
        workdir: the folder of the run.
        log: the log of the run.
        supervisor: the supervisor of the run.
        params: the exported parameters, on the devices.
        step: their step.
    """
    if config.report:
        with supervisor.phase("writing the report", Category.UNKNOWN, patient=True):
            log.write_text("\n".join(_write_report(config, program, workdir, params, step)))


def _write_report(config: ConfigDict, program: Inference, workdir: Workdir, params: ArrayTree, step: int) -> list[str]:
    lines = []
    if jax.process_count() == 1 and any(EVAL_KINDS[each.kind].task == "classify" for each in config.evals.values()):
        work = functools.partial(evals.save_outputs, "mistakes", workdir.path, config, program, params, {})
        lines += run_or_describe_failure("the report has no mistakes", lambda: work(step))
    if jax.process_index() == 0:
        lines += run_or_describe_failure("there is no report", lambda: write_run_page(workdir)) or [
            f"Report: {workdir.location}/{PAGE}"
        ]
    return lines


def write_run_page(workdir: Workdir) -> None:
    """Writes the HTML page of a run into its folder; raises UserError if the page cannot be written."""
    name = posixpath.basename(workdir.location)
    run = dataclasses.replace(read_run(str(workdir.path), name), location=workdir.location)
    write_page(str(workdir.path / PAGE), make_page([run]))


def run_or_describe_failure(failure_text: str, work: Callable[[], object]) -> list[str]:
    """Calls `work()` and returns a list of lines: empty if it succeeds, else the line `<failure_text>: <error>`.

    Exceptions other than UserError are bugs; their traceback goes to Python's log.
    """
    try:
        work()
    except UserError as error:
        return [f"{failure_text}: {error}"]
    except Exception as error:
        logging.getLogger(__name__).warning("%s", failure_text, exc_info=True)
        return [f"{failure_text}: {type(error).__name__}: {error}"]
    return []
