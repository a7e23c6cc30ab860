"""Plans as text: side by side, a column each."""

from collections.abc import Iterable, Iterator

from vit_jax.planning.chips import is_topology
from vit_jax.planning.goodput import GoodputEstimate
from vit_jax.planning.records import (
    Compilation,
    Estimate,
    EvaluationReport,
    Plan,
    RatioBand,
    RunEstimate,
    ScheduleEstimate,
    StepReport,
    Workload,
    config_flags,
)
from vit_jax.text_tables import align

Rows = dict[str, str | None]  # label -> text; None: the plan has no such line
Parts = dict[str, float]  # part of a resource that a plan takes -> its size on one chip (or device)
ACTIVATIONS = "activations, gradients"  # what a program needs beside the state


def render_plans(plans: list[Plan]) -> str:
    """Returns a table of plans and, below it, the advice, the largest batches and the commands to run."""
    lines = align([label, *texts] for label, texts in side_by_side(plans))
    return "\n".join([*lines, *footnotes(plans), *(line for plan in plans for line in _notes(plan))])


def side_by_side(plans: Iterable[Plan]) -> list[tuple[str, list[str]]]:
    """Returns (label, texts) of each line of the table: a text for each plan, empty where a plan has no such line."""
    columns = [plan_rows(plan) for plan in plans]
    labels = dict.fromkeys(label for column in columns for label in column)
    return [(label, [column.get(label, "") for column in columns]) for label in labels]


def plan_rows(plan: Plan) -> dict[str, str]:
    """Returns label -> text of the lines of a plan.

    Bytes, FLOPs and exchanges are those of one device: a chip, or half of a TPU7x.
    """
    workload = plan.compilation.workload
    parts = f" in {workload.accum_steps} parts" if workload.accum_steps > 1 else ""
    rows: Rows = {
        "": workload.target,
        "program": f"{workload.model}, {function_name(workload)}, {workload.dtype}",
        "mesh": f"{workload.devices} x {workload.device_kind}, {workload.mesh_axes}",
        "images a step": f"{workload.batch:,}, {workload.batch / workload.chips:g} a chip{parts}",
        "fits": "yes" if plan.compilation.fits else "no",
        **_memory_rows(plan.compilation),
    }
    if plan.compilation.step.needed_bytes is None:
        rows |= _program_rows(plan)
        rows |= _estimate_rows(plan, plan.estimate) if plan.estimate else {}
        rows |= _schedule_rows(plan, plan.by_schedule) if plan.by_schedule else {}
    return {label: text for label, text in rows.items() if text is not None}


def _memory_rows(compilation: Compilation) -> Rows:
    workload, step, evaluation = compilation.workload, compilation.step, compilation.evaluation
    memory, free, waiting = format_bytes(workload.memory_bytes), compilation.free_bytes, workload.waiting_bytes
    parts = memory_parts(compilation)[function_name(workload)].items()
    known = [(part, size) for part, size in parts if part != ACTIVATIONS or step.needed_bytes is None]
    rows: Rows = {part: format_bytes(size) for part, size in known}
    rows[_memory_label(step)] = f"{format_bytes(step.required_bytes)} of {memory}"
    if evaluation:
        images = f"{evaluation.images_per_device * workload.devices // workload.chips:,} images a chip"
        needed = f"{format_bytes(evaluation.required_bytes)} of {memory}, {images}"
        rows[f"{_memory_label(evaluation)}, evaluation"] = needed
    if compilation.fits:
        enough = "enough" if free >= waiting else "too little"
        rows["left"] = f"{format_bytes(free)}, {enough} for {format_bytes(waiting)} of batches read ahead"
    return rows


def _memory_label(report: StepReport | EvaluationReport) -> str:
    return "peak" if report.needed_bytes is None else "needed"


def _program_rows(plan: Plan) -> Rows:
    executable, estimate = plan.compilation.step.executable, plan.estimate
    assert executable
    count, cycles = executable.compiler_flops, executable.kernel_cycles
    factor = 2 if plan.compilation.workload.inference else 6
    told = "of unknown cycles, left out below" if cycles is None else f"{cycles / 1e6:.2f} million cycles by schedule"
    return {
        "FLOPs of matmuls": f"{plan.compilation.step.flops:.4g}",
        "FLOPs, compiler's": f"{count:.4g}" if count else None,
        f"{factor} x MACs": f"{estimate.model_flops:.4g}" if estimate else None,
        **{kind: f"{one.count:,} x, {format_bytes(one.bytes)}" for kind, one in executable.collectives.items()},
        "kernels": f"{executable.kernels:,}, {told}" if estimate and executable.kernels else None,
    }


