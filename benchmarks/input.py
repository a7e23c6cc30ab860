"""Inception crops at 224 pixels: our reader, tf.data and timm's loader on the same files and boxes, in turns.

python -m benchmarks.input --files=data/photos --rounds=7 --others=.bench/bin/python

Each reader reads, decodes, crops, resizes and stacks batches of 32 images in one thread. The result is images per
second of processor time, over all threads. tf.data uses `decode_and_crop_jpeg` and `tf.image.resize`, timm its own
dataset, crop and collate function. Both run in a separate environment (`benchmarks/requirements.txt`). Without
`--others` only our reader is measured. `--quality=90` first encodes the files again as `vit_jax.pack` does, so that
decoding can begin at the first row of a crop. tf.data and timm then read these files too.

python -m benchmarks.input --files=data/photos --others=.bench/bin/python --pixels=256 --write=docs/data.md

packs the files with `--pixels` and with `--shorter-side`, and compares both with the original files. tf.data and timm
then read the JPEG files of `--shorter-side`.
"""

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from docs import pages
from vit_jax.data import loader
from vit_jax.data.images import EncodedImage, EncodeOptions, Encoding, PixelOptions, decode
from vit_jax.data.preprocess import inception_box, parse_pipe
from vit_jax.data.shards.array_record_file import write_shard
from vit_jax.data.sources import SourceConfig, open_split

SIZE, BATCH = 224, 32
PACKED = "packed JPEG"
PIPE = f"inception_crop({SIZE})|value_range(-1,1)"


Read = Callable[[int], EncodedImage]  # number of an image -> the image


class Ours:
    """Our reader, with the preprocessing of training."""

    def __init__(self, read: Read, count: int, fast: bool):
        self.read, self.count, self.preprocess = read, count, parse_pipe(PIPE, SIZE, fast)

    def pixels(self, number: int) -> np.ndarray:
        return self.preprocess.apply_ops(self.read(number), np.random.default_rng(number))  # as in `draw_boxes`

    def round(self) -> float:
        began = time.process_time()
        for first in range(0, self.count, BATCH):
            np.stack([self.pixels(number) for number in range(first, min(first + BATCH, self.count))])
        return time.process_time() - began


class Other:
    """A reader that runs in a process of the separate environment; see `input_others`."""

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
    """Encodes the images as JPEG again, with a restart marker after each row of minimum coded units.

    Returns the paths of the new files.
    """
    for number, file in enumerate(files):
        data = io.BytesIO()
        options = {"quality": quality, "restart_marker_rows": 1}
        Image.fromarray(decode.read_image(file).decode()).save(data, "JPEG", **options)
        (folder / f"{number:05}.jpg").write_bytes(data.getvalue())
    return sorted(map(str, folder.glob("*.jpg")))


def pack(files: list[str], folder: Path, encoding: Encoding) -> Read:
    """Packs the images into one shard, and returns a function that reads a record by its number."""
    folder.mkdir()
    examples = ((encoding(decode.read_image(file)), [0]) for file in files)
    write_shard(str(folder / "train-00000-of-00001.array_record"), examples)
    source = open_split(SourceConfig(f"array_record:{folder}", num_classes=1), "train")
    return lambda number: source[number]["image"]


def read_files(files: list[str]) -> Read:
    return lambda number: decode.read_image(files[number])


def write_files(read: Read, count: int, folder: Path) -> list[str]:
    """Writes the JPEG data of records to files, and returns their paths."""
    folder.mkdir()
    files = [folder / f"{number:05}.jpg" for number in range(count)]
    for number, file in enumerate(files):
        file.write_bytes(read(number).data)
    return list(map(str, files))


def describe_difference(ours: Ours, other: np.ndarray) -> str:
    """Returns a sentence on the difference between our first images and those of tf.data, which `other` has."""
    difference = np.stack([ours.pixels(number) for number in range(len(other))]).astype(int) - other
    most, share = np.abs(difference).max(), np.mean(difference != 0)
    return f"differs from tf.data by at most {most} of 255, in {share:.2%} of the values"


