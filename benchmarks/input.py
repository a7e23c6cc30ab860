"""Inception crops at 224 pixels: our reader, tf.data and timm's loader on the same files and boxes, in turns.

python -m benchmarks.input --files=data/photos --rounds=7 --others=.bench/bin/python

Each reads, decodes, crops, resizes and stacks batches of 32 in one thread. The result is images per second of processor
time, over all threads. tf.data uses `decode_and_crop_jpeg` and `tf.image.resize`, timm its own dataset, crop and
collate function. Both run in a separate environment (`benchmarks/requirements.txt`); without `--others` only our reader
is measured. `--quality=90` encodes the files again first, as `vit_jax.pack` does, so that decoding can begin at the
first row of a crop; tf.data and timm then read these files too.
"""

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from vit_jax.data import loader
from vit_jax.data.images import decode
from vit_jax.data.preprocess import inception_box, parse_pipe

SIZE, BATCH = 224, 32
PIPE = f"inception_crop({SIZE})|value_range(-1,1)"


class Ours:
    """Our reader, with the preprocessing of training."""

    def __init__(self, files: list[str], fast: bool):
        self.files, self.preprocess = files, parse_pipe(PIPE, SIZE, fast)

    def pixels(self, number: int) -> np.ndarray:
        image = decode.read_image(self.files[number])
        return self.preprocess.apply_ops(image, np.random.default_rng(number))  # as in `draw_boxes`

    def round(self) -> float:
        began = time.process_time()
        for first in range(0, len(self.files), BATCH):
            np.stack([self.pixels(number) for number in range(first, min(first + BATCH, len(self.files)))])
        return time.process_time() - began


class Other:
    """A reader in a process of the separate environment; see `input_others`."""

    def __init__(self, python: str, name: str, plan: Path):
        script = Path(__file__).with_name("input_others.py")
        self.process = subprocess.Popen(
            [python, str(script), name, str(plan)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, word: str) -> float:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("the process of the separate environment ended; see its output above")
        return json.loads(answer)

    def round(self) -> float:
        return self.ask("round")


def draw_boxes(files: list[str]) -> list[tuple[int, int, int, int]]:
    """Returns the box that our op draws for each file, with a generator seeded by the file's number."""
    shapes = [decode.read_image(file).shape for file in files]
    return [
        inception_box(height, width, 0.05, 1.0, np.random.default_rng(number))
        for number, (height, width) in enumerate(shapes)
    ]


def encode_again(files: list[str], folder: Path, quality: int) -> list[str]:
    """Encodes the images again, with a restart marker after each row of minimum coded units."""
    for number, file in enumerate(files):
        data = io.BytesIO()
        options = {"quality": quality, "restart_marker_rows": 1}
        Image.fromarray(decode.read_image(file).decode()).save(data, "JPEG", **options)
        (folder / f"{number:05}.jpg").write_bytes(data.getvalue())
    return sorted(map(str, folder.glob("*.jpg")))


def describe_difference(ours: Ours, other: np.ndarray) -> str:
    """Returns the difference between the first images of both."""
    difference = np.stack([ours.pixels(number) for number in range(len(other))]).astype(int) - other
    most, share = np.abs(difference).max(), np.mean(difference != 0)
    return f"differs from tf.data by at most {most} of 255, in {share:.2%} of the values"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.input", description=__doc__)
    parser.add_argument("--files", required=True, help="folder of JPEG files, searched recursively")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds, in which all take turns [7]")
    parser.add_argument("--others", help="the Python of a separate environment with tensorflow and timm")
    parser.add_argument("--quality", type=int, help="encode the files again first, with this JPEG quality")
    arguments = parser.parse_args(argv[1:])
    loader.use_one_opencv_thread()
    files = sorted(str(path) for path in Path(arguments.files).rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"there are no JPEG files in {arguments.files}")

    with tempfile.TemporaryDirectory() as folder:
        if arguments.quality:
            files = encode_again(files, Path(folder), arguments.quality)
        plan = Path(folder) / "plan.json"
        plan.write_text(json.dumps({"files": files, "boxes": draw_boxes(files), "size": SIZE, "batch": BATCH}))
        readers = {"ours, fast": Ours(files, fast=True), "ours, exact pixels": Ours(files, fast=False)}
        if arguments.others:
            readers |= {name: Other(arguments.others, name, plan) for name in ("tf.data", "timm")}
        rates: dict[str, list[float]] = {name: [] for name in readers}
        for turn in range(arguments.rounds + 1):
            for name, reader in readers.items():
                rate = len(files) / reader.round()
                if turn:  # the first round warms up
                    rates[name].append(rate)
        if arguments.others:
            theirs = np.asarray(readers["tf.data"].ask("pixels"), np.uint8)
            for name in ("ours, fast", "ours, exact pixels"):
                print(f"{name}: {describe_difference(readers[name], theirs)}")

    base = "tf.data" if arguments.others else "ours, exact pixels"
    print(f"{len(files)} files, median of {arguments.rounds} rounds, images per CPU-second, and against {base}")
    for name, values in rates.items():
        against = statistics.median(a / b for a, b in zip(values, rates[base], strict=True))
        spread = f"{min(values):.0f} to {max(values):.0f}"
        print(f"{name:20}{statistics.median(values):8.0f}{spread:>16}{against:8.2f} times")


if __name__ == "__main__":
    main(sys.argv)
