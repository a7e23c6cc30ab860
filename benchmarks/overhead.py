"""Measures what it costs a recipe to be resumable: saves every 50 steps, fingerprints and preflight checks.

python -m benchmarks.overhead --source=array_record:data/packed/cifar10 --rounds=20

Segments of 50 steps of the plain ViT in `configs/cifar10.py` run in one process. Every second segment begins with a
save, as in `vit_jax.train`, whose checkpoint is written in the background during the steps. The time of the preflight
checks, which run once, is printed too.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from configs import cifar10
from vit_jax import data
from vit_jax.distributed import Supervisor, preflight_checks
from vit_jax.program import prepare
from vit_jax.training.workdir import Workdir


def segments(source: str | None, place: Path, rounds: int, steps: int) -> Iterator[tuple[bool, float]]:
    """Yields for each segment whether it began with a save, and its seconds.

    Args:
        source: the data source; None: synthetic.
        place: the workdir.
        rounds: the number of segments of each kind.
        steps: the steps of a segment.
    """
    config = cifar10.plain()
    config.data.source = source or "synthetic"
    config, info, program = prepare(config)
    supervisor = Supervisor()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        sharding = program.batch_sharding
        arguments = config, info, sharding, program.state, str(place), supervisor.raise_later
        stack.enter_context(preflight_checks(supervisor, *arguments))
        print(f"preflight: {time.monotonic() - began:.3f} s", file=sys.stderr)
        folder = stack.enter_context(Workdir(place, config, program, info, supervisor))
        state, origin = folder.restore_or_init()
        stack.enter_context(contextlib.closing(folder.open_log(origin, supervisor.ledger)))
        batches = data.train_batches(config, program.batch_sharding, 0, info.opened)
        stack.callback(batches.close)
        values: Any = None
        for segment in range(-2, 2 * rounds):  # the first two segments compile and do not count
            saves = segment % 2 == 0
            began = time.monotonic()
            if saves:
                folder.save(state, int(state.step))
            for _ in range(steps):
                before = values
                state, values = program.train_step(state, next(batches))
                supervisor.count_step()
                folder.poll()
                jax.block_until_ready(before)
            jax.block_until_ready(values)
            if segment >= 0:
                yield saves, time.monotonic() - began


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="data, as in config.data.source [synthetic]")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help="steps per segment [50]")
    args = parser.parse_args(argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        times = list(segments(args.source, Path(folder) / "run", args.rounds, args.steps))
    with_save, without = ([seconds for saves, seconds in times if saves is kind] for kind in (True, False))
    ratios = sorted(one / other for one, other in zip(with_save, without, strict=True))
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    print(f"{args.steps} steps: {statistics.median(without):.2f} s, with a save {statistics.median(with_save):.2f} s")
    print(f"with / without: median {quarters[1]:.4f}, quarters {quarters[0]:.4f} to {quarters[2]:.4f}")


if __name__ == "__main__":
    main(sys.argv)