def _estimate_rows(plan: Plan, estimate: Estimate) -> Rows:
    compute, exchange = estimate.compute_seconds * 1e3, estimate.exchange_seconds * 1e3
    return {
        "compiler estimate": "",
        "  cycles an image": f"{estimate.cycles_per_image / 1e6:.2f} million",
        "  step": f"{compute + exchange:.1f} ms = {compute:.1f} of compute + {exchange:.1f} of exchange",
        "  published / estimate": format_band(estimate.band),
        "  images/s/chip": f"{estimate.images_per_second_per_chip:,.0f}",
        "  MFU": f"{estimate.mfu:.0%}",
        **(_run_rows(plan, estimate.run) if estimate.run else {}),
    }


def _run_rows(plan: Plan, run: RunEstimate) -> Rows:
    needs, days = [f"{need / 1e9:.2g} GB" for need in run.streamed_disk.values()], run.paper_tpuv3_core_days
    alone = f", {needs[-1]} on one alone" if len(needs) > 1 else ""
    return {
        "  run": f"{plan.compilation.workload.steps:,} steps",
        "  order of magnitude": f"{run.hours:,.1f} hours, {run.chip_hours:,.0f} chip-hours",
        "  price": None if plan.price is None else f"{plan.price:,.0f}, at {plan.price / run.chip_hours:g} a chip-hour",
        "read by each host": f"{run.images_per_second_per_host:,.0f} images/s",
        "  cores for it": f"{run.input_cores:.1f} of {run.host_cores}",
        "  disk, streamed": f"{needs[0]} a host{alone}" if needs else None,
        "  limit": "chips" if run.input_cores <= run.host_cores else "input",
        **(_goodput_rows(plan.goodput) if plan.goodput else {}),
        "paper": f"{days:,} TPUv3-core-days, {days * 24 / 2:,.0f} chip-hours of a v3" if days else None,
    }


def _goodput_rows(estimate: GoodputEstimate) -> Rows:
    faults, restart = estimate.faults, estimate.faults.restart
    best = f"{estimate.best_steps:,} steps, {format_minutes(estimate.best_interval_seconds)} (Daly)"
    young = f"Young: {format_minutes(estimate.young_interval_seconds)}"
    rate = f"{faults.per_1000_host_days:.3g} in 1,000 host-days ({faults.rate_of}), {estimate.hosts:,} host(s)"
    return {
        "goodput, expected": f"{estimate.goodput:.1%}, saving every {format_minutes(estimate.interval_seconds)}",
        "  best save interval": f"{best}, {estimate.best_goodput:.1%}; {young}",
        "  failures": f"one in {estimate.failure_seconds / 3600:,.1f} hours: {rate}",
        "  a save, a restart": f"{restart.save:.3g} s, {format_minutes(restart.seconds)} ({faults.restart_of})",
    }


def _schedule_rows(plan: Plan, estimate: ScheduleEstimate) -> Rows:
    """Returns the lines on a step by the schedules of its operations, in millions of cycles.

    Their labels differ from those of `_estimate_rows`, since both are lines of one plan.
    """
    executable = plan.compilation.step.executable
    assert executable and executable.schedule
    schedule, whole = executable.schedule, executable.schedule.cycles
    exposed = "{:.2f} Mcycles exposed, {:.2f} hidden".format
    return {
        "schedule": "optimistic: operations wait for nothing",
        "  Mcycles an image": f"{estimate.cycles_per_image / 1e6:.2f}",
        **{f"  {kind}": f"{own / 1e6:.2f} Mcycles, {own / whole:.0%}" for kind, own in schedule.kinds.items()},
        "  exchange": exposed(schedule.exchange_exposed / 1e6, schedule.exchange_hidden / 1e6),
        "  copies": exposed(schedule.copies_exposed / 1e6, schedule.copies_hidden / 1e6),
        "  moved": f"{format_bytes(schedule.hbm_bytes)} from and to HBM",
        "  loops": f"{schedule.open_loops:,} operations with loops of unknown turns" if schedule.open_loops else None,
        "  missing": f"{schedule.missing:,} operations, left out" if schedule.missing else None,
        "  ms, images/s": f"{estimate.seconds * 1e3:.1f}, {estimate.images_per_second_per_chip:,.0f} a chip",
        "  published / schedule": format_band(estimate.band),
        "  MFU by schedule": f"{estimate.mfu:.0%}",
    }


