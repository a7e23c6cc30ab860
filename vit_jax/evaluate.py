"""Evaluates a run's newest checkpoint exactly, on its own splits or another one, on this machine's devices.

Example:
  python -m vit_jax.evaluate workdirs/digits --json
"""

import argparse
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params
from ml_collections import ConfigDict

from vit_jax import UserError, checkpoint, cli, data, evals, nearest_path
from vit_jax.config import load_config
from vit_jax.kernel_check import check_kernels
from vit_jax.program import Program, make_inference_program

LARGEST = 2**28  # bytes of a device's largest activation: a few of that size are in memory at once
PRODUCTS = ("dot_general", "conv_general_dilated")


def evaluate(
    workdir: str | Path,
    best: bool = False,
    fsdp: int = 1,
    source: str | None = None,
    *,
    batch: int | None = None,
    workers: int | None = None,
    split: str | None = None,
) -> dict[str, float]:
    """Returns the metrics of a run's newest (or best) checkpoint, and its `step`.

    Args:
        workdir: the run's folder, local or remote; nothing is written there.
        best: the best checkpoint kept instead of the newest.
        fsdp: devices to split the weights over.
        source: where the data lie now, as `config.data.source`, if they have moved.
        batch: images per step over all devices, rounded up to a multiple of their number; None: see `choose_batch`.
        workers: processes that read and decode, 0: threads of this one; None: see `choose_workers`.
        split: evaluated by the run's first evaluation, after which the metrics stay named; None: all its evaluations on
            their own splits.

    Raises:
        UserError: the folder holds no run, no such checkpoint yet, the data or the split is absent, or a number is too
            small.
    """
    for name, number, least in (("fsdp", fsdp, 1), ("batch", batch, 1), ("workers", workers, 0)):
        if number is not None and number < least:
            raise UserError(f"{name} must be at least {least}, not {number}.")
    path = checkpoint.local_workdir(workdir, best)
    if not path.exists():
        near = nearest_path(path)
        raise UserError(f"there is no folder {workdir}{f'; did you mean {str(near)!r}?' if near else '.'}")
    if not (path / "config.json").is_file():
        raise UserError(f"{workdir} contains no run: config.json is missing.")
    folder = checkpoint.find_checkpoint(path, best)
    if folder is None:
        raise UserError(f"{workdir} contains no checkpoint{' with a metric' if best else ''} yet.")
    config = load_config(path / "config.json")
    config.data.source = source or config.data.source
    if split is not None:
        choose_split(config, split)
    wanted = data.eval_batch_size(config)
    program = make_inference_program(config, fsdp, check_kernels)
    config.batch_eval = rounded(batch) if batch else min(rounded(wanted), choose_batch(program))
    config.data.workers = choose_workers(config) if workers is None else workers
    evaluators = evals.make_evaluators(config, program)  # opens the data first: the weights may take long to read
    weights, _ = checkpoint.read_weights(folder)
    weights = jax.device_put(weights, program.state_shardings.params)
    return {"step": int(folder.name), **evals.run_evaluators(evaluators, weights)}


def choose_split(config: ConfigDict, split: str) -> None:
    """Leaves of the evaluations the first, and has it read another split."""
    with config.unlocked():
        for name in list(config.evals)[1:]:
            del config.evals[name]
    config.evals[next(iter(config.evals))].split = split


def choose_batch(program: Program) -> int:
    """Returns the images of a step whose largest activation takes at most `LARGEST` bytes of each device."""
    image = jax.ShapeDtypeStruct((1, *program.batch["image"].shape[1:]), jnp.float32)
    traced = jax.make_jaxpr(lambda params, image: program.model.apply(params, image)[0])(program.state.params, image)
    return rounded(1) * max(1, LARGEST // max(image.size * image.dtype.itemsize, largest_product(traced.jaxpr)))


def largest_product(jaxpr: Jaxpr) -> int:
    """Returns the bytes of the largest result of a matrix product or convolution of a function's trace."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += map(largest_product, jaxprs_in_params(equation.params))
        if equation.primitive.name in PRODUCTS:
            sizes += [out.aval.size * out.aval.dtype.itemsize for out in equation.outvars]
    return max(sizes)


def choose_workers(config: ConfigDict) -> int:
    """Returns the run's worker processes, but not more than cores here; none if the cores also compute."""
    return 0 if jax.default_backend() == "cpu" else min(config.data.workers, os.cpu_count() or 1)


def rounded(batch: int) -> int:
    """Returns a batch rounded up to a multiple of the devices."""
    devices = jax.device_count()
    return -(-batch // devices) * devices


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", metavar="workdir", help="folder of the run")
    parser.add_argument("--workdir", help="same as the positional argument")
    parser.add_argument(
        "--best", action="store_true", help="evaluate the best checkpoint that was kept, not the newest"
    )
    parser.add_argument("--split", help="evaluate this split, for example train[:10%%] [those of the run]")
    parser.add_argument("--batch", type=int, help="images per step over all devices [chosen to fit this machine]")
    parser.add_argument("--workers", type=int, help="processes that read images; 0: threads [chosen for this machine]")
    parser.add_argument("--fsdp", type=int, default=1, help="devices to split the weights over [1]")
    parser.add_argument("--source", help="new place of the data, if they have moved, for example folder:PATH")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv[1:])
    [workdir, *others] = {args.folder, args.workdir} - {None} or {""}
    if others or not workdir:
        raise UserError("give exactly one WORKDIR: python -m vit_jax.evaluate WORKDIR.")
    cli.join_hosts()
    chosen = {"batch": args.batch, "workers": args.workers, "split": args.split}
    metrics = evaluate(workdir, args.best, args.fsdp, args.source, **chosen)
    # The metrics keep the names of the run's evaluation, such as test/accuracy, whatever split it reads.
    answer = ({} if args.split is None else {"split": args.split}) | metrics
    if args.json:
        print(json.dumps(answer))
    else:
        print("\n".join(f"{name:20} {format_value(value)}" for name, value in answer.items()))


def format_value(value: float | str) -> str:
    """Returns a number with six digits, and a text as it is."""
    return value if isinstance(value, str) else f"{value:.6g}"


if __name__ == "__main__":
    cli.run(main, reports=True)
