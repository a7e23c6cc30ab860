"""Tells what a run would need and cost on a TPU slice that need not be here: memory, exchanges, speed, chip-hours.

Example:
  python -m vit_jax.plan --config=configs/vit_l16_jft.py --topology=v5e:16x16

It compiles the very train step that `vit_jax.main` would run, for minutes the first time, and remembers it. No data is
needed. --config and --config.KEY=VALUE are those of vit_jax.main; several slices: --config.mesh.slice=2.
"""

import argparse
import functools
import itertools
import json
from typing import Any

from vit_jax import UserError, choose, cli, planning
from vit_jax.planning import (
    STRATEGIES,
    Change,
    Facts,
    advise,
    compile_elsewhere,
    estimate_cost,
    largest_batch,
    next_command,
)

Plan = dict[str, Any]


def plan(
    words: list[str],
    target: str,
    inference: bool = False,
    fit: bool = False,
    emulated: int = 1,
    price: float | None = None,
) -> Plan:
    """Returns what is known of a program: what the compiler tells (`planning.compiler`), the estimates that follow
    from it (`planning.estimate`), what to change if it does not fit, and the command that trains so.

    Args:
        words: flags of `vit_jax.main`.
        target: a TPU slice, `v5e:2x4`; `cpu` or `gpu`: the devices that are here.
        inference: a prediction instead of a step of training.
        fit: search the largest batch that fits.
        emulated: devices of `cpu`.
        price: of a chip-hour.

    Raises:
        UserError: the flags are wrong, or nothing compiles for the target.
    """
    compile = functools.partial(_compile, words, target, inference, emulated)
    facts = compile({})
    hbm = facts["memory_bytes"]
    found = _estimated(facts, price)
    change: Change | None = {} if facts["fits"] else None  # to a program that fits
    if not found["fits"] and not fit:
        advice = advise(facts, hbm, compile)
        found["advice"] = {"change": advice[0], **_estimated(advice[1], price)} if advice else None
        change = advice[0] if advice else None
    if fit:
        best, refused = largest_batch(facts, hbm, compile)
        largest = _estimated(best, price) if best else None
        found["fit"] = {"largest": largest, "refused_images_per_device": refused}
        change = {"batch": str(best["batch"])} if best else None
    if change is not None and not inference:
        found["command"] = next_command([*words, *flags(change)], facts, emulated)
    return found


def flags(change: Change) -> list[str]:
    """Returns a change as flags of `vit_jax.main`."""
    return [f"--config.{key}={value}" for key, value in change.items()]


def _compile(words: list[str], target: str, inference: bool, emulated: int, change: Change) -> Facts:
    return compile_elsewhere([*words, *flags(change)], target, inference, emulated)


def _estimated(facts: Facts, price: float | None) -> Plan:
    if not facts["fits"] or not facts["cycles"]:
        return dict(facts)
    found = estimate_cost(facts, planning.parse_topology(facts["target"]))
    if price is not None and "chip_hours" in found:
        found["price"] = found["chip_hours"] * price
    return facts | found


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `plan`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what it does not know is for vit_jax.main
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--topology", help=f"TPU slices, as v5e:16x16,v4:4x4x4; of {', '.join(planning.CHIPS)}")
    where.add_argument(
        "--cpu", type=int, nargs="?", const=1, metavar="DEVICES", help="this machine's CPU as so many [1]"
    )
    where.add_argument("--gpu", action="store_true", help="this machine's GPUs")
    parser.add_argument("--strategy", help=f"where the weights lie, any of {','.join(STRATEGIES)} [as --config.mesh]")
    parser.add_argument("--fit", action="store_true", help="search the largest batch that fits")
    parser.add_argument("--inference", action="store_true", help="a prediction instead of a step of training")
    parser.add_argument("--price", type=float, help="of a chip-hour, to tell what the run costs")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    args, words = parser.parse_known_args(argv[1:])
    targets = args.topology.split(",") if args.topology else ["gpu" if args.gpu else "cpu"]
    if args.cpu is not None and args.cpu < 1:
        raise UserError("--cpu is at least 1.")
    if args.price is not None and (args.inference or not args.topology):
        raise UserError("--price is of a run's chip-hours; leave it out with --inference, --cpu and --gpu.")
    names = args.strategy.split(",") if args.strategy else []
    placed = [flags(STRATEGIES[choose("strategy", name, STRATEGIES)]) for name in names] or [[]]
    if args.topology:
        for target in targets:
            planning.parse_topology(target)
    plans = []
    for target, more in itertools.product(targets, placed):
        found = plan([*words, *more], target, args.inference, args.fit, args.cpu or 1, args.price)
        plans.append(found)
        if args.json:
            print(json.dumps(found), flush=True)
    if not args.json:
        print(planning.render(plans))


if __name__ == "__main__":
    cli.run(main, again="what was compiled is remembered.")
