"""Plans pre-trainings of the paper, for docs/results.md.

Example:
  python -m docs.paper_plans --recipes=vit_b32_jft,vit_l16_jft
  python -m docs.paper_plans --recipes=vit_l16_imagenet21k --like=vit_l16_jft

Adds a line for each recipe to docs/paper_plans.csv, or replaces it. A plan takes minutes on two idle
cores, and longer for the larger models. What was compiled is remembered. With `--like` nothing is compiled. Instead the
plan of that recipe, which must have been compiled, is scaled by the number of operations. When that recipe is compiled
again, the lines that were scaled from it are updated.
`python -m docs.results_page --write=docs/results.md` then writes the page.
"""

import argparse
import csv
import importlib

import jax

from docs.plans import plan_recipe
from docs.results_page import PLANS, read_plans
from vit_jax import UserError, choose, cli
from vit_jax.config import resolve_config
from vit_jax.macs import macs_per_image
from vit_jax.program import model_without_data

FIELDS = ("recipe", "topology", "chips", "steps", "hours", "chip_hours", "like")


def plan(recipe: str, topology: str) -> dict[str, object]:
    """Plans a recipe on a slice, and returns its line of the file: column -> value.

    Raises:
        UserError: the recipe does not fit on the slice.
    """
    found = plan_recipe(recipe, topology)
    workload, run = found.compilation.workload, found.estimate and found.estimate.run
    if run is None:
        raise UserError(f"{recipe} has no estimate on {topology}; choose another --topology.")
    return make_row(recipe, topology, workload.chips, workload.steps, run.hours)


def scale(recipe: str, like: dict[str, str]) -> dict[str, object]:
    """Returns the line of a recipe, scaled from the line `like` of another recipe by the operations of both.

    Raises:
        UserError: a configuration is wrong.
    """
    steps, operations = count_operations(recipe)
    hours = float(like["chip_hours"]) / int(like["chips"]) * operations / count_operations(like["recipe"])[1]
    return make_row(recipe, like["topology"], int(like["chips"]), steps, hours, like["recipe"])


def count_operations(recipe: str) -> tuple[int, float]:
    """Returns the number of steps of a recipe, and the multiply-accumulates of all their forward passes."""
    config = importlib.import_module(f"configs.{recipe}").get_config()
    model, config = model_without_data(config), resolve_config(config)
    return config.total_steps, float(macs_per_image(model)) * config.batch * config.total_steps


def make_row(recipe: str, topology: str, chips: int, steps: int, hours: float, like: str = "") -> dict[str, object]:
    """Returns a line of the file: column -> value, rounded. `like` is the recipe that it was scaled from, if any."""
    values = (recipe, topology, chips, steps, f"{hours:.1f}", f"{hours * chips:.0f}", like)
    return dict(zip(FIELDS, values, strict=True))


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="", help="their names, with commas between them")
    parser.add_argument("--like", help="a compiled recipe, whose plan is scaled by operations")
    parser.add_argument("--topology", default="v5e:16x16", help="a TPU slice [%(default)s]")
    args = parser.parse_args(argv[1:])
    jax.config.update("jax_platforms", "cpu")  # the compilers run in processes of their own
    rows = read_plans()
    if args.like:
        choose("compiled recipe", args.like, [name for name, row in rows.items() if not row["like"]])
    for recipe in filter(None, args.recipes.split(",")):
        rows[recipe] = scale(recipe, rows[args.like]) if args.like else plan(recipe, args.topology)
        followers = [name for name, row in rows.items() if row["like"] == recipe]
        rows |= {name: scale(name, rows[recipe]) for name in followers}
        with PLANS.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows.values())
        print(*rows[recipe].values())


if __name__ == "__main__":
    cli.run_command(main)
