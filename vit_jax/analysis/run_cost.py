"""The parts of a report on what a run took, beside what was planned, and on where its time went."""

import json
import math
import shlex
import statistics
from html import escape
from typing import Any

from vit_jax import UserError
from vit_jax.analysis import html
from vit_jax.config import flatten_config
from vit_jax.macs import training_flops
from vit_jax.monitoring import RunFolder, goodput, total_seconds

# Key of a plan -> the field of the configuration that has the same value if the plan is of the run.
PLANNED = {
    "model": "model.name",
    "batch": "batch",
    "steps": "total_steps",
    "resolution": "resolution",
    "accum_steps": "accum_steps",
    "num_examples": "data.num_examples",
}

REQUIRED = ("batch", "devices", "macs_per_image")  # numbers that every plan has
# Numbers that a plan may have.
KNOWN = ("passes", "teacher_macs", "images_per_second_per_chip", "mfu", "hours", "needed_bytes", "peak_bytes")
MOST = 1e18  # of a number in a plan

CostLine = tuple[str, str, str]  # a quantity, as measured and as planned; an empty one is unknown

COST_WORDS = (
    "Images a second and the time waiting for data are medians of the logged lines, without evaluations and saving; "
    "the time is that of all processes, with compiling and evaluations. The FLOPs are those of the model: 6 for each "
    "multiply-accumulate of an image's forward pass, twice as many with SAM, and 2 for each of a teacher's."
)

TIME_WORDS = (
    "Every second from the start of the first process to the last that is known of the run, restarts included, as the "
    "first host spent it. Goodput is the share in which steps were made that count."
)


def cost_part(run: RunFolder) -> str:
    """Returns the HTML for the cost of a run.

    Raises:
        UserError: the file plan.json in the folder of the run is not a plan.
    """
    plan = parse_plan(run.plan, f"{run.location}/plan.json") if run.plan is not None else {}
    headings = ("", "measured", "planned") if plan else ("", "measured")
    rows = [costs[: len(headings)] for costs in list_costs(run, plan)]
    table = html.table([row for row in rows if any(row[1:])], headings, numbers=(1, 2))
    if plan:
        other = "; ".join(plan_differences(run, plan))
        warning = f" <strong>The plan is of another run: {escape(other)}.</strong>" if other else ""
        return f"{table}<p>Planned for {plan['devices']:,} x {escape(str(plan.get('device_kind')))}.{warning}</p>"
    command = f"python -m vit_jax.plan --config=CONFIG --topology=SLICE --json > {shlex.quote(run.location)}/plan.json"
    return f"{table}<p>No plan is saved beside the run. To have it here: <code>{escape(command)}</code></p>"


def parse_plan(text: bytes, path: str) -> dict[str, Any]:
    """Returns the first plan in a text that `vit_jax.plan --json` printed, with one object a line.

    Args:
        text: the text.
        path: the path of the file, for errors.

    Raises:
        UserError: the text is something else.
    """
    try:
        plan = json.loads(text.splitlines()[0])
        numbers = [plan[name] for name in REQUIRED] + [plan[name] for name in KNOWN if plan.get(name) is not None]
        is_plan = all(isinstance(number, int | float) and 0 <= number < MOST for number in numbers)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        is_plan = False
    if not is_plan:
        command = f"python -m vit_jax.plan --config=FILE --topology=SLICE --json > {path}"
        raise UserError(f"{path} is not a plan; delete it, or write it with {command}.")
    return plan


def plan_differences(run: RunFolder, plan: dict[str, Any]) -> list[str]:
    """Returns a text on each field in which a plan differs from the run beside which it lies."""
    fields = flatten_config(run.config)
    pairs = [(field, plan[name], fields[field]) for name, field in PLANNED.items() if name in plan]
    return [
        f"{field} is {planned} there, {own} here"
        for field, planned, own in pairs
        if planned != (list(own) if isinstance(own, tuple) else own)  # JSON has no tuples
    ]


