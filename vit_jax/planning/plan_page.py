"""The page that `vit_jax.plan --html` writes: memory, cycles and limits of plans side by side."""

import functools
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from vit_jax import analysis, encode_text
from vit_jax.planning import plan_table
from vit_jax.planning.plan_table import cycle_parts, memory_parts, utilisation
from vit_jax.planning.records import Plan

GIB, MILLION = 2**30, 10**6
LIMITS = (
    "How much the plan takes of what there is. With more than 100 % of the memory it does not fit; with more than "
    "100 % of the cores the chips wait for images. Below that the chips limit: MFU is the share of their peak speed "
    "that the model itself uses, and exchange is the share of a step in which they wait for each other."
)
MEMORY = (
    "What a chip holds when the program needs the most memory, and what it has for programs. Evaluation keeps the "
    "whole training state."
)
CYCLES = (
    "Cycles of a chip for one of its images. The compiler's estimate is pessimistic for all but matrix products; the "
    "schedules (--schedule) are optimistic, since operations wait for nothing in them. Exchange is what no operation "
    "hides; the sum beside a bar contains it, the row of cycles an image in the table does not. Clocks differ between "
    "kinds of chips."
)


def write_page(path: Path, plans: Sequence[Plan]) -> None:
    """Writes plans as an HTML page that needs no other file.

    Plans that the searches found, with a change that fits or with the largest batch, are shown beside the plans given.

    Args:
        path: the path of the page, whose folder must exist.
        plans: one or more plans of the same recipe.

    Raises:
        OSError: the page cannot be written.
    """
    plans_by_name = dict(_list_plans(plans))
    workload = plans[0].compilation.workload
    title = f"Plan of {workload.model}"
    lines = plan_table.side_by_side(plans_by_name.values())
    rows = [(label, texts if any(texts) else []) for label, texts in lines if label]
    notes = [f"<p>{escape(text)}.</p>" for plan in plans for text, _ in plan_table.alternatives(plan)]
    commands = [
        f"<p>{escape(plan_table.run_sentence(plan))}:</p><pre>{escape(plan.command)}</pre>"
        for plan in plans
        if plan.command
    ]
    body = [
        f"<h1>{escape(title)}</h1>",
        analysis.html.table((name, plan_table.limit(plan)) for name, plan in plans_by_name.items()),
        '<div class="figures">',
        *_figures(plans_by_name),
        "</div><h2>Side by side</h2>",
        analysis.html.columns(list(plans_by_name), rows),
        *(f'<p class="faint">{escape(line)}</p>' for line in plan_table.footnotes(list(plans_by_name.values()))),
        *(["<h2>What to change</h2>", *notes] if notes else []),
        *(["<h2>To run it</h2>", *commands] if commands else []),
    ]
    path.write_bytes(encode_text(analysis.html.document(title, "\n".join(body))))


def _list_plans(plans: Sequence[Plan]) -> Iterator[tuple[str, Plan]]:
    """Yields (name, plan) of each plan and, after each, of the plans that the searches found for it."""
    for plan in plans:
        name, advice, largest = plan_table.plan_name(plan), plan.advice, plan.largest
        yield name, plan
        if advice and advice.plan:
            yield f"{name} with {', '.join(f'{key}={value}' for key, value in advice.change.items())}", advice.plan
        if largest and largest.plan:
            yield f"{name}, largest batch", largest.plan


def _figures(plans: dict[str, Plan]) -> Iterator[str]:
    """Yields the HTML section of each figure: limits, memory and, if a plan has any, cycles."""
    shares = {
        name: {resource: {"used": 100 * share} for resource, share in utilisation(plan).items()}
        for name, plan in plans.items()
    }
    style: dict[str, Any] = {"label": "%", "total": "{:.0f} %", "limits": [100] * len(shares)}
    yield _section("What limits", LIMITS, shares, **style)
    programs = {name: memory_parts(plan.compilation) for name, plan in plans.items()}
    memory = {name: _scaled(bars, 1 / GIB) for name, bars in programs.items()}
    granted = [plan.compilation.workload.memory_bytes / GIB for plan in plans.values()]
    style = {"label": "GiB", "total": "{:.3g}", "limits": granted, "limit_name": "chip's limit"}
    yield _section("Memory", MEMORY, memory, **style)
    cycles = {name: _scaled(cycle_parts(plan), 1 / MILLION) for name, plan in plans.items() if cycle_parts(plan)}
    if cycles:
        yield _section("Cycles", CYCLES, cycles, label="million cycles an image, exchange included", total="{:.3g}")


def _scaled(bars: dict[str, dict[str, float]], factor: float) -> dict[str, dict[str, float]]:
    return {bar: {part: size * factor for part, size in parts.items()} for bar, parts in bars.items()}


def _section(title: str, caption: str, groups: analysis.plot.Groups, **style: Any) -> str:
    draw = functools.partial(analysis.plot.stacked_bars, groups, **style)
    text = f"{title}, in {style['label']}. " + " ".join(
        f"{name}, {bar}: {', '.join(f'{part} {size:.3g}' for part, size in parts.items())}."
        for name, bars in groups.items()
        for bar, parts in bars.items()
    )
    light, dark = (analysis.plot.encode_themed(draw, theme) for theme in analysis.THEMES)
    drawn = analysis.html.picture(light, dark, text)
    return f"<section><h2>{escape(title)}</h2>{drawn}<p>{escape(caption)}</p></section>"
