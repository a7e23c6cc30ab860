"""Computes how well the streamed order mixes images, and what each host of a large pod needs for it, without any data.

python -m benchmarks.stream --write=docs/data.md

The order and the share of each host come from the code that training uses, but the shards exist only as numbers.
`--part=0.01` takes data sets of a hundredth of the size.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from docs.pages import print_sections
from vit_jax.data.order import StreamOrder
from vit_jax.data.order_choice import possible_readers
from vit_jax.data.shard_fetcher import ShardFetcher
from vit_jax.data.shards import Shard
from vit_jax.data.sources import Shards

CLASSES, IMAGENET, JFT = 1000, 1_281_167, 303_000_000  # images
IMAGE = 110_000  # bytes of an image
WINDOWS = (1, 2, 4, 8, 16)
SAMPLED = 24  # batches that are examined, spread over an epoch
HOSTS = 1024


def shard_lengths(examples: int, size: int) -> list[int]:
    """Returns the number of examples in each shard, for nearly equal shards of about `size` bytes."""
    count = max(1, round(examples * IMAGE / size))
    return np.diff(np.linspace(0, examples, count + 1).astype(int)).tolist()


def mixing(examples: int) -> list[str]:
    """Returns the rows of the table `mixing`, for batches of the global and the streamed order.

    A row has the mean number of distinct shards in a batch and, for shuffled and for sorted shards, the mean (and the
    smallest) number of distinct classes, and the fraction of images with the same class as the previous row, with which
    MixUp and CutMix mix them.
    """
    lengths = shard_lengths(examples, 64_000_000)
    ends = np.cumsum(lengths)
    sorted_labels = np.arange(examples) * CLASSES // examples
    shuffled_labels = np.random.default_rng(0).permutation(sorted_labels)
    lines = []

    def add(name: str, batch: int, index_at: Callable[[int], int]) -> None:
        taken = [
            np.array([index_at(number * batch + row) for row in range(batch)])
            for number in np.linspace(0, examples // batch - 1, SAMPLED, dtype=int).tolist()
        ]
        shards = np.mean([len(np.unique(np.searchsorted(ends, indices, side="right"))) for indices in taken])
        words, pairs = [], []
        for labels in (shuffled_labels, sorted_labels):
            of_batches = [labels[indices] for indices in taken]
            counts = [len(np.unique(one)) for one in of_batches]
            words.append(f"{np.mean(counts):.0f} ({min(counts)})")
            pairs.append(f"{np.mean([one == np.roll(one, 1) for one in of_batches]):.1%}")
        lines.append(f"| {batch:,} | {name} | {shards:,.0f} | {' | '.join(words)} | {', '.join(pairs)} |")

    permuted = np.random.default_rng(1).permutation(examples)
    for batch in (1024, 4096):
        add("global", batch, lambda position: permuted[position])
        for window in WINDOWS:
            order = StreamOrder(lengths, batch, max(possible_readers(batch, examples, 1)), window, 0)
            add(f"streamed, window {window}", batch, order.__getitem__)
    return lines


def hosts(examples: int) -> list[str]:
    """Returns the rows of the table `hosts`: what one of `HOSTS` hosts needs in time, memory, downloads and disk."""
    lines = []
    for size in (64_000_000, 1_000_000_000):
        lengths = shard_lengths(examples, size)
        runs = tuple(Shard(f"gs://b/{number}", length, length * IMAGE) for number, length in enumerate(lengths))
        shards = Shards(runs, tuple(lengths))
        for batch in (4096, 65536):
            share = batch // HOSTS
            halves = np.arange(share // 2)
            for name, rows in (
                ("one run", np.arange(share)),
                ("two runs", np.concatenate([halves, halves + batch // 2])),
            ):
                began = time.perf_counter()
                order = StreamOrder(lengths, batch, max(possible_readers(batch, examples, HOSTS)), 4, 0)
                fetcher = ShardFetcher(order, shards, rows)
                fetcher.numbers(0)
                seconds = time.perf_counter() - began
                fetched = sum(
                    lengths[shard] for reader in fetcher.readers for shard in order.uses(0, reader).shards.tolist()
                )
                numbers = np.linspace(0, examples // batch - 1, SAMPLED, dtype=int).tolist()
                held = max(sum(lengths[shard] for shard in fetcher.numbers(number)) for number in numbers)
                gigabytes = [count * IMAGE / 1e9 for count in (fetched, examples / HOSTS, held)]
                drawn = [array for one in order._passes.values() for array in (one.examples, *one.uses)]
                memory = sum(array.nbytes for array in (order.lengths, order.starts, *drawn))
                lines.append(
                    f"| {size / 1e9:g} GB, {len(lengths):,} | {batch:,}, {name} | {seconds:.2f} s | "
                    f"{memory / 1e6:.1f} MB | "
                    f"{gigabytes[0]:.1f} GB of {gigabytes[1]:.1f} | {gigabytes[2]:.2f} GB |"
                )
    return lines


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=float, default=1.0, help="of the data sets [1]")
    parser.add_argument("--write", type=Path, help="Markdown page whose sections `mixing` and `hosts` to replace")
    args = parser.parse_args(argv[1:])
    tables = {
        "mixing": [
            "| batch | order | shards in it | classes, shuffled shards (fewest) | classes, sorted shards (fewest) | "
            "pairs of a class, shuffled and sorted |",
            "|---|---|---|---|---|---|",
            *mixing(int(IMAGENET * args.part)),
        ],
        "hosts": [
            "| shards | batch, rows of a host | start | memory | fetched in an epoch, of its share | disk |",
            "|---|---|---|---|---|---|",
            *hosts(int(JFT * args.part)),
        ],
    }
    print_sections(tables.items(), args.write)


if __name__ == "__main__":
    main(sys.argv)
