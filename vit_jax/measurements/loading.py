"""The loader alone, the step alone, both together: who waits for whom."""

import functools
from collections.abc import Iterator
from contextlib import closing

import jax

from vit_jax import data
from vit_jax.measurements import steps
from vit_jax.measurements.bench import Bench, Timing, seconds_of, summarize
from vit_jax.measurements.measurement import Measurement
from vit_jax.measurements.workloads import MeasuredStep

MIN_BATCHES, MAX_BATCHES = 5, 200  # batches
TIME_FRACTION = 0.3  # of the section's time for each of the three


def measure_loading(bench: Bench) -> Iterator[Measurement]:
    """Yields the images per second of the step alone, of the loader alone and of both together, over all devices.

    The step is that of the first model. Of the default models, it needs the most images per second.
    """
    workload = MeasuredStep.choose(bench, bench.models[0])
    config, info = data.complete_config(workload.config)
    compiled = steps.start(bench, workload)
    timed = steps.time_steps(bench, compiled)
    if timed.later is None:
        yield Measurement(f"the step alone, {workload}", "images/s", None, note="no time was left for more steps")
        return
    images, step, seconds = (
        compiled.program.batch["image"].shape[0],
        timed.later,
        TIME_FRACTION * bench.agree_seconds_left(),
    )
    alone = time_loader(bench, config, info, compiled, seconds)
    compiled = compiled._replace(state=compiled.program.init(jax.random.key(0), {}))
    both = time_both(bench, config, info, compiled, seconds)
    needed = images / step.median
    slower = "the loader" if alone.median > step.median else "the step"
    waits = "the devices wait for the loader" if slower == "the loader" else "the loader waits for the devices"
    least = images / max(alone.median, step.median)
    yield Measurement(f"the step alone, {workload}", "images/s", *step.rate(images))
    loader = f"the loader alone, from {config.data.source}", "images/s", *alone.rate(images)
    yield Measurement(*loader, needed, "what the step needs", "limit", advice="loader")
    together = "both together", "images/s", *both.rate(images)
    yield Measurement(*together, least, f"{slower} alone", "limit", advice="together", note=waits)


def time_loader(bench: Bench, config, info: data.DataInfo, compiled: steps.CompiledStep, seconds: float) -> Timing:
    """Returns the time that the loader takes for a batch, until it lies on the devices, if nothing else runs."""
    with closing(data.train_batches(config, compiled.program.batch_sharding, 0, info.opened)) as batches:
        for _ in range(data.TRANSFERRED_AHEAD + 2):  # those that are read ahead
            jax.block_until_ready(next(batches))
        return time_each(bench, functools.partial(next, batches), seconds)


def time_both(bench: Bench, config, info: data.DataInfo, compiled: steps.CompiledStep, seconds: float) -> Timing:
    """Returns the time of a step with the batches of the loader. The next step is begun before one ends."""
    state, waiting = compiled.state, list[jax.Array]()
    with closing(data.train_batches(config, compiled.program.batch_sharding, 0, info.opened)) as batches:

        def train() -> None:
            nonlocal state
            state, metrics = steps.advance(compiled.step, state, next(batches))
            waiting.append(metrics["train/loss"])
            if len(waiting) > 1:
                jax.block_until_ready(waiting.pop(0))

        for _ in range(data.TRANSFERRED_AHEAD + 2):
            train()
        timing = time_each(bench, train, seconds)
        jax.block_until_ready(state)
    return timing


def time_each(bench: Bench, call, seconds: float) -> Timing:
    """Makes as many calls as fit into some seconds, and returns the mean time of a call with the spread of this mean.

    The mean is taken instead of the median, since the calls wait for one another.
    """
    once = bench.agree(seconds_of(call, 1))
    count = min(MAX_BATCHES, max(MIN_BATCHES, int(seconds / once)))
    each = [seconds_of(call, 1) for _ in range(count)]
    return Timing(sum(each) / count, summarize(each).spread / count**0.5)
