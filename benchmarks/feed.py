"""Measures the CPU time of an image in the main process and in the workers, and computes how many images a host feeds.

python -m benchmarks.feed --photos=data/photos --write=docs/data.md

The main process is measured with workers that return a ready image. The measure is the CPU time of all its threads,
from a group of rows that a worker has written to a batch on the devices. A worker is measured while it reads
photographs as in training. The second table is computed from the smallest time of each over the rounds, because other
programs on the machine can only add to them. The images per second that chips take are those of the steps in
`benchmarks/tpu_results`, by schedule.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import tpu
from benchmarks.tpu_rows import Row
from configs import base
from docs.pages import print_sections
from vit_jax import data, pack, sharding
from vit_jax.data import loader, preprocess
from vit_jax.data.order import ShuffledOrder
from vit_jax.data.sources import Source
from vit_jax.planning.chips import CHIPS

SIZE = 224
DEVICES = (1, 8)
# Name in the table -> options of `vit_jax.pack` for the photographs; None: they are not packed.
PACKED: dict[str, list[str] | None] = {"originals": None, "packed": ["--shorter-side=256"], "pixels": ["--pixels=256"]}
MODELS = ("S/16", "B/16", "L/16")
CHIP = "v5e"
SMALL_HOSTS = (2, 16)  # cores of further hosts in the table


READY = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), np.uint8)


def read_ready(split: str, index: int) -> tuple[np.ndarray, int]:
    """Returns an example whose image is in memory, the same for all."""
    return READY, index % 1000


def measure_main(devices: int, workers: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Returns the CPU seconds per image in the main process: in the training thread, and in its other threads."""
    placed = NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("data",)), PartitionSpec("data"))
    rows = loader.local_rows(placed, arguments.batch)
    pipe = preprocess.parse_pipe(f"random_crop({SIZE})|value_range(-1,1)", SIZE)  # a crop of all pixels copies nothing
    source = Source("ready", (("train", range(1_281_167)),), read_ready, 1000)
    shuffled = ShuffledOrder(len(source), 0)
    local = loader.LocalBatches(source, pipe, shuffled, batch=arguments.batch, rows=rows, workers=workers)
    assemble = functools.partial(loader.assemble_global, rows=rows, batch=arguments.batch, sharding=placed)

    def hand_on(count: int) -> None:
        for batch in itertools.islice(local, count):
            jax.block_until_ready(assemble({"image": batch["image"], "label": batch["label"]}))

    hand_on(10)  # until all memory has been written once
    trains, process = time.thread_time(), time.process_time()
    hand_on(arguments.batches)
    trains, process = time.thread_time() - trains, time.process_time() - process
    local.close()
    images = arguments.batches * arguments.batch
    return trains / images, (process - trains) / images


