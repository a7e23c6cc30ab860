"""Embeds photographs by vit_jax and by timm, in turns: from JPEG files to features on the host, and the model alone.

python -m benchmarks.embed --model=ViT-B/16 --images=10000 --workers=15 --torch=python3

Both have random weights of the same sizes, bfloat16 on a GPU and float32 on a CPU, batches of 250 images at 224 pixels,
and as many worker processes that read, decode, resize and crop. Ours is what `vit_jax.embed` does, with its Parquet
files. timm's is its dataset with the transform that it makes for the model, a DataLoader, and a model compiled on GPUs;
its features stay on the host. The files are 100 drawn photographs of 500 x 375 pixels under many names. The time of a
turn includes the start of the workers, not the compilation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cv2
import jax
import numpy as np

from configs import base
from vit_jax import sharding
from vit_jax.data import sources
from vit_jax.evals import EmbeddingWriter, Outputs, embedding
from vit_jax.inference import make_inference
from vit_jax.machine import keep_freed_memory
from vit_jax.model import create

DISTINCT = 100
OURS = "vit_jax"
THEIRS = Path(__file__).with_name("embed_torch.py")


def write_photographs(folder: Path, count: int) -> None:
    """Writes `count` JPEG files, of which `DISTINCT` differ: smooth colours with some noise, of 90 to 100 kB."""
    random = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"class{number % 10}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        if number >= DISTINCT:
            os.link(folder / f"class{number % DISTINCT % 10}" / f"{number % DISTINCT}.jpg", path)
            continue
        coarse = random.integers(0, 256, (12, 16, 3)).astype(np.float32)
        pixels = cv2.resize(coarse, (500, 375), interpolation=cv2.INTER_CUBIC) + random.normal(0, 8, (375, 500, 3))
        cv2.imwrite(str(path), pixels.clip(0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 90])


class Ours:
    """Our features of the files."""

    def __init__(self, arguments: argparse.Namespace, folder: Path):
        config, self.arguments = base.get_config(), arguments
        config.batch = 1
        mesh = sharding.make_mesh(config, jax.devices()[:1])
        pipe = f"resize_small(256)|central_crop({arguments.resolution})|value_range(-1,1)"
        fields = {"resolution": arguments.resolution, "num_classes": 0, "preprocess": pipe}
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        model = create(arguments.model, dtype=dtype, **fields)
        model = model.for_device(jax.devices()[0].device_kind, arguments.batch)
        self.image = jax.numpy.zeros((arguments.batch, arguments.resolution, arguments.resolution, 3))
        self.params = jax.jit(model.init)(jax.random.key(0), self.image[:1])
        self.program, self.wanted = make_inference(model, mesh, self.params), Outputs(("features",), "float32", 0)
        self.step = embedding.make_step(self.program, self.wanted)
        self.source, self.words = sources.open_images(f"folder:{folder}", "train", None, True), (str(folder), "train")
        self.model_alone(1)  # compiles

    def embed(self) -> float:
        """Returns the seconds in which all files are embedded."""
        with tempfile.TemporaryDirectory() as out:
            info = embedding.make_info(self.program, self.step, "", self.source, self.words, True, self.wanted)
            embedding.begin_folder(out, info)
            writer = EmbeddingWriter(self.program, self.step, self.source, self.wanted, info, out, (0, 1), 0.0)
            began, batch = time.perf_counter(), self.arguments.batch
            writer.run(self.params, list(writer.own), 0, batch, self.arguments.workers, lambda count: None)
            seconds = time.perf_counter() - began
            assert not embedding.count_missing(out, info)
        return seconds

    def model_alone(self, count: int) -> float:
        """Returns the seconds of so many batches that are on the device."""
        began = time.perf_counter()
        jax.block_until_ready([self.step(self.params, self.image) for _ in range(count)])
        return time.perf_counter() - began


class Timm:
    """timm's features of the files, in the process of another environment."""

    def __init__(self, arguments: argparse.Namespace, folder: Path):
        size, patch = arguments.model.removeprefix("ViT-").split("/")
        name = {"Ti": "tiny", "S": "small", "B": "base", "L": "large", "H": "huge"}[size]
        device = "cpu" if jax.default_backend() == "cpu" else "cuda"
        words = [
            f"vit_{name}_patch{patch}_224",
            folder,
            arguments.batch,
            arguments.resolution,
            arguments.workers,
            device,
        ]
        command = [arguments.torch, THEIRS, *map(str, words)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def name(self) -> str:
        """Returns its name and version, when it is compiled."""
        return self.answer()

    def embed(self) -> float:
        """Returns the seconds in which all files are embedded."""
        return self.ask(0)

    def model_alone(self, count: int) -> float:
        """Returns the seconds of so many batches that are on the device."""
        return self.ask(count)

    def ask(self, count: int) -> float:
        print(count, file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"timm's process ended with exit code {self.process.wait()}; see above")
        return json.loads(line)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embed", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", default="ViT-B/16")
    parser.add_argument("--images", type=int, default=10_000, help="a multiple of the batch")
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--resolution", type=int, default=224)
    parser.add_argument("--workers", type=int, default=0, help="processes that read and decode")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each, at most")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no turn begins")
    parser.add_argument("--torch", metavar="PYTHON", help="also timm's, by the Python of an environment that has it")
    parser.add_argument("--json", metavar="FILE", help="also write what was measured here, after each turn")
    arguments = parser.parse_args(argv[1:])
    if arguments.images % arguments.batch:
        parser.error("--images must be a multiple of --batch, so that no batch is compiled for alone")
    end = time.monotonic() + arguments.seconds
    record = {**vars(arguments), "turn_seconds": {}, "batches_a_second": {}}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_photographs(folder, arguments.images)
        theirs = Timm(arguments, folder) if arguments.torch else None
        sides = {OURS: Ours(arguments, folder)} | ({theirs.name(): theirs} if theirs else {})
        alone = 20 if jax.default_backend() == "gpu" else 2
        for number in range(arguments.rounds):
            for name, side in sides.items():
                if number and time.monotonic() > end:
                    break
                record["batches_a_second"].setdefault(name, []).append(alone / side.model_alone(alone))
                record["turn_seconds"].setdefault(name, []).append(side.embed())
                rate, model = arguments.images / record["turn_seconds"][name][-1], record["batches_a_second"][name][-1]
                print(f"{name:30} {rate:10,.0f} images/s, model alone {model * arguments.batch:10,.0f}", flush=True)
                if arguments.json:
                    Path(arguments.json).write_text(json.dumps(record) + "\n")
        if theirs:
            theirs.process.kill()


if __name__ == "__main__":
    keep_freed_memory()
    main(sys.argv)
