"""Measures how the order of training images affects accuracy: CIFAR-10 in 64 shards, 8 readers, windows of 2 shards.

python -m benchmarks.stream_accuracy --data-dir=data/tensorflow_datasets --write=docs/data.md

In the streamed order the readers together shuffle 16 of the 64 shards at a time, a quarter of the images. Each run
trains the plain ViT of `configs/cifar10.py` with a smaller width and with MixUp. MixUp mixes neighbouring rows of a
batch, which come from the same reader in the streamed order.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from docs.pages import print_sections
from tests.faults.hosts import ROOT
from vit_jax import pack
from vit_jax.data.sources import SourceConfig, open_split

SHARDS, READERS, WINDOW = 64, 8, 2
SMALL = ["model.width=96", "model.mlp_dim=192", "task.mixup=0.2", "log_every=100"]
ORDERS = {
    "global": ("shuffled", "global"),
    "streamed, shards packed with `--shuffle`": ("shuffled", "stream"),
    "streamed, shards sorted by class": ("sorted", "stream"),
}


def write_folder(data_dir: str, folder: Path) -> None:
    """Writes CIFAR-10 as a folder of images, whose order is by class."""
    for split in ("train", "test"):
        source = open_split(SourceConfig("tfds:cifar10", data_dir), split)
        assert source.class_names
        for index in range(len(source)):
            example = source[index]
            path = folder / split / source.class_names[example["label"]] / f"{index:05}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(example["image"].data)


def train(source: str, order: str, seed: int, epochs: float, workdir: Path) -> float:
    """Trains in a process of its own, and returns the accuracy on the test images at the end."""
    words = [*SMALL, f"data.source={source}", "data.split=train", f"data.order={order}", f"seed={seed}"]
    words += [f"total_epochs={epochs}", f"eval_every_epochs={epochs}"]
    words += [f"data.readers={READERS}", f"data.window={WINDOW}"] if order == "stream" else []
    command = [sys.executable, "-m", "vit_jax.main", "--config=configs/cifar10.py:plain=yes", f"--workdir={workdir}"]
    command += [f"--config.{word}" for word in words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    [accuracy] = [line["test/accuracy"] for line in lines if "test/accuracy" in line][-1:]
    return accuracy


def rows(data_dir: str, seeds: int, epochs: float, folder: Path) -> Iterator[str]:
    """Yields the rows of the table. The orders take turns, one seed at a time."""
    write_folder(data_dir, folder / "images")
    for name, words in {"sorted": [], "shuffled": ["--shuffle=0"]}.items():
        pack.main(["pack", f"folder:{folder}/images", f"{folder}/{name}", f"--shards={SHARDS}", *words])
    found: dict[str, list[float]] = {name: [] for name in ORDERS}
    for seed in range(seeds):
        for number, (name, (packed, order)) in enumerate(ORDERS.items()):
            workdir = folder / f"run{seed}-{number}"
            found[name].append(train(f"array_record:{folder}/{packed}", order, seed, epochs, workdir))
            print(f"{name}, seed {seed}: {found[name][-1]:.2%}", file=sys.stderr, flush=True)
    for name, values in found.items():
        yield f"| {name} | {statistics.mean(values):.2%} | {', '.join(f'{value:.2%}' for value in values)} |"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="folder of TFDS data")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each order [3]")
    parser.add_argument("--epochs", type=float, default=4.0, help="of a run [4]")
    parser.add_argument("--write", type=Path, help="Markdown page whose section `accuracy` to replace")
    args = parser.parse_args(argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            "| order | test accuracy | of each seed |",
            "|---|---|---|",
            *rows(args.data_dir, args.seeds, args.epochs, Path(folder)),
        ]
    print_sections([("accuracy", lines)], args.write)


if __name__ == "__main__":
    main(sys.argv)