def footnotes(plans: list[Plan]) -> list[str]:
    """Returns a line on each rate at which a CPU core is assumed to read images, without repetitions."""
    lines: dict[str, None] = {}
    for plan in plans:
        if plan.estimate and plan.estimate.run:
            resolution = plan.compilation.workload.resolution
            other = f"; {resolution} pixels were not measured" if resolution != 224 else ""
            rate = f"{plan.estimate.run.images_per_second_per_core:,} images/s a core"
            lines[f"cores: {rate}, as measured on ImageNet's JPEGs at 224 pixels (docs/data.md){other}."] = None
    return list(lines)


def limit(plan: Plan) -> str:
    """Returns, in words, what keeps a plan from being faster, or from fitting."""
    compilation, estimate = plan.compilation, plan.estimate
    workload = compilation.workload
    if not compilation.fits:
        needed = format_bytes(workload.memory_bytes - compilation.free_bytes)
        return f"memory: {needed} needed of {format_bytes(workload.memory_bytes)}"
    if estimate is None:
        return "unknown, since the compiler does not estimate a time"
    if estimate.run and estimate.run.input_cores > estimate.run.host_cores:
        return f"input: reading takes {estimate.run.input_cores:.1f} cores of {estimate.run.host_cores}"
    compute, exchange = estimate.compute_seconds * 1e3, estimate.exchange_seconds * 1e3
    name, longer = ("compute", compute) if compute >= exchange else ("exchange", exchange)
    return f"{name}: {longer:.1f} of the {compute + exchange:.1f} ms of a step"


def plan_name(plan: Plan) -> str:
    """Returns a name that tells a plan from others of the same recipe: its target and its mesh."""
    workload = plan.compilation.workload
    return f"{workload.target}, {workload.mesh_axes}"


def alternatives(plan: Plan) -> Iterator[tuple[str, Plan | None]]:
    """Yields what each search found: a sentence without its full stop, and the plan found, or None if there is none."""
    advice, largest, name = plan.advice, plan.largest, plan_name(plan)
    if advice and advice.plan:
        yield f"{name}: it fits with {' '.join(config_flags(advice.change))} (compiled)", advice.plan
    elif advice:
        yield f"{name}: no change tried makes it fit; use more chips, a smaller model or a lower resolution", None
    if largest:
        refused = largest.refused_images_per_device
        against = f"; {refused:,} do not fit" if refused else ", and larger ones were not tried"
        images = largest.plan.compilation.workload.images_per_device if largest.plan else 0
        sentence = f"the largest batch has {images:,} images a device" if largest.plan else "no batch fits"
        yield f"{name}: {sentence}{against}", largest.plan


def run_sentence(plan: Plan) -> str:
    """Returns the words that introduce the command of a plan, without the colon after them."""
    capitals = "; replace the words in capitals" if is_topology(plan.compilation.workload.target) else ""
    return f"{plan_name(plan)}, to run it{capitals}"


def _notes(plan: Plan) -> Iterator[str]:
    """Yields lines on what to change in a plan that does not fit, on the largest batch, and the command to run."""
    for sentence, other in alternatives(plan):
        yield from ("", f"{sentence}:", render_plans([other])) if other else ("", f"{sentence}.")
    if plan.command is not None:
        yield from ("", f"{run_sentence(plan)}:", plan.command)


def format_band(band: RatioBand | None) -> str:
    """Returns a band as text: the range of published step times as multiples of the predicted ones."""
    if band is None:
        return "not calibrated"
    return f"{band.low:.2f} to {band.high:.2f} in {band.runs} runs on {', '.join(band.kinds)}"


def format_minutes(seconds: float) -> str:
    """Returns a duration as text: in minutes below 2 hours, else in hours."""
    return f"{seconds / 60:,.1f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"


def format_bytes(size: float) -> str:
    """Returns a number of bytes as text: in MiB below 1 GiB, else in GiB."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.2f} MiB"


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
