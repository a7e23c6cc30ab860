"""Plans the paper's models on TPU slices that are not here and counts the FLOPs of Table 6, for docs/plans.md.

Example:
  python -m docs.plans --write=docs/plans.md

Takes hours the first time on two cores. What was compiled is remembered, so the same command continues where it
stopped.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import jax

from docs.pages import print_sections
from vit_jax import analysis, cli
from vit_jax.macs import macs_per_image, training_flops
from vit_jax.model import Model, create
from vit_jax.paper import read_paper_runs
from vit_jax.plan import plan_models
from vit_jax.planning import (
    STRATEGIES,
    PlanRequest,
    compile_in_subprocess,
    config_flags,
    make_plan,
    plan_table,
)
from vit_jax.planning.inference_plan import SIZES, InferenceFigure
from vit_jax.planning.records import Plan

TABLE_6 = [run for run in read_paper_runs() if run.exaflops]
# Each model takes ten compilations.
FIGURE_12 = ("ViT-B/16", "ViT-B/32", "ViT-L/32", "ViT-L/16", "ViT-H/14", "BiT-R50x1", "BiT-R50x2")
NOT_COMPILED = ("BiT-R152x4",)  # the figure has this model too
JFT_IMAGES, JFT_CLASSES = 303e6, 18_291


def table_6_model(name: str) -> Model:
    """Returns a model of Table 6 with the head of its pre-training, with `scan` because that is traced fastest."""
    fields = {} if name.startswith("BiT") else {"pre_logits": True, "scan": True}
    return create(name, num_classes=JFT_CLASSES, **fields)


def training_exaflops(model: Model, images: float) -> float:
    """Returns the floating point operations of training on a number of images, in units of 1e18."""
    return training_flops(macs_per_image(model)) * images / 1e18


def exaflops() -> list[str]:
    """Returns the lines of a table that compares our FLOPs of pre-training with those in Table 6."""
    lines = ["| model | epochs | GMACs an image | exaFLOPs, ours | paper | |", "|---|---|---|---|---|---|"]
    for run in TABLE_6:
        name, epochs, paper = run.model, run.epochs or 0, run.exaflops or 0
        model = table_6_model(name)
        ours, macs = training_exaflops(model, JFT_IMAGES * epochs), macs_per_image(model)
        lines.append(f"| {name} | {epochs} | {macs / 1e9:.2f} | {ours:,.1f} | {paper:,} | {ours / paper - 1:+.1%} |")
    return lines


def plan_recipe(recipe: str, target: str, *words: str) -> Plan:
    """Returns the plan of a recipe on a slice, with further flags."""
    return make_plan(PlanRequest((f"--config=configs/{recipe}.py", *words), target), compile_in_subprocess)


def first() -> list[str]:
    """Returns the lines of the plan with which the page begins."""
    return ["```", plan_table.render_plans([plan_recipe("vit_l16_jft", "v5e:16x16")]), "```"]


def misfit() -> list[str]:
    """Returns the lines of a plan that does not fit into memory, with the advice that it prints."""
    words = config_flags(STRATEGIES["replicated"])
    return ["```", plan_table.render_plans([plan_recipe("vit_h14_jft", "v5e:2x4", *words)]), "```"]


@functools.cache
def plan_figure12() -> InferenceFigure:
    """Returns the speed and the largest batch of inference on one chip, for the models of Figure 12."""
    return plan_models(
        PlanRequest(("--config=configs/vit_b16_jft.py",), "v5e:1x1", inference=True, reads_schedules=True), FIGURE_12
    )


def figure12() -> list[str]:
    """Returns both halves of Figure 12 as the lines of a table. Models that were not compiled have empty cells."""
    return [plan_figure12().render(), *(f"| {name} |{' |' * len(SIZES)}" for name in NOT_COMPILED)]


SECTIONS: dict[str, Callable[[], list[str]]] = {
    "exaflops": exaflops,
    "first": first,
    "misfit": misfit,
    "figure12": figure12,
}


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"sections to compute, of {','.join(SECTIONS)} [all]")
    parser.add_argument(
        "--write", type=Path, help="Markdown file in which to replace the sections; beside it, figure12.svg"
    )
    args = parser.parse_args(argv[1:])
    jax.config.update("jax_platforms", "cpu")  # the compilers run in processes of their own
    for name in args.only.split(",") if args.only else SECTIONS:
        print_sections([(name, SECTIONS[name]())], args.write)
        if args.write and name == "figure12":
            analysis.plot.inference(plan_figure12().points).savefig(args.write.with_name("figure12.svg"))


if __name__ == "__main__":
    cli.run_command(main)
