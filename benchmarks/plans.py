"""Plans the paper's models on TPU slices that are not here and counts the FLOPs of Table 6, for docs/plans.md.

Example:
  python -m benchmarks.plans --write=docs/plans.md

Takes hours the first time on two cores. What was compiled is remembered, so the same command continues where it
stopped.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import jax

from benchmarks.pages import replace_section
from vit_jax import UserError, cli, models
from vit_jax.planning import (
    STRATEGIES,
    Plan,
    Request,
    compile_in_subprocess,
    config_flags,
    flops,
    make_plan,
    report,
)

# Table 6: model, epochs, exaFLOPs.
TABLE_6 = [
    ("ViT-B/32", 7, 55),
    ("ViT-B/16", 7, 224),
    ("ViT-L/32", 7, 196),
    ("ViT-L/16", 7, 783),
    ("ViT-L/16", 14, 1567),
    ("ViT-H/14", 14, 4262),
    ("R50+ViT-B/32", 7, 106),
    ("R50+ViT-B/16", 7, 274),
    ("R50+ViT-L/32", 7, 246),
    ("R50+ViT-L/16", 7, 859),
    ("R50+ViT-L/16", 14, 1668),
]
JFT_IMAGES, JFT_CLASSES = 303e6, 18_291

# Recipe -> images per chip.
MODELS = {"vit_b16_jft": 128, "vit_l16_jft": 64, "vit_h14_jft": 16, "r50_vit_b16_jft": 64}
SLICES = ["v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4"]
CHIPS = 8
GROWING = {"v5e:2x4": 8, "v5e:8x8": 64, "v5e:16x16": 256}  # the last has the recipe's batch
GROWING_IMAGES = 16
LARGEST = {"vit_b16_jft": 512, "vit_l16_jft": 256}  # recipe -> images with which the search begins


def exaflops() -> list[str]:
    """Returns the rows of the ViTs and hybrids of Table 6."""
    lines = ["| model | epochs | GMACs an image | exaFLOPs, ours | paper | |", "|---|---|---|---|---|---|"]
    for name, epochs, paper in TABLE_6:
        model = models.create(name, num_classes=JFT_CLASSES, pre_logits=True)
        ours, macs = flops.training_exaflops(model, JFT_IMAGES * epochs), flops.macs_per_image(model)
        lines.append(f"| {name} | {epochs} | {macs / 1e9:.2f} | {ours:,.1f} | {paper:,} | {ours / paper - 1:+.1%} |")
    return lines


def plan_recipe(recipe: str, target: str, *words: str) -> Plan:
    """Returns the plan of a recipe with some flags."""
    return make_plan(Request((f"--config=configs/{recipe}.py", *words), target), compile_in_subprocess)


def plan_batch(recipe: str, target: str, strategy: str, batch: int) -> Plan:
    """Returns the plan of a recipe with another batch and another placement of the weights."""
    return plan_recipe(recipe, target, f"--config.batch={batch}", *config_flags(STRATEGIES[strategy]))


def strategy_cells(recipe: str, target: str, strategy: str, batch: int) -> str:
    """Returns the columns of a strategy."""
    try:
        plan = plan_batch(recipe, target, strategy, batch)
    except UserError as error:
        return f"{str(error).partition(' on this program')[0]} | | | "
    step, estimate = plan.compilation.step, plan.estimate
    if estimate is None:
        return f"does not fit: {report.format_bytes(step.required_bytes)} | | | "
    exchange = estimate.exchange_seconds / (estimate.compute_seconds + estimate.exchange_seconds)
    return (
        f"{report.format_bytes(step.required_bytes)} | {estimate.cycles_per_image / 1e6:.2f} | {exchange:.0%} | "
        f"{estimate.images_per_second_per_chip:,.0f}, {estimate.mfu:.0%}"
    )


def chips() -> list[str]:
    """Returns a row for every model on every chip, with copied and with split weights."""
    names = "peak | Mcycles | exchange | images/s, MFU"
    lines = [f"| model, images a chip | chip | copied: {names} | split: {names} |", f"|{'---|' * 10}"]
    for recipe, images in MODELS.items():
        for target in SLICES:
            label = f"{recipe.removesuffix('_jft')}, {images} | {target.partition(':')[0]}"
            cells = [strategy_cells(recipe, target, strategy, images * CHIPS) for strategy in ("replicated", "fsdp")]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def growing() -> list[str]:
    """Returns the rows of L/16 on more and more chips, with the same images on each."""
    names = " | ".join(["peak", "Mcycles", "exchange", "images/s, MFU"])
    lines = [f"| chips | weights | {names} |", f"|{'---|' * 6}"]
    for target, count in GROWING.items():
        for strategy in ("replicated", "fsdp"):
            cells = strategy_cells("vit_l16_jft", target, strategy, GROWING_IMAGES * count)
            lines.append(f"| {target}, {count} | {strategy} | {cells} |")
    return lines


def first() -> list[str]:
    """Returns the plan of the recipe with which the page begins."""
    return ["```", report.render_plans([plan_recipe("vit_l16_jft", "v5e:16x16")]), "```"]


def misfit() -> list[str]:
    """Returns a plan that does not fit, with its advice."""
    return ["```", report.render_plans([plan_batch("vit_h14_jft", "v5e:2x4", "replicated", 512)]), "```"]


def fit() -> list[str]:
    """Returns the largest batches of predictions that a chip holds."""
    lines = ["| model | images | do not fit | Mcycles | images/s |", "|---|---|---|---|---|"]
    for recipe, begin in LARGEST.items():
        words = (f"--config=configs/{recipe}.py", f"--config.batch={begin}")
        request = Request(words, "v5e:1x1", inference=True)
        largest = make_plan(request, compile_in_subprocess, largest_batch=True).largest
        if largest and largest.plan and largest.plan.estimate:
            workload, estimate = largest.plan.compilation.workload, largest.plan.estimate
            speed = f"{estimate.cycles_per_image / 1e6:.2f} | {estimate.images_per_second_per_chip:,.0f}"
            refused = largest.refused_images_per_device
            lines.append(f"| {workload.model} | {workload.batch:,} | {refused:,} | {speed} |")
    return lines


SECTIONS: dict[str, Callable[[], list[str]]] = {
    "exaflops": exaflops,
    "first": first,
    "growing": growing,
    "misfit": misfit,
    "chips": chips,
    "fit": fit,
}


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"sections to compute, of {','.join(SECTIONS)} [all]")
    parser.add_argument("--write", type=Path, help="Markdown file in which to replace the sections")
    args = parser.parse_args(argv[1:])
    jax.config.update("jax_platforms", "cpu")  # the compilers run in processes of their own
    for name in args.only.split(",") if args.only else SECTIONS:
        text = "\n".join(SECTIONS[name]()) + "\n"
        print(text)
        if args.write:
            replace_section(args.write, name, text)


if __name__ == "__main__":
    cli.run(main)
