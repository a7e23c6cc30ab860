"""What follows from the report of a compiler: estimates, advice, and the plan of all that is known."""

import dataclasses

from vit_jax.planning.calibration import Band
from vit_jax.planning.goodput import GoodputEstimate
from vit_jax.planning.plan_types import Compilation, ConfigChange


@dataclasses.dataclass(frozen=True)
class RunEstimate:
    """What a whole training run takes.

    Attributes:
        images_per_second_per_host: that the busiest host must read.
        input_cores: CPU cores that this takes.
        images_per_second_per_core: the rate assumed for one core.
        host_cores: CPU cores of the host.
        hours: of the run.
        chip_hours: of the run, over all chips.
        paper_tpuv3_core_days: of the paper's run of this model on these data; None: the paper has none.
        streamed_disk: number of hosts, this one and fewer -> bytes of shards on each, if the images are streamed.
    """

    images_per_second_per_host: float
    input_cores: float
    images_per_second_per_core: int
    host_cores: int
    hours: float
    chip_hours: float
    paper_tpuv3_core_days: int | None
    streamed_disk: dict[int, int]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step takes on a TPU, by the compiler's cycles and the published speed of the links.

    Attributes:
        cycles_per_image: of one chip.
        compute_seconds: of a step.
        exchange_seconds: of a step.
        images_per_second_per_chip: the rate of processing.
        mfu: model FLOPs utilization, between 0 and 1.
        model_flops: of a step on one chip.
        run: the whole run; None for a prediction.
        band: of the compute and exchange of a step; None: not calibrated.
    """

    cycles_per_image: float
    compute_seconds: float
    exchange_seconds: float
    images_per_second_per_chip: float
    mfu: float
    model_flops: float
    run: RunEstimate | None
    band: Band | None = None


@dataclasses.dataclass(frozen=True)
class ScheduleEstimate:
    """What a step takes on a TPU by the schedules of its operations and the exchange that they do not hide.

    Attributes:
        cycles_per_image: of one chip, without the exchange.
        seconds: of a step.
        images_per_second_per_chip: the rate of processing.
        mfu: model FLOPs utilization, between 0 and 1.
        band: of `seconds`; None: not calibrated.
    """

    cycles_per_image: float
    seconds: float
    images_per_second_per_chip: float
    mfu: float
    band: Band | None = None


@dataclasses.dataclass(frozen=True)
class Advice:
    """The change that costs the least speed of those with which a program fits.

    Attributes:
        change: to the configuration.
        plan: with the change; None: no change that was tried makes the program fit.
    """

    change: ConfigChange
    plan: "Plan | None"


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits.

    Attributes:
        plan: with that batch; None: no batch fits.
        refused_images_per_device: the smallest batch that was found not to fit; None: every batch tried fits.
    """

    plan: "Plan | None"
    refused_images_per_device: int | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is known of a request.

    Attributes:
        compilation: what the compiler reported.
        estimate: None: the program does not fit, or is not for a TPU.
        price: of the run; None: no price was given, or there is no estimate of a run.
        advice: None: none was needed or asked for.
        largest: None: the largest batch was not searched.
        command: that trains as planned; None: nothing that fits was found, or this is a prediction.
        by_schedule: None: it was not asked for.
        goodput: None: there is no estimate of a run.
    """

    compilation: Compilation
    estimate: Estimate | None = None
    price: float | None = None
    advice: Advice | None = None
    largest: LargestBatch | None = None
    command: str | None = None
    by_schedule: ScheduleEstimate | None = None
    goodput: GoodputEstimate | None = None
