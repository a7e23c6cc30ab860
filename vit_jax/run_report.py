"""The page of runs, and the files that a run writes for it at its end."""

import dataclasses
import posixpath
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax import UserError, evals, user_errors
from vit_jax.config_flags import default_config
from vit_jax.results import RunFolder, fields_as_text, read_run, write_page

PAGE = "report.html"


def make_page(runs: Sequence[RunFolder]) -> str:
    """Returns the page of runs; without any, only whether it could be drawn counts.

    Raises:
        UserError: bokeh or matplotlib is missing.
    """
    with user_errors("cannot draw a report", ModuleNotFoundError):
        from vit_jax.analysis import run_page  # which needs both
    return run_page.run_page(runs, fields_as_text(default_config())) if runs else ""


def report_end(config: ConfigDict, program: Any, folder: Any, params: Any) -> list[str]:
    """Writes the mistakes of a run that has ended, by all hosts, and its page; returns lines that say so.

    Args:
        config: of the run.
        program: `Inference`.
        folder: `Workdir`.
        params: to evaluate, on the devices.
    """
    lines = []
    try:
        evals.save_outputs("mistakes", folder.path, config, program, params, {}, config.total_steps)
    except UserError as error:  # no evaluation of the head, or several labels an image
        lines.append(f"The report has no mistakes: {error}")
    if jax.process_index() == 0:
        name = posixpath.basename(folder.place)
        run = dataclasses.replace(read_run(str(folder.path), name), place=folder.place)
        write_page(str(folder.path / PAGE), make_page([run]))
    return [*lines, f"Report: {folder.place}/{PAGE}"]
