"""Plans as text: side by side, a column each."""

from collections.abc import Iterator

from vit_jax.columns import align
from vit_jax.planning.calibration import Band
from vit_jax.planning.chips import is_topology
from vit_jax.planning.goodput import GoodputEstimate
from vit_jax.planning.parts import function_name, memory_parts
from vit_jax.planning.plan import Estimate, Plan, ScheduleEstimate
from vit_jax.planning.plan_types import Compilation, EvaluationReport, StepReport, config_flags

ESTIMATE = "compiler estimate"


def render_plans(plans: list[Plan]) -> str:
    """Returns a table of plans and, below it, the advice, the largest batches and the commands to run."""
    columns = [dict(plan_rows(plan)) for plan in plans]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    lines = align([label, *(column.get(label, "") for column in columns)] for label in labels)
    return "\n".join([*lines, *footnotes(plans), *(line for plan in plans for line in _notes(plan))])


def plan_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields label and value of the lines of a plan; bytes, FLOPs and exchanges are those of one chip (or device)."""
    workload = plan.compilation.workload
    yield "", workload.target
    yield "program", f"{workload.model}, {function_name(workload)}, {workload.dtype}"
    yield "mesh", f"{workload.devices} x {workload.device_kind}, {workload.mesh_axes}"
    parts = f" in {workload.accum_steps} parts" if workload.accum_steps > 1 else ""
    yield "images a step", f"{workload.batch:,}, {workload.batch / workload.devices:g} a chip{parts}"
    yield "fits", "yes" if plan.compilation.fits else "no"
    yield from _memory_rows(plan.compilation)
    if plan.compilation.step.needed_bytes is None:
        yield from _program_rows(plan)
        if plan.estimate:
            yield from _estimate_rows(plan, plan.estimate)
        if plan.by_schedule:
            yield from _schedule_rows(plan, plan.by_schedule)


def _memory_rows(compilation: Compilation) -> Iterator[tuple[str, str]]:
    workload, step, evaluation = compilation.workload, compilation.step, compilation.evaluation
    memory = format_bytes(workload.memory_bytes)
    for part, size in memory_parts(compilation)[function_name(workload)].items():
        if part != "activations, gradients" or step.needed_bytes is None:
            yield part, format_bytes(size)
    yield _memory_label(step), f"{format_bytes(step.required_bytes)} of {memory}"
    if evaluation:
        images = f"{evaluation.images_per_device:,} images a chip"
        yield (
            f"{_memory_label(evaluation)}, evaluation",
            f"{format_bytes(evaluation.required_bytes)} of {memory}, {images}",
        )
    if compilation.fits:
        free, waiting = compilation.free_bytes, workload.waiting_bytes
        enough = "enough" if free >= waiting else "too little"
        yield "left", f"{format_bytes(free)}, {enough} for {format_bytes(waiting)} of batches read ahead"


def _memory_label(report: StepReport | EvaluationReport) -> str:
    return "peak" if report.needed_bytes is None else "needed"


def _program_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    executable = plan.compilation.step.executable
    assert executable
    yield "FLOPs of matmuls", f"{plan.compilation.step.flops:.4g}"
    if executable.compiler_flops:
        yield "FLOPs, compiler's", f"{executable.compiler_flops:.4g}"
    if plan.estimate:
        yield f"{2 if plan.compilation.workload.inference else 6} x MACs", f"{plan.estimate.model_flops:.4g}"
    for kind, exchange in executable.collectives.items():
        yield kind, f"{exchange.count:,} x, {format_bytes(exchange.bytes)}"
    if plan.estimate and executable.kernels:
        cycles = executable.kernel_cycles
        told = (
            "of unknown cycles, left out below" if cycles is None else f"{cycles / 1e6:.2f} million cycles by schedule"
        )
        yield "kernels", f"{executable.kernels:,}, {told}"


def _estimate_rows(plan: Plan, estimate: Estimate) -> Iterator[tuple[str, str]]:
    yield ESTIMATE, ""
    yield "  cycles an image", f"{estimate.cycles_per_image / 1e6:.2f} million"
    compute, exchange = estimate.compute_seconds * 1e3, estimate.exchange_seconds * 1e3
    yield "  step", f"{compute + exchange:.1f} ms = {compute:.1f} of compute + {exchange:.1f} of exchange"
    yield "  published / estimate", format_band(estimate.band)
    yield "  images/s/chip", f"{estimate.images_per_second_per_chip:,.0f}"
    yield "  MFU", f"{estimate.mfu:.0%}"
    run = estimate.run
    if run is None:
        return
    yield "  run", f"{plan.compilation.workload.steps:,} steps"
    yield "  order of magnitude", f"{run.hours:,.1f} hours, {run.chip_hours:,.0f} chip-hours"
    if plan.price is not None:
        yield "  price", f"{plan.price:,.0f}"
    yield "read by each host", f"{run.images_per_second_per_host:,.0f} images/s"
    yield "  cores for it", f"{run.input_cores:.1f} of {run.host_cores}"
    if needs := [f"{need / 1e9:.2g} GB" for need in run.streamed_disk.values()]:
        yield "  disk, streamed", f"{needs[0]} a host" + (f", {needs[-1]} on one alone" if len(needs) > 1 else "")
    yield "  limit", "chips" if run.input_cores <= run.host_cores else "input"
    if plan.goodput:
        yield from _goodput_rows(plan.goodput)
    if days := run.paper_tpuv3_core_days:
        yield "paper", f"{days:,} TPUv3-core-days, {days * 24 / 2:,.0f} chip-hours of a v3"


def _goodput_rows(found: GoodputEstimate) -> Iterator[tuple[str, str]]:
    faults, restart = found.faults, found.faults.restart
    yield "goodput, expected", f"{found.goodput:.1%}, saving every {format_minutes(found.interval_seconds)}"
    best = f"{found.best_steps:,} steps, {format_minutes(found.best_interval_seconds)} (Daly)"
    young = f"Young: {format_minutes(found.young_interval_seconds)}"
    yield "  best save interval", f"{best}, {found.best_goodput:.1%}; {young}"
    rate = f"{faults.per_1000_host_days:.3g} in 1,000 host-days ({faults.rate_of}), {found.hosts:,} host(s)"
    yield "  failures", f"one in {found.failure_seconds / 3600:,.1f} hours: {rate}"
    yield "  a save, a restart", f"{restart.save:.3g} s, {format_minutes(restart.seconds)} ({faults.restart_of})"


def _schedule_rows(plan: Plan, found: ScheduleEstimate) -> Iterator[tuple[str, str]]:
    """Yields a step by the schedules of its operations, in millions of cycles; labels differ from the estimate's."""
    executable = plan.compilation.step.executable
    assert executable and executable.schedule
    schedule = executable.schedule
    yield "schedule", "optimistic: operations wait for nothing"
    yield "  Mcycles an image", f"{found.cycles_per_image / 1e6:.2f}"
    for kind, cycles in schedule.kinds.items():
        yield f"  {kind}", f"{cycles / 1e6:.2f} Mcycles, {cycles / schedule.cycles:.0%}"
    for kind, exposed, hidden in (
        ("exchange", schedule.exchange_exposed, schedule.exchange_hidden),
        ("copies", schedule.copies_exposed, schedule.copies_hidden),
    ):
        yield f"  {kind}", f"{exposed / 1e6:.2f} Mcycles exposed, {hidden / 1e6:.2f} hidden"
    yield "  moved", f"{format_bytes(schedule.hbm_bytes)} from and to HBM"
    if schedule.open_loops:
        yield "  loops", f"{schedule.open_loops:,} operations with loops of unknown turns"
    if schedule.missing:
        yield "  missing", f"{schedule.missing:,} operations, left out"
    yield "  ms, images/s", f"{found.seconds * 1e3:.1f}, {found.images_per_second_per_chip:,.0f} a chip"
    yield "  published / schedule", format_band(found.band)
    yield "  MFU by schedule", f"{found.mfu:.0%}"


