"""Plans pre-trainings of the paper, for docs/results.md.

Example:
  python -m benchmarks.paper_plans --recipes=vit_b32_jft,vit_l16_jft

Adds a line for each recipe to vit_jax/results/paper_plans.csv, or replaces it. A plan takes minutes on two idle cores,
of the larger models longer; what was compiled is remembered. `python -m vit_jax.record` then writes the page.
"""

import argparse
import csv

import jax

from benchmarks.plans import plan_recipe
from vit_jax import UserError, cli
from vit_jax.results.paper_items import PLANS, read_plans

FIELDS = ("recipe", "topology", "chips", "steps", "hours", "chip_hours")


def plan(recipe: str, topology: str) -> dict[str, object]:
    """Returns a line of the file.

    Raises:
        UserError: the recipe does not fit there.
    """
    found = plan_recipe(recipe, topology)
    workload, run = found.compilation.workload, found.estimate and found.estimate.run
    if run is None:
        raise UserError(f"{recipe} has no estimate on {topology}; choose another --topology.")
    values = (recipe, topology, workload.devices, workload.steps, f"{run.hours:.1f}", f"{run.chip_hours:.0f}")
    return dict(zip(FIELDS, values, strict=True))


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="", help="their names, with commas between them")
    parser.add_argument("--topology", default="v5e:16x16", help="a TPU slice [%(default)s]")
    args = parser.parse_args(argv[1:])
    jax.config.update("jax_platforms", "cpu")  # the compilers run in processes of their own
    rows = read_plans()
    for recipe in filter(None, args.recipes.split(",")):
        rows[recipe] = plan(recipe, args.topology)
        with PLANS.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows.values())
        print(*rows[recipe].values())


if __name__ == "__main__":
    cli.run(main)
