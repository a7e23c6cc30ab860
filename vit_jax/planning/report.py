"""Plans as text: side by side, a column each."""

from collections.abc import Iterator
from typing import Any

from vit_jax.planning.client import axes, held, needs

ESTIMATE = "compiler estimate"


def render(plans: list[dict[str, Any]]) -> str:
    """Returns what plans tell, and below what to change where one does not fit or how far it may go."""
    columns = [dict(rows(plan)) for plan in plans]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    cells = [[label, *(column.get(label, "") for column in columns)] for label in labels]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    measured = dict.fromkeys(line for plan in plans for line in reading(plan))
    return "\n".join([*lines, *measured, *(line for plan in plans for line in notes(plan))])


def rows(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the lines of a plan: label and value; bytes, FLOPs and exchanges are those of one chip (or device)."""
    yield "", plan["target"]
    yield "program", f"{plan['model']}, {'prediction' if plan['inference'] else 'train step'}, {plan['dtype']}"
    yield "mesh", f"{plan['devices']} x {plan['device_kind']}, {axes(plan)}"
    parts = f" in {plan['accum_steps']} parts" if plan["accum_steps"] > 1 else ""
    yield "images a step", f"{plan['batch']:,}, {plan['batch'] / plan['devices']:g} a chip{parts}"
    yield "fits", "yes" if plan["fits"] else "no"
    yield "parameters", amount(plan["parameter_bytes"])
    if not plan["inference"]:
        yield "optimizer, average", amount(plan["state_bytes"] - plan["parameter_bytes"])
    if "needed_bytes" not in plan:
        yield "activations, gradients", amount(plan["peak_bytes"] - held(plan))
    yield needed(plan), f"{amount(needs(plan))} of {amount(plan['memory_bytes'])}"
    if "evaluation" in plan:
        step = plan["evaluation"]
        of = f"{amount(needs(step))} of {amount(plan['memory_bytes'])}, {step['images_per_device']:,} images a chip"
        yield f"{needed(step)}, evaluation", of
    if "needed_bytes" in plan:
        return
    if plan["fits"]:
        free, waiting = left(plan), plan["waiting_bytes"]
        enough = "enough" if free >= waiting else "too little"
        yield "left", f"{amount(free)}, {enough} for {amount(waiting)} of batches read ahead"
    yield "FLOPs of matmuls", f"{plan['flops']:.4g}"
    if plan["compiler_flops"]:
        yield "FLOPs, compiler's", f"{plan['compiler_flops']:.4g}"
    if "model_flops" in plan:
        yield f"{2 if plan['inference'] else 6} x MACs", f"{plan['model_flops']:.4g}"
    for kind, row in plan["collectives"].items():
        yield kind, f"{row['count']:,} x, {amount(row['bytes'])}"
    if "cycles_per_image" not in plan:
        return
    if plan["kernels"]:
        yield "kernels", f"{plan['kernels']:,}, of unknown cycles, left out below"
    yield ESTIMATE, ""
    yield "  cycles an image", f"{plan['cycles_per_image'] / 1e6:.2f} million"
    compute, exchange = plan["compute_seconds"] * 1e3, plan["exchange_seconds"] * 1e3
    yield "  step", f"{compute + exchange:.1f} ms = {compute:.1f} of compute + {exchange:.1f} of exchange"
    yield "  images/s/chip", f"{plan['images_per_second_per_chip']:,.0f}"
    yield "  MFU", f"{plan['mfu']:.0%}"
    if "hours" in plan:
        yield "  run", f"{plan['steps']:,} steps"
        yield "  order of magnitude", f"{plan['hours']:,.1f} hours, {plan['chip_hours']:,.0f} chip-hours"
    if "price" in plan:
        yield "  price", f"{plan['price']:,.0f}"
    if "images_per_second_per_host" in plan:
        yield "read by each host", f"{plan['images_per_second_per_host']:,.0f} images/s"
        yield "  cores for it", f"{plan['input_cores']:.1f} of {plan['host_cores']}"
        yield "  limit", "chips" if plan["input_cores"] <= plan["host_cores"] else "input"
    if plan.get("paper_tpuv3_core_days"):
        days = plan["paper_tpuv3_core_days"]
        yield "paper", f"{days:,} TPUv3-core-days, {days * 24 / 2:,.0f} chip-hours of a v3"


def left(plan: dict[str, Any]) -> int:
    """Returns the bytes of a device that the larger of the steps leaves."""
    parts = [plan, plan["evaluation"]] if "evaluation" in plan else [plan]
    return plan["memory_bytes"] - max(map(needs, parts))


def reading(plan: dict[str, Any]) -> Iterator[str]:
    """Yields of what the cores that read images are reckoned."""
    if "input_cores" in plan:
        other = f"; {plan['resolution']} pixels were not measured" if plan["resolution"] != 224 else ""
        rate = f"{plan['images_per_second_per_core']:,} images/s a core"
        yield f"cores: {rate}, as measured on ImageNet's JPEGs at 224 pixels (docs/data.md){other}."


def needed(facts: dict[str, Any]) -> str:
    """Returns what the memory that a step needs is called."""
    return "needed" if "needed_bytes" in facts else "peak"


def notes(plan: dict[str, Any]) -> Iterator[str]:
    """Yields what to change in a plan that does not fit, how large a batch may be, and the command to run next."""
    subject = f"{plan['target']}, {axes(plan)}"
    if "advice" in plan:
        yield ""
        if plan["advice"] is None:
            yield f"{subject}: nothing tried makes it fit; take more chips, or a smaller model or resolution."
        else:
            words = " ".join(f"--config.{key}={value}" for key, value in plan["advice"]["change"].items())
            yield f"{subject}: it fits with {words} (compiled):"
            yield render([{key: value for key, value in plan["advice"].items() if key != "change"}])
    if "fit" in plan:
        yield ""
        largest, refused = plan["fit"]["largest"], plan["fit"]["refused_images_per_device"]
        against = f"; {refused:,} do not fit" if refused else ", and more were not tried"
        if largest is None:
            yield f"{subject}: no batch fits{against}."
        else:
            yield f"{subject}: the largest batch has {largest['images_per_device']:,} images a device{against}:"
            yield render([largest])
    if "command" in plan:
        yield ""
        own = "; yours for what is in capitals" if plan["target"].count(":") else ""
        yield f"{subject}, to run it{own}:"
        yield plan["command"]


def amount(size: float) -> str:
    """Returns a number of bytes as text."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.2f} MiB"