def footnotes(plans: list[Plan]) -> list[str]:
    """Returns the rates that are assumed for the cores that read images."""
    lines: dict[str, None] = {}
    for plan in plans:
        if plan.estimate and plan.estimate.run:
            resolution = plan.compilation.workload.resolution
            other = f"; {resolution} pixels were not measured" if resolution != 224 else ""
            rate = f"{plan.estimate.run.images_per_second_per_core:,} images/s a core"
            lines[f"cores: {rate}, as measured on ImageNet's JPEGs at 224 pixels (docs/data.md){other}."] = None
    return list(lines)


def limit(plan: Plan) -> str:
    """Returns what keeps the plan from being faster, or from being possible."""
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
    """Returns what tells a plan from others of the same recipe."""
    workload = plan.compilation.workload
    return f"{workload.target}, {workload.mesh_axes}"


def alternatives(plan: Plan) -> Iterator[tuple[str, Plan | None]]:
    """Yields what the searches found: a sentence without its end, and the plan; None: there is none."""
    advice, largest, name = plan.advice, plan.largest, plan_name(plan)
    if advice and advice.plan:
        yield f"{name}: it fits with {' '.join(config_flags(advice.change))} (compiled)", advice.plan
    elif advice:
        yield f"{name}: no change tried makes it fit; use more chips, a smaller model or a lower resolution", None
    if largest:
        refused = largest.refused_images_per_device
        against = f"; {refused:,} do not fit" if refused else ", and larger ones were not tried"
        images = largest.plan.compilation.workload.images_per_device if largest.plan else 0
        found = f"the largest batch has {images:,} images a device" if largest.plan else "no batch fits"
        yield f"{name}: {found}{against}", largest.plan


def run_sentence(plan: Plan) -> str:
    """Returns what stands before the command of a plan, without its end."""
    capitals = "; replace the words in capitals" if is_topology(plan.compilation.workload.target) else ""
    return f"{plan_name(plan)}, to run it{capitals}"


def _notes(plan: Plan) -> Iterator[str]:
    """Yields what to change in a plan that does not fit, the largest batch, and the command to run next."""
    for sentence, other in alternatives(plan):
        yield from ("", f"{sentence}:", render_plans([other])) if other else ("", f"{sentence}.")
    if plan.command is not None:
        yield from ("", f"{run_sentence(plan)}:", plan.command)


def format_band(band: Band | None) -> str:
    """Returns what steps of published runs took, as multiples of their prediction."""
    if band is None:
        return "not calibrated"
    return f"{band.low:.2f} to {band.high:.2f} in {band.runs} runs on {', '.join(band.kinds)}"


def format_minutes(seconds: float) -> str:
    """Returns a time as text."""
    return f"{seconds / 60:,.1f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"


def format_bytes(size: float) -> str:
    """Returns a number of bytes as text."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.2f} MiB"
