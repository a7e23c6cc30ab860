"""How long steps took on real TPUs beside what was predicted of them: the band of a prediction.

Nothing of this package was run on a TPU. The figures are of other programs, whose speed their authors published and of
which steps of the same sizes were compiled here: docs/speed.md, How true it is.
"""

import dataclasses
from typing import Literal

Measure = Literal["estimate", "schedule"]

FEWEST_RUNS = 3  # below which nothing is called calibrated

# Measure -> kind of chip -> published over predicted time of a step, for each run; python -m benchmarks.calibration.
MEASURED: dict[Measure, dict[str, tuple[float, ...]]] = {
    "estimate": {"v4": (1.09,), "v5e": (0.85, 0.84)},
    "schedule": {"v4": (1.21,), "v5e": (1.16, 1.09)},
}


@dataclasses.dataclass(frozen=True)
class Band:
    """Between what multiples of the predicted time the steps of published runs lie.

    Attributes:
        low: the smallest ratio of published and predicted time.
        high: the largest.
        runs: their number.
        kinds: the kinds of chips on which they ran.
    """

    low: float
    high: float
    runs: int
    kinds: tuple[str, ...]


def find_band(kind: str, measure: Measure) -> Band | None:
    """Returns the band of a kind of chip, or that of all kinds if it has fewer than three runs; None: so do all."""
    by_kind = MEASURED.get(measure, {})
    own = {kind: by_kind.get(kind, ())}
    for chosen in (own, by_kind):
        ratios = [ratio for each in chosen.values() for ratio in each]
        if len(ratios) >= FEWEST_RUNS:
            return Band(min(ratios), max(ratios), len(ratios), tuple(sorted(chosen)))
    return None
