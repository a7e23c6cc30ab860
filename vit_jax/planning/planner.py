"""Makes a plan: compiles a program, estimates what it takes, and searches what to change if it does not fit."""

import dataclasses
from collections.abc import Callable

from vit_jax.planning.command import training_command
from vit_jax.planning.compile_records import Compilation, ConfigChange, PlanRequest
from vit_jax.planning.goodput import ASSUMED_FAULTS, Faults
from vit_jax.planning.plan_records import Advice, LargestBatch, Plan
from vit_jax.planning.search import find_fitting_change, find_largest_batch
from vit_jax.planning.time_estimate import estimate_interruptions, estimate_schedule, estimate_step


def make_plan(
    request: PlanRequest,
    compile: Callable[[PlanRequest], Compilation],
    largest_batch: bool = False,
    chip_hour_price: float | None = None,
    faults: Faults = ASSUMED_FAULTS,
) -> Plan:
    """Compiles a request, and returns the plan: memory and cost, what to change if it does not fit in memory, and the
    training command for it.

    Args:
        request: what to compile.
        compile: compiles a request.
        largest_batch: whether to search the largest batch that fits, instead of a change that makes the request fit.
        chip_hour_price: the price of a chip-hour, in any currency; None: the plan has no price.
        faults: what is assumed of failures.

    Raises:
        UserError: the flags are wrong, or nothing compiles for the target.
    """

    def compile_changed(change: ConfigChange) -> Compilation:
        return compile(request.with_change(change))

    first = compile(request)
    change: ConfigChange | None = {} if first.fits else None  # to a program that fits
    advice, largest = None, None
    if largest_batch:
        best, refused = find_largest_batch(first, compile_changed)
        largest = LargestBatch(_estimated(best, chip_hour_price, faults) if best else None, refused)
        change = {"batch": str(best.workload.batch)} if best else None
    elif not first.fits:
        fitting = find_fitting_change(first, compile_changed)
        advice = Advice(fitting[0], _estimated(fitting[1], chip_hour_price, faults)) if fitting else Advice({}, None)
        change = fitting[0] if fitting else None
    command = None
    if change is not None and not request.inference:
        command = training_command(request.with_change(change), first.workload)
    plan = _estimated(first, chip_hour_price, faults)
    return dataclasses.replace(plan, advice=advice, largest=largest, command=command)


def _estimated(compilation: Compilation, chip_hour_price: float | None, faults: Faults) -> Plan:
    estimate = estimate_step(compilation)
    run = estimate.run if estimate else None
    price = run.chip_hours * chip_hour_price if run and chip_hour_price is not None else None
    goodput = estimate_interruptions(compilation.workload, estimate, faults) if estimate and run else None
    return Plan(compilation, estimate, price, by_schedule=estimate_schedule(compilation), goodput=goodput)
