"""Which checkpoints stay when another is finished: the newest and the best."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Retention:
    """The rule, in the form that Orbax asks for.

    Attributes:
        scores: step -> how good the checkpoint is, the larger the better; None: not measured, so never best.
    """

    def __init__(self, last: int, best: int):
        """Keeps the newest `last` and, besides, the `best` best, of equally good ones the newest."""
        self._last, self._best = last, best
        self.scores: dict[int, float | None] = {}

    def kept(self, steps: Iterable[int]) -> set[int]:
        """Returns those of some steps that stay."""
        steps = sorted(steps)
        order = ranked({step: self.scores.get(step) for step in steps})
        return set(steps[-self._last :]) | set(order[: self._best])

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Tells of each checkpoint whether it stays."""
        stays = self.kept(checkpoint.step for checkpoint in checkpoints)
        return [checkpoint.step in stays for checkpoint in checkpoints]


def ranked(scores: Mapping[int, float | None]) -> list[int]:
    """Returns the steps that were measured, the best first, of equally good ones the newest first."""
    measured = {step: score for step, score in scores.items() if score is not None}
    return sorted(measured, key=lambda step: (measured[step], step), reverse=True)


def score(value: float | None) -> float | None:
    """Returns a metric as a score: what is not finite is none."""
    return value if value is not None and math.isfinite(value) else None
