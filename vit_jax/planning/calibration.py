"""How far published step times on real TPUs are from predicted ones: the band of a prediction.

Nothing of this package was run on a TPU. The published times are those of other programs. Steps of the same sizes were
compiled here to predict their times: docs/speed.md, How true it is.
"""

import dataclasses
from typing import Literal

CycleEstimate = Literal["estimate", "schedule"]

MIN_RUNS = 3  # with fewer published runs there is no band

# Measure -> kind of chip -> the published over the predicted time of a step, of each run. The numbers are those of
# python -m benchmarks.calibration.
MEASURED: dict[CycleEstimate, dict[str, tuple[float, ...]]] = {
    "estimate": {"v4": (1.09,), "v5e": (0.85, 0.84)},
    "schedule": {"v4": (1.21,), "v5e": (1.16, 1.09)},
}


@dataclasses.dataclass(frozen=True)
class RatioBand:
    """The range of the published step times of real runs, as multiples of their predicted times.

    Attributes:
        low: the smallest ratio of published to predicted time.
        high: the largest ratio of published to predicted time.
        runs: the number of runs.
        kinds: the kinds of chips on which the runs were made.
    """

    low: float
    high: float
    runs: int
    kinds: tuple[str, ...]


def find_band(kind: str, measure: CycleEstimate) -> RatioBand | None:
    """Returns the band of predictions for a kind of chip.

    If fewer than `MIN_RUNS` runs were made on this kind, the band is that of the runs on all kinds together. Returns
    None if these are too few as well.
    """
    by_kind = MEASURED.get(measure, {})
    own = {kind: by_kind.get(kind, ())}
    for chosen in (own, by_kind):
        ratios = [ratio for each in chosen.values() for ratio in each]
        if len(ratios) >= MIN_RUNS:
            return RatioBand(min(ratios), max(ratios), len(ratios), tuple(sorted(chosen)))
    return None
