"""Measures the loader alone: images per second and resident memory for each source and number of workers, in turns.

python -m benchmarks.loader --sources=synthetic,folder:data/photos,array_record:data/packed/photos --workers=0,2

`data.train_batches` is measured as training uses it, up to batches on the devices. Nothing else runs. Each turn opens
the loader again and skips two batches. The memory is that of this process and its workers, at the end of the first turn
and of the last turn. With `--batches=1000` or more it is also printed twenty times in each turn.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import jax

from configs import base
from vit_jax import data, sharding


def make_batches(source: str, workers: int, arguments: argparse.Namespace):
    config = base.get_config()
    config.data.source, config.data.workers, config.data.fast = source, workers, arguments.fast
    config.batch, config.resolution, config.data.preprocess = (
        arguments.batch,
        arguments.resolution,
        arguments.preprocess,
    )
    if source == "synthetic":
        config.data.num_classes, config.data.num_examples = 1000, 1_281_167
    config.evals.test.split = "train"
    completed, info = data.complete_config(config)
    return data.train_batches(completed, sharding.batch_sharding(sharding.make_mesh(completed)), 0, info.opened)


def process_ids() -> list[int]:
    """Returns the ids of this process and of its descendants."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, fields = int(path.parent.name), path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[number] = int(fields[1])
    found = [os.getpid()]
    for number in found:
        found += [child for child, parent in parents.items() if parent == number]
    return found


def resident_memory() -> float:
    """Returns the resident memory of this process and its descendants in MiB.

    Shared memory counts once for each process.
    """
    total = 0
    for number in process_ids():
        try:
            total += int(Path(f"/proc/{number}/statm").read_text().split()[1])
        except OSError:
            continue
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure_turn(source: str, workers: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Returns the images per second of one turn, and the memory in MiB at its end."""
    batches = make_batches(source, workers, arguments)
    for _ in range(2):
        jax.block_until_ready(next(batches))
    began = time.monotonic()
    for number in range(arguments.batches):
        jax.block_until_ready(next(batches))
        if arguments.batches >= 1000 and (number + 1) % (arguments.batches // 20) == 0:
            print(f"{number + 1:7,} batches {resident_memory():8,.0f} MB", flush=True)
    rate, held = arguments.batches * arguments.batch / (time.monotonic() - began), resident_memory()
    batches.close()
    return rate, held


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__)
    parser.add_argument("--sources", default="synthetic", help="as config.data.source, comma-separated [synthetic]")
    parser.add_argument("--workers", default="0", help="numbers of worker processes, comma-separated [0]")
    parser.add_argument("--batch", type=int, default=64, help="images per batch [64]")
    parser.add_argument("--resolution", type=int, default=224, help="in pixels [224]")
    parser.add_argument("--preprocess", default=base.get_config().data.preprocess, help="the pipe [that of base]")
    parser.add_argument("--fast", action="store_true", help="set config.data.fast")
    parser.add_argument("--batches", type=int, default=20, help="batches per turn [20]")
    parser.add_argument("--rounds", type=int, default=5, help="turns per case [5]")
    parser.add_argument("--json", metavar="FILE", help="also write images per second and memory of each turn here")
    arguments = parser.parse_args(argv[1:])
    cases = list(itertools.product(arguments.sources.split(","), map(int, arguments.workers.split(","))))
    turns: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(arguments.rounds):
        for case in cases:
            turns[case].append(measure_turn(*case, arguments))
            if arguments.json:
                told = [
                    {"source": source, "workers": workers, "turns": made} for (source, workers), made in turns.items()
                ]
                Path(arguments.json).write_text(json.dumps(told) + "\n")

    print(f"{arguments.batches} batches of {arguments.batch} images per turn, {os.cpu_count()} CPUs")
    print(
        arguments.preprocess.replace("{resolution}", str(arguments.resolution)) + (", fast" if arguments.fast else "")
    )
    print(f"{'source':40}{'workers':>8}{'images/s':>10}{'range':>18}{'MB':>8}{'then':>8}")
    for (source, workers), measured in turns.items():
        rates, held = zip(*measured, strict=True)
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        print(f"{source:40}{workers:8}{statistics.median(rates):10,.0f}{spread:>18}{held[0]:8,.0f}{held[-1]:8,.0f}")


if __name__ == "__main__":
    main(sys.argv)
