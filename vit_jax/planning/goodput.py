"""The goodput to expect of a run whose hosts fail now and then, and how often it should save.

Goodput is the share of the time that goes into steps that are not lost. In this model failures come at random, with the
same rate for each host, and any failure interrupts the training of all hosts.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from vit_jax import UserError
from vit_jax.monitoring import Category, Start, total_seconds

DAY = 86400.0  # seconds
# Where failures were counted -> failures in 1,000 host-days.
FAILURE_RATES = {
    # 0.08 % of the machines a day; links, switches and software come on top (Zu et al., NSDI 2024).
    "TPU v4 machines": 0.8,
    # 2.34 and 6.50: hosts of 8 A100s, 11 months (Kokolis et al., arXiv 2410.21680).
    "RSC-2": 2.34,
    # 419 unexpected interruptions of one job in 54 days on 16,384 H100s, 8 a host (Llama 3, arXiv 2407.21783, 3.3.4).
    "Llama 3": 419 / 54 / (16384 / 8 / 1000),
    "RSC-1": 6.50,
}
ASSUMED = "Llama 3"  # the rate that plans assume: it counts whatever interrupts one job, and a run here is one job


@dataclasses.dataclass(frozen=True)
class Restart:
    """The costs of failures and of saves to a run, all in seconds.

    Attributes:
        save: the time for which a save holds up training.
        detecting: the time from a failure until the other hosts notice that a host is lost. If `measure_restart`
            measured it, the time from the end of a start to the next start.
        starting: the time from the start of the process to the first batch, without restoring and compiling.
        restoring: the time in which a checkpoint is read.
        compiling: the time in which programs are compiled.
    """

    save: float
    detecting: float
    starting: float
    restoring: float
    compiling: float

    @property
    def seconds(self) -> float:
        """The time from a failure to the first step after it, in seconds."""
        return self.detecting + self.starting + self.restoring + self.compiling


# ViT-B/16 on two CPU cores: `python -m benchmarks.goodput` measures it; a lost host is noticed after 70 s at most, see
# docs/reliability.md. Nothing was measured on a TPU.
MEASURED_ON_CPU = Restart(save=0.3, detecting=70.0, starting=1.6, restoring=2.6, compiling=11.9)


@dataclasses.dataclass(frozen=True)
class Faults:
    """The assumptions of a plan about failures.

    Attributes:
        per_1000_host_days: the number of failures in 1,000 host-days.
        rate_of: where this rate was observed, in words.
        restart: what each failure and each save costs.
        restart_of: where these costs were measured, in words.
    """

    per_1000_host_days: float = FAILURE_RATES[ASSUMED]
    rate_of: str = ASSUMED
    restart: Restart = MEASURED_ON_CPU
    restart_of: str = "ViT-B/16 on two CPU cores"


ASSUMED_FAULTS = Faults()


@dataclasses.dataclass(frozen=True)
class GoodputEstimate:
    """The goodput to expect.

    Attributes:
        faults: what is assumed of failures.
        hosts: the number of hosts.
        failure_seconds: mean time between two failures of any host.
        interval_seconds: seconds of training between two saves, as configured.
        goodput: the goodput with the configured interval, between 0 and 1.
        best_interval_seconds: the interval that is best by Daly's formula, rounded to whole steps.
        best_steps: the number of steps in the best interval.
        best_goodput: the goodput with the best interval, between 0 and 1.
        young_interval_seconds: the interval that is best by Young's formula, not rounded.
    """

    faults: Faults
    hosts: int
    failure_seconds: float
    interval_seconds: float
    goodput: float
    best_interval_seconds: float
    best_steps: int
    best_goodput: float
    young_interval_seconds: float


def estimate_goodput(step_seconds: float, interval_seconds: float, hosts: int, faults: Faults) -> GoodputEstimate:
    """Returns the goodput to expect of a run, and the best interval between its saves.

    Args:
        step_seconds: seconds of a step.
        interval_seconds: seconds of training between two saves, as configured.
        hosts: the number of hosts.
        faults: what is assumed of failures.
    """
    between = time_between_failures(hosts, faults.per_1000_host_days)
    save, restart = faults.restart.save, faults.restart.seconds
    steps = max(round(daly_interval(save, between) / step_seconds), 1)
    best = steps * step_seconds
    return GoodputEstimate(
        faults=faults,
        hosts=hosts,
        failure_seconds=between,
        interval_seconds=interval_seconds,
        goodput=expected_goodput(interval_seconds, save, restart, between),
        best_interval_seconds=best,
        best_steps=steps,
        best_goodput=expected_goodput(best, save, restart, between),
        young_interval_seconds=young_interval(save, between),
    )


def time_between_failures(hosts: int, per_1000_host_days: float) -> float:
    """Returns the mean seconds between two failures of any host."""
    return 1000 * DAY / (per_1000_host_days * hosts)


def young_interval(save: float, between: float) -> float:
    """Returns the seconds of training between two saves with which failures and saves cost least, to first order.

    Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.

    Args:
        save: seconds of one save.
        between: mean seconds between two failures.
    """
    return math.sqrt(2 * save * between)


def daly_interval(save: float, between: float) -> float:
    """Returns the seconds of training between two saves with which failures and saves cost least, to higher order.

    Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006.

    Args:
        save: seconds of one save.
        between: mean seconds between two failures.
    """
    ratio = save / (2 * between)
    if ratio >= 1:
        return between
    return young_interval(save, between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def expected_goodput(interval: float, save: float, restart: float, between: float) -> float:
    """Returns the share of the time that goes into steps that are not lost, between 0 and 1.

    By Daly (2006), t seconds of training and the save of d seconds after them are expected to take
    M exp(R / M) (exp((t + d) / M) - 1) seconds, where M is the mean time between failures and R the time of a restart.
    The share is t divided by that. A failure loses what was trained since the last save. It may also come during a save
    or a restart.

    Args:
        interval: t, seconds of training between two saves.
        save: d, seconds for which each save holds up training.
        restart: R, seconds from a failure to the next step.
        between: M, mean seconds between two failures.
    """
    try:
        taken = between * math.exp(restart / between) * math.expm1((interval + save) / between)
    except OverflowError:  # it fails before it comes to a save
        return 0.0
    return interval / taken


def measure_restart(starts: Sequence[Start], location: str) -> Restart:
    """Returns what saves and restarts have cost a run, by its ledger.

    The times of starting, restoring and compiling are medians over the starts that resumed the run. The time of a save
    and the idle time between two starts are means. A start that completed the run counts for saves only if no other
    start has saved, since its saving includes the export of the model.

    Args:
        starts: the starts in the ledger.
        location: where the run lies, for the message of the error.

    Raises:
        UserError: the run was never resumed, or has saved nothing.
    """
    resumed, saving = [start for start in starts if start.first], [start for start in starts if start.saves]
    if not resumed or not saving:
        unknown = f"the run in {location} has saved nothing or was never resumed, so its restarts cannot be measured"
        raise UserError(f"{unknown}; omit --measured.")
    saving = [start for start in saving if not start.complete] or saving  # others have exported the model, too
    total = total_seconds(starts)

    def median(category: Category) -> float:
        return statistics.median(start.seconds.get(category, 0.0) for start in resumed)

    return Restart(
        save=sum(start.seconds.get(Category.SAVING, 0.0) for start in saving) / sum(start.saves for start in saving),
        detecting=total[Category.IDLE] / max(len(starts) - 1, 1),
        starting=median(Category.STARTING),
        restoring=median(Category.RESTORING),
        compiling=median(Category.COMPILING),
    )
