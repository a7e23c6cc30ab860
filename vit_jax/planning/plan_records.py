"""The records that follow from a compiler's report: estimates, advice, and the plan that holds all of them."""

import dataclasses

from vit_jax.planning.calibration import RatioBand
from vit_jax.planning.compile_records import Compilation, ConfigChange
from vit_jax.planning.goodput import GoodputEstimate


@dataclasses.dataclass(frozen=True)
class RunEstimate:
    """The estimate of a whole training run.

    Attributes:
        images_per_second_per_host: images per second that the busiest host must read.
        input_cores: CPU cores that this reading takes.
        images_per_second_per_core: images per second that one core is assumed to read.
        host_cores: CPU cores of a host.
        hours: the hours of the run.
        chip_hours: the hours of the run, summed over all chips.
        paper_tpuv3_core_days: TPUv3-core-days of the paper's run of this model on these data for as many epochs; None
            if the paper has no such run.
        streamed_disk: number of hosts -> bytes of shards on the disk of each host, for the number of hosts of the plan
            and its halves down to 1. Empty if the images cannot be streamed.
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
    """The estimate of a step on a TPU, by the compiler's cycles and the published speed of the links.

    Attributes:
        cycles_per_image: cycles of compute that one chip takes for one of its images.
        compute_seconds: seconds of compute in a step.
        exchange_seconds: seconds of exchange in a step.
        images_per_second_per_chip: the rate of processing.
        mfu: model FLOPs utilization, between 0 and 1.
        model_flops: model FLOPs of a step on one chip.
        run: the whole run; None for a prediction.
        band: the band of the time of a step, compute and exchange together; None: not calibrated.
    """

    cycles_per_image: float
    compute_seconds: float
    exchange_seconds: float
    images_per_second_per_chip: float
    mfu: float
    model_flops: float
    run: RunEstimate | None
    band: RatioBand | None = None


@dataclasses.dataclass(frozen=True)
class ScheduleEstimate:
    """The estimate of a step on a TPU by the schedules of its operations and the exchange that they do not hide.

    Attributes:
        cycles_per_image: cycles that one chip takes for one of its images, without the exchange.
        seconds: seconds of a step, with the exchange that is not hidden.
        images_per_second_per_chip: the rate of processing.
        mfu: model FLOPs utilization, between 0 and 1.
        band: the band of `seconds`; None: not calibrated.
    """

    cycles_per_image: float
    seconds: float
    images_per_second_per_chip: float
    mfu: float
    band: RatioBand | None = None


@dataclasses.dataclass(frozen=True)
class Advice:
    """Among the changes with which a program fits, the one that costs the least speed.

    Attributes:
        change: the change to the configuration; empty if `plan` is None.
        plan: the plan with the change; None: no change that was tried makes the program fit.
    """

    change: ConfigChange
    plan: "Plan | None"


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits.

    Attributes:
        plan: the plan with that batch; None: no batch fits.
        refused_images_per_device: images per device of the smallest batch that does not fit or that the configuration
            does not allow, among those tried; None: every batch tried fits.
    """

    plan: "Plan | None"
    refused_images_per_device: int | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is known of a request.

    Attributes:
        compilation: what the compiler reported.
        estimate: the estimate by the compiler's cycles; None if the program does not fit or is not for a TPU.
        price: the price of the run; None if no price was given or there is no estimate of a run.
        advice: what the search for a change with which the program fits has found; None if the program fits, or if the
            largest batch was searched instead.
        largest: the largest batch that fits; None if it was not searched.
        command: the command that trains as planned; None if nothing that fits was found, or for a prediction.
        by_schedule: the estimate by schedules; None if it was not asked for or the program does not fit.
        goodput: the goodput to expect; None if there is no estimate of a run.
    """

    compilation: Compilation
    estimate: Estimate | None = None
    price: float | None = None
    advice: Advice | None = None
    largest: LargestBatch | None = None
    command: str | None = None
    by_schedule: ScheduleEstimate | None = None
    goodput: GoodputEstimate | None = None
