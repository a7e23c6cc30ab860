"""Training metrics, which are fetched from the devices one step late, so that the devices never wait for the host."""

from collections.abc import Callable

import jax
from ml_collections import ConfigDict

from vit_jax import NonFiniteLoss
from vit_jax.monitoring.metric_writer import MetricWriter


def fetch_metrics(values: dict[str, jax.Array]) -> dict[str, float]:
    """Waits for the metrics of a step and returns them as numbers."""
    return {name: float(value) for name, value in jax.device_get(values).items()}


class TrainMetrics:
    """Takes the metrics of each step when it is dispatched, and fetches those of the step before."""

    def __init__(self, config: ConfigDict, log: MetricWriter, waited: Callable[[], float]):
        """Writes to `log`; `waited` returns the seconds spent waiting for data so far."""
        self._config, self._log, self._waited = config, log, waited
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._started = False

    def __call__(self, step: int, values: dict[str, jax.Array]) -> None:
        """Adds the metrics of a step that was just dispatched.

        Raises:
            NonFiniteLoss: see `flush`.
        """
        if not self._started:
            self._log.start_clock(step - 1, self._waited())  # compilation ends only now
        self._started = True
        self.flush()
        self._pending = step, values

    def flush(self) -> None:
        """Fetches the metrics that are still on the devices, and writes them if they are due.

        Raises:
            NonFiniteLoss: a loss, gradient or learning rate was not finite, in more steps in a row than
                `optim.max_nonfinite_skips` allows.
        """
        if self._pending is None:
            return
        (step, values), self._pending = self._pending, None
        metrics = fetch_metrics(values)
        skips = int(metrics.pop("train/skips"))
        if skips:
            self._report_skip(step, skips, metrics["train/loss"])
        self._log.advance(step)
        if step % self._config.log_every == 0 or step == self._config.total_steps:
            self._log.write_metrics(step, metrics | self._log.speed(step, self._waited()))
        else:
            self._log.write_progress(step, metrics)

    def _report_skip(self, step: int, skips: int, loss: float) -> None:
        batch = f"batch {step - 1} of seed {self._config.seed}"
        what = f"the loss ({loss}), a gradient or the learning rate is not finite at step {step} ({batch})"
        if skips > self._config.optim.max_nonfinite_skips:
            raise NonFiniteLoss(
                f"{what}; the last good checkpoint is kept. Lower base_lr, set grad_norm_clip, or skip some such steps "
                "with optim.max_nonfinite_skips."
            )
        self._log.write_text(f"Skipped: {what}, {skips} in a row.")