def measure_worker(source: str, fast: bool, images: int) -> float:
    """Returns the CPU seconds per image in a worker process that reads photographs as in training."""
    config = base.get_config()
    config.data.source, config.data.fast, config.data.workers = source, fast, 1
    config.batch, config.resolution, config.evals.test.split = 64, SIZE, "train"
    completed, info = data.complete_config(config)
    batches = data.train_batches(completed, sharding.batch_sharding(sharding.make_mesh(completed)), 0, info.opened)
    for _ in range(4):
        next(batches)
    [worker] = multiprocessing.active_children()
    began, count = cpu_seconds(worker.pid), -(-images // config.batch)
    for _ in range(count):
        next(batches)
    spent = cpu_seconds(worker.pid) - began
    batches.close()
    return spent / (count * config.batch)


def cpu_seconds(process: int | None) -> float:
    """Returns the CPU seconds that the process with this number has used; see proc(5)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pack_photos(photos: Path, folder: Path) -> dict[str, str]:
    """Packs the photographs into a folder, and returns name in the table -> data source."""
    sources = {}
    for name, words in PACKED.items():
        sources[name] = f"folder:{photos}" if words is None else f"array_record:{folder / name}"
        if words is not None:
            pack.main(["pack", f"folder:{photos}", str(folder / name), *words])
    return sources


def images_per_second(model: str) -> float:
    """Returns the images per second that a chip takes in training, by the schedule of its step."""
    images = tpu.IMAGES[model]
    cycles = tpu.Results("", None)[Row("vit_jax", model, f"{CHIP}:2x2", images)].cycles
    assert cycles
    return images / (cycles / CHIPS[CHIP].clock)


def fed(cores: int, worker: float, main: float) -> float:
    """Returns the images per second that a host feeds.

    With worker processes, the slower of workers and main process counts, and the main process has cores of its own.
    Without workers, threads of the main process do all the work.

    Args:
        cores: the cores of the host.
        worker: CPU seconds per image in a worker.
        main: CPU seconds per image in the main process.
    """
    workers = data.choose_workers("auto", cores)
    return min(workers / worker, 1 / main) if workers else cores / (worker + main)


def main_table(found: dict[tuple[int, int], list[tuple[float, float]]], batch: int) -> Iterator[str]:
    """Yields the lines of the table of the main process.

    Args:
        found: (devices, workers) -> the results of `measure_main` in each round.
        batch: the images of a batch.
    """
    yield f"| devices, which divide {batch:,} images | workers | the thread that trains | others | sum |"
    yield "| --- | --- | --- | --- | --- |"
    for (devices, workers), measured in found.items():
        trains, others = min(measured, key=sum)
        cells = [f"{seconds * 1e6:.1f}" for seconds in (trains, others, trains + others)]
        yield f"| {devices} | {workers} | {' | '.join(cells)} |"


def hosts_table(main: float, worker: dict[tuple[str, bool], float]) -> Iterator[str]:
    """Yields the lines of the table of hosts.

    Args:
        main: CPU seconds per image in the main process.
        worker: (name of the source, `data.fast`) -> CPU seconds per image in a worker.
    """
    names = [f"{name}, {'fast' if fast else 'exact'}" for name, fast in worker]
    yield f"| cores | `auto` | {' | '.join(names)} | one process | {' | '.join(f'{model} takes' for model in MODELS)} |"
    yield "| --- " * (len(names) + 3 + len(MODELS)) + "|"
    measured = [f"{1 / seconds:,.0f}" for seconds in worker.values()]
    yield f"| 1, of a worker, measured | | {' | '.join(measured)} | | {' | '.join('' for _ in MODELS)} |"
    hosts = dict.fromkeys(SMALL_HOSTS, 0) | {
        cores: chips for chips, cores in CHIPS[CHIP].cores.items() if chips >= CHIPS[CHIP].pod_chips_per_host
    }
    for cores, chips in hosts.items():
        rates = [f"{fed(cores, seconds, main):,.0f}" for seconds in worker.values()]
        taken = [f"{chips * images_per_second(model):,.0f}" if chips else "" for model in MODELS]
        named = f"{cores}, with {chips} chips of {CHIP}" if chips else str(cores)
        workers = data.choose_workers("auto", cores) or "threads"
        yield f"| {named} | {workers} | {' | '.join(rates)} | {1 / main:,.0f} | {' | '.join(taken)} |"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="folder of classes")
    parser.add_argument("--batch", type=int, default=1024, help="images of a batch in the main process [1024]")
    parser.add_argument("--batches", type=int, default=60, help="of a turn of the main process [60]")
    parser.add_argument("--workers", default="1,2,8", help="numbers of worker processes, comma-separated [1,2,8]")
    parser.add_argument("--images", type=int, default=2000, help="of a turn of a worker [2000]")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each [3]")
    parser.add_argument("--write", type=Path, help="Markdown page whose sections `main-process` and `feeds` to replace")
    arguments = parser.parse_args(argv[1:])
    mains: dict[tuple[int, int], list[tuple[float, float]]] = {}
    readers: dict[tuple[str, bool], list[float]] = {}
    counts = [int(word) for word in arguments.workers.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        sources = pack_photos(arguments.photos, Path(folder))
        for _ in range(arguments.rounds):
            for case in itertools.product(DEVICES, counts):
                mains.setdefault(case, []).append(measure_main(*case, arguments))
            for name, fast in itertools.product(sources, (False, True)):
                readers.setdefault((name, fast), []).append(measure_worker(sources[name], fast, arguments.images))
    slowest = max(min(map(sum, measured)) for measured in mains.values())
    sections = [
        ("main-process", main_table(mains, arguments.batch)),
        ("feeds", hosts_table(slowest, {case: min(measured) for case, measured in readers.items()})),
    ]
    print_sections(sections, arguments.write)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    main(sys.argv)