def list_costs(run: RunFolder, plan: dict[str, Any]) -> list[CostLine]:
    """Returns rows of what a run took and of what was planned; a text is empty if the value is unknown."""
    rate, waited = median(run, "train/images_per_sec"), median(run, "perf/data_wait")
    chips, flops = plan.get("chips", plan.get("devices", 0)), planned_flops(plan)
    planned_rate = (plan.get("images_per_second_per_chip") or 0) * chips
    utilization = plan.get("mfu") or 0
    peak = max((process.get("peak_bytes") or 0 for process in run.processes), default=0)
    seconds = sum(process["seconds"] for process in run.processes)
    batch, done = run.config.batch, run.step * run.config.batch
    return [
        ("images a second", show(rate, "{:,.1f}"), show(planned_rate, "{:,.1f}")),
        ("time of a step", show_seconds(rate and batch / rate), show_seconds(planned_rate and batch / planned_rate)),
        ("waiting for data", "" if waited is None else f"{waited:.2%}", ""),
        ("FLOPs of a step", "", show(flops * batch, "{:.4g}")),
        ("FLOPs of all steps", show(flops * done, "{:.4g}"), show(flops * batch * run.config.total_steps, "{:.4g}")),
        ("FLOPs a second", show(rate and flops * rate, "{:.4g}"), show(planned_rate * flops, "{:.4g}")),
        (
            "model FLOPs utilization",
            show(planned_rate and rate and utilization * rate / planned_rate, "{:.2%}"),
            show(utilization, "{:.2%}"),
        ),
        ("memory of a device", show_bytes(peak), show_bytes(plan.get("needed_bytes") or plan.get("peak_bytes"))),
        ("time of the run", show_seconds(seconds), show_seconds(3600 * (plan.get("hours") or 0))),
    ]


def planned_flops(plan: dict[str, Any]) -> int:
    """Returns the FLOPs of training on an image by a plan, those of its teacher included; 0: not known."""
    return training_flops(plan.get("macs_per_image", 0), plan.get("passes", 1), plan.get("teacher_macs", 0))


def median(run: RunFolder, metric: str) -> float | None:
    """Returns the median of the finite values of a metric; None: there are none."""
    values = [row[metric] for _, row in run.metrics if math.isfinite(row.get(metric, math.nan))]
    return statistics.median(values) if values else None


def show(value: float | None, form: str) -> str:
    """Returns a number as text; empty if it is unknown (None) or 0."""
    return form.format(value) if value else ""


def show_bytes(value: float | None) -> str:
    """Returns a number of bytes as text, in GiB; empty if it is unknown (None) or 0."""
    return show(value and value / 2**30, "{:,.2f} GiB")


def show_seconds(value: float | None) -> str:
    """Returns a time in seconds as text, in a suitable unit; empty if it is unknown (None) or 0."""
    if not value:
        return ""
    for limit, factor, unit in ((1, 1e3, "ms"), (120, 1, "s"), (7200, 1 / 60, "minutes")):
        if value < limit:
            return f"{value * factor:,.1f} {unit}"
    return f"{value / 3600:,.1f} hours"


def time_part(run: RunFolder) -> str:
    """Returns the HTML for where the time of a run went."""
    total = total_seconds(run.starts)
    whole = sum(total.values())
    if not whole:
        return "<p>Not known: an earlier version trained the run.</p>"
    lines = [
        (category, show_seconds(spent), f"{spent / whole:.1%}", html.meter(spent / whole))
        for category, spent in total.items()
        if spent
    ]
    starts = f"{len(run.starts):,} starts" if len(run.starts) > 1 else "1 start"
    first = run.starts[0].first
    since = f", since step {first:,}: what was before is not known" if first else ""
    words = f"Goodput {goodput(total):.1%} of {show_seconds(whole)}, {starts}{since}."
    return f"<p><strong>{escape(words)}</strong></p>{html.table(lines, ('', 'time', 'share', ''), numbers=(1, 2))}"
