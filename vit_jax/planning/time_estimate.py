"""Estimates the time of a step and the FLOPs and the time of a run, from the compiler's report of the step.

Nothing of this package was run on a TPU. How far predictions are from reality is known from the published step times of
other programs: steps of the same sizes were compiled here to predict their times (docs/speed.md, How true it is).
"""

import math
from typing import Literal

from ml_collections import ConfigDict

from vit_jax import data
from vit_jax.macs import macs_per_image, training_flops
from vit_jax.paper import read_paper_runs
from vit_jax.planning.chips import Slice, is_topology, parse_topology
from vit_jax.planning.goodput import Faults, GoodputEstimate, estimate_goodput
from vit_jax.planning.records import Compilation, Estimate, RatioBand, RunEstimate, ScheduleEstimate, Workload
from vit_jax.program import model_without_data

# Number of images in the recipe's training split -> the data set, as in `PaperRun.pretraining`.
PRETRAINING = {303_000_000: "jft", 14_145_922: "imagenet21k"}

# `data.fast` -> images per second that a CPU core reads with `.[fast]`. Measured with inception crops of ImageNet's
# photographs at 224 pixels (docs/data.md, Speed). Other preprocessing and other resolutions were not measured.
CORE_IMAGES_PER_SECOND = {True: 1230, False: 1025}

CycleEstimate = Literal["estimate", "schedule"]
MIN_RUNS = 3  # with fewer published runs there is no band

# Measure -> kind of chip -> the published over the predicted time of a step, of each run. The numbers are those of
# python -m benchmarks.calibration.
MEASURED: dict[CycleEstimate, dict[str, tuple[float, ...]]] = {
    "estimate": {"v4": (1.09,), "v5e": (0.85, 0.84)},
    "schedule": {"v4": (1.21,), "v5e": (1.16, 1.09)},
}


def estimate_step(compilation: Compilation) -> Estimate | None:
    """Returns the estimate for a program; None if it does not fit, is not for a TPU, or has no estimate of cycles.

    Compute is the sum of the compiler's estimates of cycles, at the chip's clock. The compiler estimates nothing for
    Pallas kernels, so each takes the cycles of its schedule; kernels of unknown cycles are left out. The compiler
    estimates nothing for exchanges either. Their time is that of the collectives one after the other, each as long as
    the busiest link needs at full speed. No exchange is assumed to be hidden behind compute. Traffic between slices is
    left out.
    """
    workload, executable = compilation.workload, compilation.step.executable
    if not is_topology(workload.target) or not compilation.fits or executable is None or not executable.cycles:
        return None
    tpu = parse_topology(workload.target)
    chip = tpu.chip
    images = workload.batch / workload.devices
    cycles = executable.cycles + (executable.kernel_cycles or 0)
    compute = cycles / chip.clock
    exchange = sum(each.link_bytes for each in executable.collectives.values()) / tpu.link_bandwidth
    rate = images / (compute + exchange) * chip.devices
    return Estimate(
        cycles_per_image=cycles / images,
        compute_seconds=compute,
        exchange_seconds=exchange,
        images_per_second_per_chip=rate,
        mfu=rate * model_flops_per_image(workload) / chip.flops,
        model_flops=model_flops_per_image(workload) * images,
        run=None if workload.inference else estimate_run(workload, tpu, compute + exchange),
        band=None if workload.inference else find_band(tpu.kind, "estimate"),
    )


def estimate_schedule(compilation: Compilation) -> ScheduleEstimate | None:
    """Returns the time of a program by the schedules of its operations.

    The exchange that no operation hides is added. Waits for copies and traffic between slices are left out. Returns
    None if the schedules were not read, or if the program does not fit.
    """
    workload, executable = compilation.workload, compilation.step.executable
    if not compilation.fits or executable is None or executable.schedule is None:
        return None
    tpu, images = parse_topology(workload.target), workload.batch / workload.devices
    chip = tpu.chip
    seconds = (executable.schedule.cycles + executable.schedule.exchange_exposed) / chip.clock
    rate = images / seconds * chip.devices
    return ScheduleEstimate(
        cycles_per_image=executable.schedule.cycles / images,
        seconds=seconds,
        images_per_second_per_chip=rate,
        mfu=rate * model_flops_per_image(workload) / chip.flops,
        band=None if workload.inference else find_band(tpu.kind, "schedule"),
    )


def estimate_interruptions(workload: Workload, estimate: Estimate, faults: Faults) -> GoodputEstimate:
    """Returns the goodput to expect of a training run.

    The run saves every `save_steps` steps or every `save_minutes` minutes, whichever is the shorter interval.
    """
    step = estimate.compute_seconds + estimate.exchange_seconds
    interval = min(workload.save_steps * step, 60 * workload.save_minutes or math.inf)
    hosts = parse_topology(workload.target).hosts * workload.mesh["slice"]
    return estimate_goodput(step, interval, hosts, faults)


def model_flops_per_image(workload: Workload) -> int:
    """Returns the FLOPs that a model needs for an image, those of its teacher included.

    For a prediction they are those of the forward pass; for training, those of `macs.training_flops`.
    """
    if workload.inference:
        return 2 * workload.macs_per_image
    return training_flops(workload.macs_per_image, workload.passes, workload.teacher_macs)


def estimate_run(workload: Workload, tpu: Slice, step_seconds: float) -> RunEstimate:
    """Returns what a training run takes if each step takes `step_seconds`; evaluations and saving are left out."""
    read, core_rate = workload.images_per_host / step_seconds, CORE_IMAGES_PER_SECOND[workload.fast]
    hours = workload.steps * step_seconds / 3600
    hosts, images = tpu.hosts * workload.mesh["slice"], workload.num_examples
    row = workload.model, PRETRAINING.get(images), round(workload.epochs)
    days = [run.core_days for run in read_paper_runs() if (run.model, run.pretraining, run.epochs) == row]
    return RunEstimate(
        images_per_second_per_host=read,
        input_cores=read / core_rate,
        images_per_second_per_core=core_rate,
        host_cores=tpu.chip.cores[tpu.chips_per_host],
        hours=hours,
        chip_hours=hours * workload.chips,
        paper_tpuv3_core_days=days[0] if days else None,
        streamed_disk=data.planned_disk(images, workload.batch, workload.readers, workload.window, hosts),
    )


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


def run_exaflops(config: ConfigDict, teacher_macs: int = 0) -> float:
    """Returns the floating point operations of a run, in units of 1e18, without its evaluations.

    Args:
        config: the configuration as it lies in the folder of the run.
        teacher_macs: the multiply-accumulates of the forward pass of its teacher on an image; 0: it has none.
    """
    images = config.total_steps * config.batch
    return (
        training_flops(macs_per_image(model_without_data(config)), count_passes(config), teacher_macs) * images / 1e18
    )


def count_passes(config: ConfigDict) -> int:
    """Returns the number of gradients that a training step computes: two with SAM (`optim.sam_rho`)."""
    return 2 if config.optim.sam_rho else 1
