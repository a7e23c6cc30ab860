"""Whole training steps: the time to compile them, the time of the first and of later ones, and the memory they need."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax import UserError, machine, reason
from vit_jax.measurements.bench import Bench, Timing, summarize
from vit_jax.measurements.measurement import Measurement
from vit_jax.measurements.workloads import MeasuredStep
from vit_jax.planning import device_bytes, peak_bytes
from vit_jax.program import Program, program_without_data
from vit_jax.step import TrainState
from vit_jax.tasks import Batch

MIN_STEPS, MAX_STEPS = 4, 50  # steps that are timed
WARM = 3  # steps after the first that are not timed: hosts still map the memory that these steps need
SECONDS = 20.0  # that the timed steps of a model may take
STATE_COPIES = 3  # a step needs about the memory of so many states, gradients and intermediate results included
GIB = 2**30  # bytes


class CompiledStep(NamedTuple):
    """A compiled step with its arguments.

    Attributes:
        program: the program of the step.
        step: (state, batch) -> (state, metrics), compiled.
        state: the training state, which the step donates.
        batch: the batch, which is the same in all steps.
        compile_seconds: the seconds that the compiler took.
    """

    program: Program
    step: Callable[[TrainState, Batch], tuple[TrainState, Any]]
    state: TrainState
    batch: Batch
    compile_seconds: float


class TimedSteps(NamedTuple):
    """The times of steps that were compiled before.

    Attributes:
        first: seconds of the first step.
        later: the time of a later step; None: there was no time for more steps.
        loss: the loss of the last step.
    """

    first: float
    later: Timing | None
    loss: float


def measure_steps(bench: Bench) -> Iterator[Measurement]:
    """Yields the rows of every model."""
    for name in bench.models:
        workload = MeasuredStep.choose(bench, name)
        if note := why_not(bench, workload):
            yield Measurement(f"{workload}: step", "ms", None, note=note)
            continue
        try:
            yield from measure_model(bench, workload)
        except jax.errors.JaxRuntimeError as error:
            yield Measurement(f"{workload}: step", "ms", None, advice="device memory", note=reason(error))


def why_not(bench: Bench, workload: MeasuredStep) -> str:
    """Returns why a step is not measured; an empty text if it is."""
    left, seconds = (
        bench.agree_seconds_left(),
        workload.flops * MIN_STEPS / bench.product_flops if bench.product_flops else 0.0,
    )
    if left <= 0:
        return "no time was left; raise --minutes"
    if seconds > left:
        return f"its steps need {seconds:.0f} s at least, and {left:.0f} s were left; raise --minutes"
    if bench.device.platform != "cpu":
        return ""  # other devices refuse a program that is too large; on a host, the kernel would kill some process
    _, program = program_without_data(workload.config, list(bench.mesh.devices.flat))
    state = device_bytes(program.state, program.state_shardings) * len(bench.mesh.local_devices)
    needed, free = STATE_COPIES * state, bench.agree(machine.free_host_memory())
    if needed > free:
        return f"needs some {needed / GIB:.0f} GiB, but {free / GIB:.0f} GiB are free; raise --config.mesh.fsdp"
    return ""


def measure_model(bench: Bench, workload: MeasuredStep) -> Iterator[Measurement]:
    """Yields the time to compile a step, the time of the first and of later steps, and the memory that a step needs."""
    before = high_water(bench.device)
    compiled = start(bench, workload)
    yield Measurement(f"{workload}: compile", "s", compiled.compile_seconds, advice="compile")
    timed = time_steps(bench, compiled)
    yield Measurement(f"{workload}: first step", "ms", 1e3 * timed.first)
    yield (
        step_row(bench, workload, timed.later)
        if timed.later
        else Measurement(f"{workload}: step", "ms", None, note="no time was left for more steps; raise --minutes")
    )
    if not np.isfinite(timed.loss):
        yield Measurement(f"{workload}: loss", "nats", None, advice="curve", note="the loss is not a number")
    yield memory_row(bench, workload, compiled, before)


def start(bench: Bench, workload: MeasuredStep) -> CompiledStep:
    """Compiles a step, if this was not done, and initialises its state and a batch of random numbers on the devices.

    Raises:
        UserError: the step needs a teacher.
    """
    if workload.config.task.kind == "distill":
        raise UserError("task.kind=distill can be trained and planned, but not measured; choose a recipe without it.")
    _, program = program_without_data(workload.config, list(bench.mesh.devices.flat))
    if str(workload) not in bench.compiled:
        lowered = program.train_step.lower(program.state, program.batch)  # type: ignore[attr-defined]
        began = time.perf_counter()
        step = lowered.compile()
        bench.compiled[str(workload)] = step, time.perf_counter() - began
    step, seconds = bench.compiled[str(workload)]

    def draw() -> Batch:
        image, label = program.batch["image"], program.batch["label"]
        return {
            "image": jax.random.uniform(jax.random.key(0), image.shape, image.dtype, -1, 1),
            "label": jax.random.randint(jax.random.key(1), label.shape, 0, 1000, label.dtype),
        }

    batch = jax.jit(draw, out_shardings=program.batch_sharding)()
    return CompiledStep(program, step, program.init(jax.random.key(0), {}), batch, seconds)


def advance(step: Callable, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
    """Makes one step."""
    return step(state, batch)


def time_steps(bench: Bench, compiled: CompiledStep) -> TimedSteps:
    """Makes steps and times them. As in training, the next step is begun before one ends."""
    state, seconds = compiled.state, list[float]()
    for _ in range(1 + WARM):
        began = time.perf_counter()
        state, metrics = advance(compiled.step, state, compiled.batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - began)
        first, last, left = bench.agree(seconds[0]), bench.agree(seconds[-1]), bench.agree_seconds_left()
        if last * MIN_STEPS > left:
            return TimedSteps(first, None, float(metrics["train/loss"]))
    seconds = []
    for _ in range(min(MAX_STEPS, max(MIN_STEPS, int(min(SECONDS, left) / last)))):
        end = time.perf_counter()
        state, upcoming = advance(compiled.step, state, compiled.batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - end)
        metrics = upcoming
    jax.block_until_ready(state)
    return TimedSteps(first, summarize(seconds[1:]), float(metrics["train/loss"]))


def step_row(bench: Bench, workload: MeasuredStep, timing: Timing) -> Measurement:
    """Returns the row of a step: its time, predicted by its schedule.

    Where no schedule is kept, the prediction is the time that the step's matrix products alone take at the measured
    rate.
    """
    schedule = workload.find_schedule(bench)
    bound = workload.flops / bench.product_flops if bench.product_flops else None
    notes = [f"{workload.images / timing.median:,.1f} images a second and device"]
    notes += [f"{bound / timing.median:.0%} of the products' rate"] if bound else []
    notes += [f"the compiler's estimate: {1e3 * schedule.estimated / schedule.clock:.4g} ms"] if schedule else []
    row = Measurement(
        f"{workload}: step",
        "ms",
        1e3 * timing.median,
        1e3 * timing.spread,
        bound and 1e3 * bound,
        "its products, as measured" if bound else "",
        "bound",
        advice="step",
        note="; ".join(notes),
    )
    if schedule is None:
        return row
    cycles = schedule.cycles - (0 if bench.mesh.size > 1 else schedule.exchange)
    source = f"schedule of {schedule.topology}"
    return dataclasses.replace(row, predicted=1e3 * cycles / schedule.clock, source=source, kind="near")


def memory_row(bench: Bench, workload: MeasuredStep, compiled: CompiledStep, before: int | None) -> Measurement:
    """Returns the row of the memory's high-water mark, beside what the compiler allocates."""
    after, name = high_water(bench.device), f"{workload}: memory's high-water mark"
    expected = peak_bytes(compiled.step.memory_analysis(), bench.device.platform == "tpu")  # type: ignore[attr-defined]
    if after is None or after == before:
        note = "below that of what came before" if after else "these devices count no bytes"
        return Measurement(name, "GiB", None, 0.0, expected / GIB, "the compiler's", note=note)
    return Measurement(name, "GiB", after / GIB, 0.0, expected / GIB, "the compiler's", "limit", advice="device memory")


def high_water(device: jax.Device) -> int | None:
    """Returns the most bytes that were in use at once since the process began; None: the device does not count."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")
