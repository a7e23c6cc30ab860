"""Measures training from a bucket: seconds to the first batch, images per second, and how long steps wait for data.

python -m benchmarks.bucket --photos=data/photos

The bucket is emulated by a file server in a process of its own, which answers each request after 30 ms and sends at
most 100 MB/s in all. A training step is emulated by a pause. The pauses are so long that the steps ask for 80 % of the
images per second that the loader gives from local shards. In turns, the shards are read from the local disk, streamed
from the bucket with a cache that holds a part of them, and copied from the bucket whole.
"""

import argparse
import contextlib
import http.server
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from configs import base
from vit_jax import data, pack, sharding
from vit_jax.data.shards import readers
from vit_jax.storage import cache, filesystem

LATENCY, RATE, PIECE = 0.03, 100e6, 2**16  # seconds, bytes per second, bytes
LOAD = 0.8  # images that the steps ask for, as a fraction of those that the loader can give


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the files of a folder with a delay and at a limited rate."""

    protocol_version = "HTTP/1.1"
    line = threading.Lock()
    free = 0.0  # the time at which the line will have sent all that was given to it

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        time.sleep(LATENCY)
        super().do_GET()

    def do_HEAD(self) -> None:
        time.sleep(LATENCY)
        super().do_HEAD()

    def copyfile(self, source, outputfile) -> None:
        while piece := source.read(PIECE):
            with Handler.line:
                Handler.free = max(Handler.free, time.monotonic()) + len(piece) / RATE
                wait = Handler.free - time.monotonic()
            if wait > 0.002:
                time.sleep(wait)
            outputfile.write(piece)


def serve(folder: str, port: multiprocessing.Queue) -> None:
    os.chdir(folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.put(server.server_address[1])
    server.serve_forever()


@contextlib.contextmanager
def bucket(folder: Path) -> Iterator[str]:
    """Serves a folder inside the block, and yields its address."""
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    process = context.Process(target=serve, args=(str(folder), port), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port.get()}"
    finally:
        process.kill()


def train(source: str, order: str, step: float, arguments: argparse.Namespace) -> tuple[float, float, float, float]:
    """Emulates a training run.

    Args:
        source: the data source.
        order: the value of `data.order`.
        step: seconds of a step.
        arguments: the arguments of the command line.

    Returns:
        The seconds to the first batch, images per second, the fraction of the time spent waiting for data, and CPU
        seconds per image.
    """
    config = base.get_config()
    config.data.source, config.data.order, config.data.workers = source, order, arguments.workers
    config.data.readers, config.data.window = (2, 2) if order == "stream" else (None, 4)
    config.batch, config.data.split = arguments.batch, "train"
    config.evals.test.split = "train[:8]"
    began, cpu = time.monotonic(), time.process_time()
    completed, info = data.complete_config(config)
    batches = data.train_batches(completed, sharding.batch_sharding(sharding.make_mesh(completed)), 0, info.opened)
    jax.block_until_ready(next(batches))
    first = time.monotonic() - began
    time.sleep(1.0)  # the loader fills what it reads ahead
    waited, began, cpu = batches.waited, time.monotonic(), time.process_time()
    for number in range(1, arguments.batches + 1):
        jax.block_until_ready(next(batches))
        time.sleep(max(began + number * step - time.monotonic(), 0))
    seconds = time.monotonic() - began
    images = arguments.batches * arguments.batch
    result = first, images / seconds, (batches.waited - waited) / seconds, (time.process_time() - cpu) / images
    batches.close()
    return result


def forget() -> None:
    """Releases the files that this process has copied, as the end of a process does."""
    readers.cached_reader.cache_clear()
    readers.local_path.cache_clear()
    readers.close_streamed(())
    for path in (cache.root() / "files").glob("*.lock"):
        cache.unlock_folder(path.with_suffix(""))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="folder of classes")
    parser.add_argument("--copies", type=int, default=10, help="of each photograph [10]")
    parser.add_argument("--shards", type=int, default=30, help="into which they are packed [30]")
    parser.add_argument("--batch", type=int, default=64, help="images of a batch [64]")
    parser.add_argument("--batches", type=int, default=100, help="of a turn [100]")
    parser.add_argument("--workers", type=int, default=0, help="worker processes [0]")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each [3]")
    arguments = parser.parse_args(argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for copy in range(arguments.copies):
            for path in arguments.photos.rglob("*.*"):
                link = folder / "photos" / path.parent.name / f"{copy}-{path.name}"
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path.resolve())
        words = ["--shuffle=0", "--shorter-side=256", f"--shards={arguments.shards}"]
        pack.main(["pack", f"folder:{folder}/photos", f"{folder}/packed", *words])
        sizes = [path.stat().st_size for path in (folder / "packed").glob("*.array_record")]
        os.environ["VIT_JAX_CACHE"] = f"{folder}/cache"
        local, room = f"array_record:{folder}/packed", {"copied": 2 * sum(sizes), "streamed": 12 * max(sizes)}
        rate = train(local, "global", 0.0, arguments)[1]
        step = arguments.batch / (LOAD * rate)
        turns: dict[str, list[tuple[float, float, float, float]]] = {"local": [], "streamed": [], "copied": []}
        with bucket(folder) as address:
            for _ in range(arguments.rounds):
                for kind, found in turns.items():
                    shutil.rmtree(folder / "cache", ignore_errors=True)
                    filesystem.open_store.cache_clear()
                    os.environ["VIT_JAX_CACHE_GB"] = str(room.get(kind, 1e9) / 1e9)
                    source = local if kind == "local" else f"array_record:{address}/packed"
                    found.append(train(source, "stream" if kind == "streamed" else "global", step, arguments))
                    forget()
    print(f"{len(sizes)} shards of {max(sizes) / 1e6:.1f} MB, {rate:,.0f} images/s from the disk")
    print(f"{'':10}{'first batch':>14}{'images/s':>12}{'of local':>10}{'waits':>8}{'CPU ms an image':>18}")
    for kind, found in turns.items():
        first, speed, waits, cpu = (statistics.median(values) for values in zip(*found, strict=True))
        ratio = statistics.median(one[1] / other[1] for one, other in zip(found, turns["local"], strict=True))
        print(f"{kind:10}{first:12.2f} s{speed:12,.0f}{ratio:10.3f}{waits:8.2%}{cpu * 1000:18.3f}")


if __name__ == "__main__":
    main(sys.argv)
