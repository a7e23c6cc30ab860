"""Shows what a run would need and cost on a TPU slice that need not be here.

That is memory, communication, speed and chip-hours.

Example:
  python -m vit_jax.plan --config=configs/vit_l16_jft.py --topology=v5e:16x16

Compiles the train step that `vit_jax.main` would run, which takes minutes the first time, and remembers the result. No
data are needed. --config and --config.KEY=VALUE are those of vit_jax.main; several slices: --config.mesh.slice=2.
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from vit_jax import UserError, analysis, choose, cli, tell, user_errors
from vit_jax.config import get_config, parse_command_line
from vit_jax.json_text import to_json
from vit_jax.model import create
from vit_jax.monitoring import read_run
from vit_jax.planning import (
    ASSUMED_FAULTS,
    CHIPS,
    MODELS,
    STRATEGIES,
    Faults,
    InferenceFigure,
    PlanRequest,
    compile_in_subprocess,
    config_flags,
    make_plan,
    measure_restart,
    parse_topology,
    plan_inference,
    plan_to_json,
    render_plans,
)


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `planning.make_plan`.
    """
    args, arguments = make_parser().parse_known_args(argv[1:])
    if args.cpu is not None and args.cpu < 1:
        raise UserError("--cpu must be at least 1.")
    if args.price is not None and (args.inference or not args.topology):
        raise UserError("--price is per chip-hour of a training run; omit it with --inference, --cpu or --gpu.")
    if args.price is not None and not 0 < args.price < math.inf:
        raise UserError(f"--price={args.price:g} must be a positive number: the price of a chip-hour.")
    faults = choose_faults(args)
    if args.sizes or args.models or args.picture:
        show_inference(args, arguments)
        return
    if args.html:  # before hours of compilation
        make_folder_of(args.html)
    plans = []
    for request in make_requests(args, arguments):
        plan = make_plan(request, compile_in_subprocess, args.fit, args.price, faults)
        plans.append(plan)
        if args.json:
            print(to_json(plan_to_json(plan)), flush=True)
    if not args.json:
        print(render_plans(plans))
    if args.html:
        with user_errors("cannot draw", ModuleNotFoundError), user_errors(f"cannot write {args.html}"):
            from vit_jax.planning import write_page  # which needs matplotlib

            write_page(Path(args.html), plans)
        tell(f"Wrote {args.html}")


def choose_faults(args: argparse.Namespace) -> Faults:
    """Returns the failures to plan for.

    Raises:
        UserError: failures are asked for without a training run on TPUs, their rate is not positive, or the run that
            `--measured` names does not show how long a restart takes.
    """
    if (args.failures is not None or args.measured) and (args.inference or not args.topology):
        raise UserError("--failures and --measured need a training run on TPUs: add --topology, and omit --inference.")
    faults = ASSUMED_FAULTS
    if args.failures is not None:
        if not 0 < args.failures < math.inf:
            raise UserError(f"--failures={args.failures:g} must be a positive number: failures in 1,000 host-days.")
        faults = dataclasses.replace(faults, per_1000_host_days=args.failures, rate_of="as given")
    if args.measured:
        restart = measure_restart(read_run(args.measured, args.measured).starts, args.measured)
        faults = dataclasses.replace(faults, restart=restart, restart_of=f"as in {args.measured}")
    return faults


def make_folder_of(file: str) -> None:
    """Makes the folder of a file that will be drawn later.

    Raises:
        UserError: the folder cannot be made, or matplotlib is missing.
    """
    with user_errors("cannot draw", ModuleNotFoundError), user_errors(f"cannot write {file}"):
        analysis.plot  # noqa: B018
        Path(file).parent.mkdir(parents=True, exist_ok=True)


def show_inference(args: argparse.Namespace, arguments: list[str]) -> None:
    """Prints the speed and the largest batch of predictions over models and sizes, and draws them for `--picture`.

    Raises:
        UserError: the flags do not ask for inference on one chip, another flag does not go with them, a size is not a
            positive whole number, or see `plan_models`.
    """
    requests = make_requests(args, arguments)
    one = len(requests) == 1 and args.topology and parse_topology(args.topology).chips == 1
    if not args.inference or args.fit or not one:
        raise UserError(
            "--sizes, --models and --picture need --inference and one chip, as in --topology=v5e:1x1, without --fit."
        )
    if args.html:
        raise UserError("--html does not show --sizes and --models; write --picture=FILE instead.")
    arguments = args.sizes.split(",") if args.sizes else []
    if not all(word.isdecimal() and int(word) > 0 for word in arguments):
        raise UserError(f"cannot parse --sizes={args.sizes}; write pixels, as in --sizes=64,224.")
    names = args.models.split(",") if args.models else None
    if args.picture:  # before hours of compilation
        make_folder_of(args.picture)
    figure = plan_models(requests[0], names, [int(word) for word in arguments])
    rows = [to_json(dataclasses.asdict(point)) for point in figure.points]
    print("\n".join(rows) if args.json else figure.render())
    if args.picture:
        with user_errors(f"cannot write {args.picture}"):
            analysis.plot.inference(figure.points).savefig(args.picture)
        tell(f"Wrote {args.picture}")


