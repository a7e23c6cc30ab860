"""The metrics of a run in Weights & Biases, if it is installed."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vit_jax import UserError, encode_text, reason


class WandbRun:
    """A run of Weights & Biases, which goes on when the run of the workdir does.

    WANDB_MODE=offline keeps everything in the folder `wandb` of the workdir; `wandb sync` uploads it later.
    """

    def __init__(self, project: str, location: str, folder: Path, config: dict[str, Any]):
        """Starts or continues the run.

        Args:
            project: the project to which the run belongs.
            location: the path of the workdir, which identifies the run.
            folder: the folder for the files of Weights & Biases.
            config: the configuration, which is shown with the run.

        Raises:
            UserError: the library is not installed, or does not start.
        """
        try:
            from wandb import errors, init  # by name: without the library, a folder wandb is an empty package
        except ImportError as error:
            raise UserError("config.wandb is set, but wandb is not installed: pip install -e '.[wandb]'.") from error
        self._told = False
        run = hashlib.sha256(encode_text(location)).hexdigest()[:16]
        name = location.rstrip("/").rpartition("/")[2]
        try:
            self._run = init(project=project, id=run, name=name, dir=str(folder), config=config, resume="allow")
        except (errors.Error, OSError) as error:
            advice = "log in with `wandb login`, or set WANDB_MODE=offline"
            raise UserError(f"Weights & Biases does not start: {reason(error)}; {advice}.") from error
        # Our steps, as its own may not go back when a run resumes from an earlier checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Logs the metrics of a step."""
        self._attempt(lambda: self._run.log({"step": step, **metrics}))

    def close(self) -> None:
        """Finishes what is being uploaded."""
        self._attempt(self._run.finish)

    def _attempt(self, call: Callable[[], Any]) -> None:
        """Calls the library. The first error, of whatever kind, is logged; none is raised, since no metrics are lost.

        The workdir has the metrics, too.
        """
        try:
            call()
        except Exception as error:
            if not self._told:
                words = "Weights & Biases does not take metrics (%s); training goes on"
                logging.getLogger(__name__).warning(words, reason(error))
            self._told = True