def take_turns(readers: Mapping[str, Ours | Other], count: int, rounds: int) -> dict[str, list[float]]:
    """Returns name of a reader -> images per CPU-second in each round."""
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(rounds + 1):
        for name, reader in readers.items():
            rate = count / reader.round()
            if turn:  # the first round warms up
                rates[name].append(rate)
    return rates


def median_ratio(rates: list[float], base: list[float]) -> float:
    """Returns the median, over the rounds, of the ratio of two rates in the same round."""
    return statistics.median(a / b for a, b in zip(rates, base, strict=True))


def table(rates: Mapping[str, list[float]]) -> list[str]:
    """Returns the lines of a table with a row for each reader.

    A row has the ratios of its rate to that of packed JPEG images, with the same way of resizing, and to that of
    tf.data.
    """
    lines = ["| read | images per CPU-second | of packed JPEG | of tf.data |", "|---|---|---|---|"]
    for name, values in rates.items():
        bases = [rates.get(base) for base in (f"{PACKED}, {name.partition(', ')[2]}", "tf.data")]
        ratios = [f"{median_ratio(values, base):.2f}" if base else "" for base in bases]
        lines.append(f"| {name} | {statistics.median(values):,.0f} | {' | '.join(ratios)} |")
    return lines


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.input", description=__doc__)
    parser.add_argument("--files", required=True, help="folder of JPEG files, searched recursively")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds, in which all take turns [7]")
    parser.add_argument("--others", help="the Python of a separate environment with tensorflow and timm")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quality", type=int, help="encode the files again first, with this JPEG quality")
    how.add_argument("--pixels", type=int, help="compare with packed pixels and JPEG images of this shorter side")
    parser.add_argument("--write", type=Path, help="page whose section `pixels` is written")
    return parser.parse_args(argv[1:])


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    loader.use_one_opencv_thread()
    files = sorted(str(path) for path in Path(arguments.files).rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"there are no JPEG files in {arguments.files}")

    with tempfile.TemporaryDirectory() as name:
        folder, ours = Path(name), PACKED if arguments.pixels else "ours"
        if arguments.quality:
            files = encode_again(files, folder, arguments.quality)
        reads = {ours: read_files(files)}
        if arguments.pixels:
            pixels = pack(files, folder / "pixels", PixelOptions(arguments.pixels))
            packed = pack(files, folder / "packed", EncodeOptions(arguments.pixels))
            reads = {"packed pixels": pixels, ours: packed, "original files": read_files(files)}
            files = write_files(packed, len(files), folder / "files")
        plan = folder / "plan.json"
        plan.write_text(json.dumps({"files": files, "boxes": draw_boxes(files), "size": SIZE, "batch": BATCH}))
        speeds = {"fast": True, "exact pixels": False}
        readers: dict[str, Ours | Other] = {
            f"{name}, {speed}": Ours(read, len(files), fast)
            for name, read in reads.items()
            for speed, fast in speeds.items()
        }
        if arguments.others:
            readers |= {name: Other(arguments.others, name, plan) for name in ("tf.data", "timm")}
        rates = take_turns(readers, len(files), arguments.rounds)
        if arguments.others:
            theirs = np.asarray(readers["tf.data"].ask("pixels"), np.uint8)
            for speed in speeds:
                print(f"{ours}, {speed}: {describe_difference(readers[f'{ours}, {speed}'], theirs)}")

    base = "tf.data" if arguments.others else f"{ours}, exact pixels"
    print(f"{len(files)} files, median of {arguments.rounds} rounds, images per CPU-second, and against {base}")
    for name, values in rates.items():
        spread = f"{min(values):.0f} to {max(values):.0f}"
        against = median_ratio(values, rates[base])
        print(f"{name:28}{statistics.median(values):8.0f}{spread:>16}{against:8.2f} times")
    if arguments.pixels:
        pages.print_sections([("pixels", table(rates))], arguments.write)


if __name__ == "__main__":
    main(sys.argv)