def plan_models(
    request: PlanRequest, names: Sequence[str] | None = None, sizes: Sequence[int] | None = None
) -> InferenceFigure:
    """Returns the speed and the largest batch of predictions for several models.

    The models may be of other families than the recipe's. Fields of the recipe that a model does not have are left out.

    Args:
        request: a request for inference, with any model, on a slice of one chip.
        names: the names of the models; None: those of the paper's Figure 12.
        sizes: the sizes of images in pixels; None: those of the figure.

    Raises:
        UserError: no model has such a name, or nothing compiles.
    """
    config, _ = parse_command_line(["plan", *request.words])
    changes = {name: without_foreign_fields(config, name) for name in names or MODELS}  # before anything is compiled
    figures = (
        plan_inference(request.with_change(change), compile_in_subprocess, [name], sizes)
        for name, change in changes.items()
    )
    return InferenceFigure(request.target, tuple(point for figure in figures for point in figure.points))


def without_foreign_fields(config: ConfigDict, name: str) -> dict[str, str]:
    """Returns field -> its default as text, for the fields of a configuration that a model does not have.

    Only fields that differ from their defaults are returned.

    Raises:
        UserError: no model has this name.
    """
    own, defaults = create(name).values, get_config().model
    foreign = (key for key in config.model if key not in own and key in defaults and key != "name")
    return {f"model.{key}": str(defaults[key]) for key in foreign if config.model[key] != defaults[key]}


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # all other words are for vit_jax.main
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--topology", help=f"TPU slices, as in v5e:16x16,v4:4x4x4; kinds: {', '.join(CHIPS)}")
    where.add_argument(
        "--cpu", type=int, nargs="?", const=1, metavar="DEVICES", help="this machine's CPU, as this many devices [1]"
    )
    where.add_argument("--gpu", action="store_true", help="this machine's GPUs")
    names = ",".join(STRATEGIES)
    parser.add_argument("--strategy", help=f"how parameters are placed, any of {names} [as in --config.mesh]")
    parser.add_argument("--fit", action="store_true", help="find the largest batch that fits")
    parser.add_argument("--inference", action="store_true", help="plan inference instead of a training step")
    parser.add_argument("--models", help="with --inference: models, as in ViT-B/16,R50+ViT-B/16 [the paper's]")
    parser.add_argument("--sizes", help="with --inference: image sizes in pixels, as in Figure 12 [64,128,224,384,512]")
    parser.add_argument("--picture", help="with --inference: where a picture of them is written, as in figure12.png")
    parser.add_argument(
        "--schedule", action="store_true", help="also read the schedules of all operations (compiling takes longer)"
    )
    parser.add_argument("--price", type=float, help="price of a chip-hour, to show what the run costs")
    parser.add_argument(
        "--failures",
        type=float,
        metavar="RATE",
        help="in 1,000 days of a host, for the goodput to expect [3.79: Llama 3]",
    )
    parser.add_argument(
        "--measured", metavar="WORKDIR", help="folder of a run whose saves and restarts took as long as these will"
    )
    parser.add_argument("--html", metavar="FILE", help="also write the plans as a page to look at in a browser")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    return parser


def make_requests(args: argparse.Namespace, arguments: list[str]) -> list[PlanRequest]:
    """Returns a request for each target and strategy.

    Raises:
        UserError: there is no such slice or strategy.
    """
    targets = args.topology.split(",") if args.topology else ["gpu" if args.gpu else "cpu"]
    names = args.strategy.split(",") if args.strategy else []
    placements = [config_flags(STRATEGIES[choose("strategy", name, STRATEGIES)]) for name in names] or [[]]
    if args.topology:
        for target in targets:
            parse_topology(target)
    return [
        PlanRequest((*arguments, *flags), target, args.inference, args.cpu or 1, args.schedule)
        for target, flags in itertools.product(targets, placements)
    ]


if __name__ == "__main__":
    cli.run_command(main, rerun_advice="what was compiled is remembered.", is_report=True)
