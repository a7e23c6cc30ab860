"""Evaluates a run's newest checkpoint on its own splits, exactly.

Example:
  python -m vit_jax.evaluate --workdir=workdirs/digits --json
"""

import argparse
import json
from pathlib import Path

from vit_jax import UserError, cli, evals, settings
from vit_jax.checkpoint import Checkpoints
from vit_jax.train import build


def evaluate(workdir: Path, best: bool = False) -> dict[str, float]:
    """Returns the metrics of a run's newest (or best) checkpoint, with `step`.

    Raises:
        UserError: the folder holds no run, or no checkpoint yet.
    """
    if not (workdir / "config.json").is_file():
        raise UserError(f"{workdir} holds no run: it has no config.json.")
    config, _, program = build(settings.load(workdir / "config.json"))
    checkpoints = Checkpoints(config, workdir)
    step = checkpoints.best if best else checkpoints.latest
    if step is None:
        raise UserError(f"{workdir} holds no checkpoint yet.")
    state, _ = checkpoints.restore(step, program.state, program.state_shardings)
    checkpoints.close()
    return {"step": step, **evals.run(evals.make(config, program), state.weights)}


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--best", action="store_true", help="the best checkpoint kept instead of the newest")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv[1:])
    cli.join_pod()
    cli.use_compilation_cache()
    metrics = evaluate(args.workdir, args.best)
    if args.json:
        print(json.dumps(metrics))
    else:
        print("\n".join(f"{name:20} {value:.6g}" for name, value in metrics.items()))


if __name__ == "__main__":
    cli.run(main)
