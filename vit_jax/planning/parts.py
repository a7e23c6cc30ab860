"""The parts of the memory and of the time of a plan, and how much of each resource it takes.

All numbers are those of one chip (or device).
"""

from vit_jax.planning.compile_records import Compilation, Workload
from vit_jax.planning.plan_records import Plan

Parts = dict[str, float]

ACTIVATIONS = "activations, gradients"  # what a program needs beside the state


def memory_parts(compilation: Compilation) -> dict[str, Parts]:
    """Returns program -> part of the memory that it needs -> bytes of the part, whether the program fits or not."""
    workload, evaluation = compilation.workload, compilation.evaluation
    programs = {function_name(workload): compilation.step.required_bytes}
    programs |= {"evaluation": evaluation.required_bytes} if evaluation else {}
    state: Parts = {"parameters": workload.parameter_bytes}
    if not workload.inference:
        state["optimizer, average"] = workload.state_bytes - workload.parameter_bytes
    if workload.teacher_bytes:
        state["teacher"] = workload.teacher_bytes
    other_bytes = {program: required - workload.resident_bytes for program, required in programs.items()}
    return {program: state | {ACTIVATIONS: size} for program, size in other_bytes.items()}


def function_name(workload: Workload) -> str:
    """Returns what is compiled, in words."""
    return "prediction" if workload.inference else "train step"


def cycle_parts(plan: Plan) -> dict[str, Parts]:
    """Returns measure -> kind of operation -> cycles for one image.

    The measures are `estimate` and `schedule`; one that the plan lacks is absent. The kind `exchange` holds the cycles
    of the exchange that no operation hides.
    """
    by_measure: dict[str, Parts] = {}
    workload, executable = plan.compilation.workload, plan.compilation.step.executable
    images = workload.batch / workload.devices
    if executable and executable.cycles and (estimate := plan.estimate):
        by_measure["estimate"] = {"all but kernels": executable.cycles / images}
        if executable.kernel_cycles:
            by_measure["estimate"]["kernel"] = executable.kernel_cycles / images
        exchange = estimate.exchange_seconds / estimate.compute_seconds
        by_measure["estimate"]["exchange"] = estimate.cycles_per_image * exchange
    if executable and executable.schedule and plan.by_schedule:
        schedule = executable.schedule
        parts = schedule.kinds | {"exchange": schedule.exchange_exposed}
        by_measure["schedule"] = {kind: cycles / images for kind, cycles in parts.items()}
    return by_measure


def utilisation(plan: Plan) -> Parts:
    """Returns resource -> the fraction of it that a plan takes; above 1, the run needs more than there is."""
    compilation, estimate = plan.compilation, plan.estimate
    used: Parts = {"memory": 1 - compilation.free_bytes / compilation.workload.memory_bytes}
    if estimate:
        step = estimate.compute_seconds + estimate.exchange_seconds
        used |= {"matrix units (MFU)": estimate.mfu, "exchange (time)": estimate.exchange_seconds / step}
        if estimate.run:
            used["host cores (reading)"] = estimate.run.input_cores / estimate.run.host_cores
    return used
