"""When a run ends before `total_steps`: once its evaluations have found nothing better for some time."""

import dataclasses
import math
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import is_lowest_best
from vit_jax.monitoring import format_value


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """What the evaluations of a run so far say of its end. Each checkpoint stores it.

    Once `stop_after` evaluations in a row were not better, the end is decided: no evaluation is counted any more, the
    learning rate falls to 0 over `stop_cooldown` steps, and the run ends.

    Attributes:
        best: the value of `checkpoint.best_metric` that the next evaluations are compared with; None: there was none.
        best_step: the step of this value; 0: there was none.
        misses: the number of evaluations since then, none of which was better.
        step: the step of the last evaluation that was counted.
    """

    best: float | None = None
    best_step: int = 0
    misses: int = 0
    step: int = 0

    def count(self, config: ConfigDict, step: int, value: float) -> "EarlyStopping":
        """Returns what is known after one more evaluation. A value that is not finite is not better.

        Args:
            config: the configuration of the run.
            step: the step of the evaluation.
            value: the value of `checkpoint.best_metric`.
        """
        sign = -1 if is_lowest_best(config) else 1
        better = self.best is None or sign * (value - self.best) > config.stop_difference
        if math.isfinite(value) and better:
            return EarlyStopping(value, step, 0, step)
        return dataclasses.replace(self, misses=self.misses + 1, step=step)

    def is_decided(self, config: ConfigDict) -> bool:
        """Returns whether the run ends early."""
        return config.stop_after is not None and self.misses >= config.stop_after

    def last_step(self, config: ConfigDict) -> int:
        """Returns the last step of the run, as far as it is known: `total_steps`, unless the run ends early."""
        ended = self.step + config.stop_cooldown if self.is_decided(config) else config.total_steps
        return min(ended, config.total_steps)

    def final_steps(self, config: ConfigDict) -> tuple[int, int] | None:
        """Returns the steps between which the learning rate falls to 0; None: the run does not end early."""
        last = self.last_step(config)
        return (self.step, last) if self.is_decided(config) and self.step < last else None

    def describe(self, config: ConfigDict) -> str:
        """Returns why and when the run ends early, as a sentence."""
        metric = config.checkpoint.best_metric
        best = "it was never finite"
        if self.best is not None:
            best = f"the best is {format_value(metric, self.best)} at step {self.best_step:,}"
            best += f", and none is better by more than {config.stop_difference:g}" if config.stop_difference else ""
        cooldown = f"the learning rate falls to 0 until step {self.last_step(config):,}, where the run ends"
        end = cooldown if self.final_steps(config) else "the run ends here"
        return f"Early stopping: {metric} has not improved in {self.misses} evaluations ({best}); {end}."

    def to_json(self) -> dict[str, Any]:
        """Returns its attributes."""
        return dataclasses.asdict(self)
