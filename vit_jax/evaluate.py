"""Evaluates a run's newest checkpoint on its own splits, exactly, on whatever devices are here.

Example:
  python -m vit_jax.evaluate --workdir=workdirs/digits --json
"""

import argparse
import json
from pathlib import Path

import jax

from vit_jax import UserError, checkpoint, cli, data, evals, pod, settings, sharding
from vit_jax.program import make_program


def evaluate(workdir: str | Path, best: bool = False, fsdp: int = 1, source: str | None = None) -> dict[str, float]:
    """Returns the metrics of a run's newest (or best) checkpoint, and its `step`.

    Args:
        workdir: the run's folder, local or remote; nothing is written there.
        best: the best checkpoint kept instead of the newest.
        fsdp: devices to split the weights over.
        source: where the data lie now, as `config.data.source`, if they have moved.

    Raises:
        UserError: the folder holds no run, no such checkpoint yet, or the data is absent.
    """
    path = checkpoint.here(workdir, best)
    if not (path / "config.json").is_file():
        raise UserError(f"{workdir} holds no run: it has no config.json.")
    folder = checkpoint.find(path, best)
    if folder is None:
        raise UserError(f"{workdir} holds no checkpoint{' with a metric' if best else ''} yet.")
    config = settings.load(path / "config.json")
    config.data.source = source or config.data.source
    devices = jax.device_count()
    with config.unlocked():  # older runs do not know of every axis
        config.mesh.update(slice=sharding.count_slices(jax.devices()), data=-1, fsdp=fsdp, tensor=1)
    config.accum_steps = 1
    config.batch = config.batch_eval = -(-(config.batch_eval or config.batch) // devices) * devices
    program = make_program(config, sharding.make_mesh(config), data.spec(config))
    weights, _ = checkpoint.read_weights(folder)
    weights = jax.device_put(weights, program.state_shardings.params)
    return {"step": int(folder.name), **evals.run(evals.make(config, program), weights)}


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", required=True, help="folder of the run")
    parser.add_argument("--best", action="store_true", help="the best checkpoint kept instead of the newest")
    parser.add_argument("--fsdp", type=int, default=1, help="devices to split the weights over [1]")
    parser.add_argument("--source", help="where the data lie now, if they have moved: folder:PATH")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv[1:])
    pod.join()
    cli.use_compilation_cache()
    metrics = evaluate(args.workdir, args.best, args.fsdp, args.source)
    if args.json:
        print(json.dumps(metrics))
    else:
        print("\n".join(f"{name:20} {value:.6g}" for name, value in metrics.items()))


if __name__ == "__main__":
    cli.run(main)
