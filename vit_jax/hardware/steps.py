"""Whole training steps: what they take to compile, at first, and then; and the memory that they need."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax import machine, reason
from vit_jax.hardware.bench import Bench, Timing, summarize
from vit_jax.hardware.row import Row
from vit_jax.hardware.workloads import STATE_SHARE, Workload
from vit_jax.planning import device_bytes, peak_bytes
from vit_jax.program import Program, program_without_data
from vit_jax.step import Batch, TrainState

LEAST, MOST = 5, 50  # steps that are timed
SECONDS = 20.0  # that the steps of a model may take
BYTES = 2**30  # of a GiB


class Running(NamedTuple):
    """A compiled step with what it is called with.

    Attributes:
        program: of the step.
        step: (state, batch) -> (state, metrics), compiled.
        state: of the training; the step takes it away.
        batch: which stays the same.
        compile_seconds: that the compiler took.
    """

    program: Program
    step: Callable[[TrainState, Batch], tuple[TrainState, Any]]
    state: TrainState
    batch: Batch
    compile_seconds: float


def measure_steps(bench: Bench) -> Iterator[Row]:
    """Yields the rows of every model."""
    for name in bench.models:
        workload = Workload.choose(bench, name)
        if note := why_not(bench, workload):
            yield Row(f"{workload}: step", "ms", None, note=note)
            continue
        try:
            yield from measure_model(bench, workload)
        except jax.errors.JaxRuntimeError as error:
            yield Row(f"{workload}: step", "ms", None, advice="device memory", note=reason(error))


def why_not(bench: Bench, workload: Workload) -> str:
    """Returns why a step is not measured; an empty text if it is."""
    left, needed = bench.left, workload.flops * LEAST / bench.product_flops if bench.product_flops else 0.0
    if left <= 0:
        return "no time was left; raise --minutes"
    if needed > left:
        return f"its steps need {needed:.0f} s at least, and {left:.0f} s were left; raise --minutes"
    _, program = program_without_data(workload.config, list(bench.mesh.devices.flat))
    state = device_bytes(program.state, program.state_shardings)
    memory = machine.device_memory(bench.mesh.local_devices)
    if memory and state > STATE_SHARE * memory:
        return f"its state has {state / BYTES:.1f} GiB, a device {memory / BYTES:.1f} GiB; raise --config.mesh.fsdp"
    return ""


def measure_model(bench: Bench, workload: Workload) -> Iterator[Row]:
    """Yields what a step takes to compile, at first, and then, and the memory that it needs."""
    before = high_water(bench.device)
    running = start(bench, workload)
    yield Row(f"{workload}: compile", "s", running.compile_seconds, advice="compile")
    began = time.perf_counter()
    state, metrics = advance(running.step, running.state, running.batch)
    jax.block_until_ready(metrics)
    first = time.perf_counter() - began
    timing, loss = time_steps(bench, running._replace(state=state))
    yield Row(f"{workload}: first step", "ms", 1e3 * first)
    yield step_row(bench, workload, timing)
    if not bool(jnp.isfinite(loss)):
        yield Row(f"{workload}: loss", "nats", None, advice="curve", note="the loss is not a number")
    yield memory_row(bench, workload, running, before)


def start(bench: Bench, workload: Workload) -> Running:
    """Compiles a step, if this was not done, and initialises its state and a batch of random numbers on the devices."""
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
    return Running(program, step, program.init(jax.random.key(0), {}), batch, seconds)


def advance(step: Callable, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
    """Makes one step."""
    return step(state, batch)


def time_steps(bench: Bench, running: Running) -> tuple[Timing, jax.Array]:
    """Returns what a step takes, and the last loss. The next one is begun before one ends, as in training."""
    state, metrics = advance(running.step, running.state, running.batch)
    jax.block_until_ready(metrics)
    began = time.perf_counter()
    state, metrics = advance(running.step, state, running.batch)
    jax.block_until_ready(metrics)
    once = bench.agree(time.perf_counter() - began)
    count = min(MOST, max(LEAST, int(min(SECONDS, bench.left) / once)))
    seconds, end = list[float](), time.perf_counter()
    for _ in range(count):
        state, upcoming = advance(running.step, state, running.batch)
        jax.block_until_ready(metrics)
        now = time.perf_counter()
        seconds.append(now - end)
        end, metrics = now, upcoming
    jax.block_until_ready(state)
    return summarize(seconds[1:]), metrics["train/loss"]


def step_row(bench: Bench, workload: Workload, timing: Timing) -> Row:
    """Returns the row of a step: beside its schedule, or else beside what its products alone would take."""
    schedule = workload.find_schedule(bench)
    bound = workload.flops / bench.product_flops if bench.product_flops else None
    notes = [f"{workload.images / timing.median:,.1f} images a second and device"]
    notes += [f"{bound / timing.median:.0%} of the products' rate"] if bound else []
    notes += [f"the compiler's estimate: {1e3 * schedule.estimated / schedule.clock:.4g} ms"] if schedule else []
    row = Row(
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


def memory_row(bench: Bench, workload: Workload, running: Running, before: int | None) -> Row:
    """Returns the row of the memory's high-water mark, beside what the compiler allocates."""
    after, name = high_water(bench.device), f"{workload}: memory's high-water mark"
    expected = peak_bytes(running.step.memory_analysis(), bench.device.platform == "tpu")  # type: ignore[attr-defined]
    if after is None or after == before:
        note = "below that of what came before" if after else "these devices count no bytes"
        return Row(name, "GiB", None, 0.0, expected / BYTES, "the compiler's", note=note)
    return Row(name, "GiB", after / BYTES, 0.0, expected / BYTES, "the compiler's", "limit", advice="device memory")


def high_water(device: jax.Device) -> int | None:
    """Returns the most bytes that were in use at once since the process began; None: the device does not count."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")
