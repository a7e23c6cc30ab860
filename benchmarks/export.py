"""Compares exported models: images a second beside `model.apply` and timm, and the accuracy of narrow ONNX files.

python -m benchmarks.export --torch=python3 --write=docs/export.md
python -m benchmarks.export --runs workdirs/digits --write=docs/export.md

The models have random weights, float32, images of 224 pixels. The programs take turns of the same batch in one run, so
that other work on the machine slows all of them; a rate is the median of the turns, and so is a ratio, of the turns of
two programs. timm is eager PyTorch, in the process of an environment that has it. The accuracy is
that of a run on its first evaluation: of its weights by `model.apply`, and by onnxruntime from files in float32,
in float16, and in int8 by onnxruntime's `quantize_dynamic` of the float32 file. After it stands the number of images
with another most probable class than by `model.apply`.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import onnxruntime
from onnxruntime.quantization import QuantType, quantize_dynamic

import vit_jax
from benchmarks.embed import Timm, write_photographs
from benchmarks.tpu import table
from docs.pages import print_sections
from vit_jax import data
from vit_jax.evals import open_run
from vit_jax.machine import keep_freed_memory
from vit_jax.model import create

CASES = [(name, batch) for name in ("ViT-S/16", "ViT-B/16") for batch in (1, 32)]
SPEED = ["model", "batch", "`model.apply`", ".stablehlo", ".onnx", "timm", ".stablehlo / `apply`", ".onnx / timm"]
ACCURACY = ["run", "images", "`model.apply`", ".onnx", "float16", "int8", "MB: .onnx, float16, int8"]


def run_onnx(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function from images to logits of an .onnx file."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: session.run(["logits"], {"images": images})[0]


def measure_speed(name: str, batch: int, rounds: int, python: str, folder: Path) -> list[str]:
    """Returns a row of the table of speeds."""
    model = create(name, num_classes=1000)
    images = np.random.default_rng(0).uniform(-1, 1, (batch, *model.image_size, 3)).astype(np.float32)
    params = jax.jit(model.init)(jax.random.key(0), images[:1])
    write_photographs(folder, 1)
    theirs = Timm(SimpleNamespace(model=name, batch=batch, resolution=224, workers=0, torch=python), folder)
    apply = jax.jit(lambda params, images: model.apply(params, images)[0])
    for suffix in (".stablehlo", ".onnx"):
        vit_jax.save(folder / f"x{suffix}", model, params)
    exported = jax.jit(jax.export.deserialize(bytearray((folder / "x.stablehlo").read_bytes())).call)
    onnx = run_onnx(folder / "x.onnx")
    programs = {
        "apply": lambda: jax.block_until_ready(apply(params, images)),
        "stablehlo": lambda: jax.block_until_ready(exported(images)["logits"]),
        "onnx": lambda: onnx(images),
        "timm": lambda: theirs.model_alone(1),
    }
    theirs.name()
    for run in programs.values():
        run()  # compiles
    count, seconds = max(1, 8 // batch), {program: [] for program in programs}
    for _ in range(rounds):
        for program, run in programs.items():
            began = time.perf_counter()
            for _ in range(count):
                run()
            seconds[program].append((time.perf_counter() - began) / count)
    theirs.process.kill()
    times = {program: np.array(each) for program, each in seconds.items()}
    rates = [f"{batch / np.median(each):.1f}" for each in times.values()]
    ratios = [np.median(times[a] / times[b]) for a, b in (("apply", "stablehlo"), ("timm", "onnx"))]
    return [name, str(batch), *rates, *(f"{ratio:.2f}" for ratio in ratios)]


def measure_accuracy(place: str, folder: Path) -> list[str]:
    """Returns a row of the table of accuracies."""
    loaded = open_run(place, False, 1, None)
    model, params = vit_jax.load(place)
    batches = data.EvalBatches(loaded.config, min(loaded.config.evals), loaded.program.batch_sharding)
    apply = jax.jit(lambda images: model.apply(params, images)[0])
    paths = {name: folder / f"{name}.onnx" for name in ("float32", "float16", "int8")}
    for dtype in ("float32", "float16"):
        vit_jax.save(paths[dtype], model, params, dtype=dtype)
    quantize_dynamic(paths["float32"], paths["int8"], weight_type=QuantType.QInt8)
    programs = {"apply": apply} | {name: run_onnx(path) for name, path in paths.items()}
    right, changed, total = dict.fromkeys(programs, 0), dict.fromkeys(programs, 0), 0
    for batch in batches:
        given = {key: np.asarray(value) for key, value in batch.items()}
        total += int(given["mask"].sum())
        classes = {name: np.asarray(run(given["image"])).argmax(1) for name, run in programs.items()}
        for name, found in classes.items():
            right[name] += int(((found == given["label"]) * given["mask"]).sum())
            changed[name] += int(((found != classes["apply"]) * given["mask"]).sum())
    sizes = ", ".join(f"{path.stat().st_size / 1e6:.2f}" for path in paths.values())
    cells = [f"{100 * right[name] / total:.2f} %, {changed[name]}" for name in programs]
    return [Path(place).name, f"{total:,}", *cells, sizes]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--torch", metavar="PYTHON", help="of an environment with timm: measures the speed")
    parser.add_argument("--only", default="", help="of the cases: the model and the batch, as in ViT-S/16,32")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each program")
    parser.add_argument("--runs", nargs="*", default=[], help="folders of runs: measures their accuracy")
    parser.add_argument("--write", metavar="PAGE", type=Path, help="writes the tables into the page")
    arguments = parser.parse_args(argv[1:])
    sections = []
    with tempfile.TemporaryDirectory() as place:
        if arguments.torch:
            rows = []
            cases = [(name, batch) for name, batch in CASES if arguments.only in f"{name},{batch}"]
            for number, (name, batch) in enumerate(cases):
                folder = Path(place, str(number))
                folder.mkdir()
                rows.append(measure_speed(name, batch, arguments.rounds, arguments.torch, folder))
                print(*rows[-1], sep="  ", flush=True)
            sections.append(("export speed", table(SPEED, rows)))
        if arguments.runs:
            rows = [measure_accuracy(run, Path(place)) for run in arguments.runs]
            sections.append(("export accuracy", table(ACCURACY, rows)))
    print_sections(sections, arguments.write)


if __name__ == "__main__":
    keep_freed_memory()
    main(sys.argv)
