"""Measures an NVIDIA GPU in two runs, of 7 and of 4 minutes: what is right, how fast training is, what makes it faster.

Examples:
  python -m benchmarks.gpu collect
  python -m benchmarks.gpu first
  python -m benchmarks.gpu second

`first` runs the tests of formats, curves, gradients and exact resume on the GPU, and training steps beside timm's,
compiled, for ViT-B/16, L/16, S/16 and H/14. `second` tries forms of attention, options of the compiler and batch sizes
with B/16, embeds photographs beside timm, and measures the loader. They need this checkout and what the machine has:
they begin by naming what is missing. Each part runs in a process of its own, within a limit, and is written to
`--out/NAME.json` with its output as soon as it ends; the name has the device and what was measured. The same command
goes on after an interruption, with the parts that are not there yet or failed, and ends by naming those that were left.

`collect` needs the network: it downloads the wheels that an image with jax, torch, timm, flax, optax and orbax
usually lacks, for Linux on x86-64, to `.gpu/wheels`. The other two install from there what is missing, to a folder
beside it.

`--rehearse` makes every part as small as it goes, for a CPU.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
WHEELS = ROOT / ".gpu" / "wheels"
SITE = ROOT / ".gpu" / f"site-{sys.version_info.major}.{sys.version_info.minor}"
RECORDS = ROOT / "results" / "gpu"
MINUTES = {"first": 7, "second": 4}  # that a run may take
LEAST = 15  # seconds: a part that has fewer is left
GRACE = 8  # seconds that a part has to end after it was told to
KEPT_LINES = 60  # of the output of a part

# What an image with jax, torch, timm, flax, optax and orbax usually lacks: dependencies of this package, theirs, and
# the plugin with which tests run side by side.
LACKING = tuple(
    """array-record google-crc32c grain importlib-resources ml-collections simplejpeg tensorboardX
tensorflow-datasets dm-tree docstring-parser googleapis-common-protos immutabledict portpicker promise simple-parsing
tensorflow-metadata termcolor toml pytest-rerunfailures""".split()  # noqa: SIM905
)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17)] + ["manylinux2014_x86_64"]

SMALL = ["--model=ViT-Ti/16", "--batch=2", "--resolution=32", "--rounds=2"]  # of a rehearsal
STEPS = ["--dtype=bfloat16", "--no-plain", "--steps=10", "--rounds=30"]
TESTS = [
    "tests/models/test_gradients.py",
    "tests/training/test_authors_curves.py",
    "tests/interop/test_layouts.py",
    "tests/interop/test_torch_layouts.py",
    "tests/interop/test_bit_layouts.py",
    "tests/training/test_bit_training.py::test_fine_tuning_killed_and_resumed_is_fine_tuning_bit_for_bit",
]
# Each is tried beside what a run does by default: cuDNN's attention, and the compiler's own options.
VARIANTS = [
    "model.attention=tokens_first",
    "attention=triton",
    "batch=256",
    "compiler_options=xla_gpu_enable_latency_hiding_scheduler=true",
    "compiler_options=xla_gpu_enable_command_buffer=",
    "compiler_options=xla_gpu_autotune_level=0",
]


@dataclass(frozen=True)
class Part:
    """A part of a run.

    Attributes:
        name: the name, as it is printed and stored.
        module: the module that measures it.
        words: its arguments.
        rehearsal: the arguments of a rehearsal instead.
        seconds: its limit.
        needs: packages without which it is left.
        beside: a package beside which it measures, where that is installed.
    """

    name: str
    module: str
    words: list[str]
    rehearsal: list[str]
    seconds: float
    needs: tuple[str, ...] = ()
    beside: str = ""


def steps_part(model: str, batch: int, seconds: float) -> Part:
    """Returns the part that measures the training step of a model beside timm's."""
    words = [f"--model={model}", f"--batch={batch}", *STEPS]
    return Part(model, "benchmarks.train_step", words, [*SMALL, "--no-plain", "--steps=2"], seconds, beside="timm")


def part_tables(cores: int) -> dict[str, list[Part]]:
    """Returns the parts of both runs, in their order, on a machine with so many cores."""
    pytest = ["-o", "addopts=", "-q", "-rfE", "-p", "no:cacheprovider"]
    side_by_side = ["-n", str(min(8, cores))] if find_version("pytest-xdist") else []
    right = Part(
        name="formats, curves, gradients, resume",
        module="pytest",
        words=[*pytest, *side_by_side, *TESTS],
        rehearsal=[*pytest, f"{TESTS[0]}::test_gradients_in_float32_are_exact"],
        seconds=75,
        needs=("pytest",),
    )
    variants = Part(
        name="variants",
        module="benchmarks.train_step",
        words=["--model=ViT-B/16", "--batch=128", *STEPS, "--rounds=12", *(f"--also={one}" for one in VARIANTS)],
        rehearsal=[*SMALL, "--no-plain", f"--also={VARIANTS[0]}"],
        seconds=130,
    )
    workers = max(1, cores - 1)
    embedding = Part(
        name="embedding",
        module="benchmarks.embed",
        words=[f"--workers={workers}"],
        rehearsal=[*SMALL, "--images=4", "--workers=1"],
        seconds=75,
        beside="timm",
    )
    loader = Part(
        name="loader",
        module="benchmarks.loader",
        words=["--batch=128", "--batches=20", "--rounds=1", f"--workers=0,{workers}"],
        rehearsal=["--batch=4", "--batches=1", "--rounds=1", "--resolution=32"],
        seconds=45,
    )
    sizes = [("ViT-B/16", 128, 130), ("ViT-L/16", 64, 110), ("ViT-S/16", 256, 80), ("ViT-H/14", 32, 130)]
    return {"first": [right, *(steps_part(*size) for size in sizes)], "second": [variants, embedding, loader]}


def find_version(package: str) -> str | None:
    """Returns the version of an installed package; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements() -> dict[str, str]:
    """Returns the dependencies of this package: name -> the requirement as pyproject.toml states it."""
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return {re.split(r"[<>=\[; ]", requirement)[0]: requirement for requirement in stated}


def find_missing() -> list[str]:
    """Returns the packages that this package needs, or that one of these needs, and that are not installed."""
    missing, seen, pending = [], set(), [*requirements().values()]
    while pending:
        name, *extras = re.split(r"[\[\],]", re.match(r"[\w.-]+(\[[^]]*\])?", pending.pop())[0])
        if (name, *extras) in seen:
            continue
        seen.add((name, *extras))
        if not find_version(name):
            missing.append(name)
            continue
        from packaging.markers import Marker  # one of the dependencies

        for needed in importlib.metadata.requires(name) or ():
            requirement, _, condition = needed.partition(";")
            if not condition or any(
                Marker(condition).evaluate({"extra": extra}) for extra in ("", *filter(None, extras))
            ):
                pending.append(requirement.strip())
    return sorted(set(missing))


def collect(python: str) -> None:
    """Downloads wheels for another machine to `.gpu/wheels`; what has no wheel is built here."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    for name in LACKING:
        words = ["--quiet", "--no-deps", requirements().get(name, name)]
        pip = [sys.executable, "-m", "pip"]
        downloaded = subprocess.run(
            [*pip, "download", "-d", WHEELS, *target, *words], stderr=subprocess.PIPE, text=True
        )
        if downloaded.returncode:  # it has a source distribution only
            subprocess.run([*pip, "wheel", "-w", WHEELS, *words], check=True)
    files = sorted(WHEELS.glob("*.whl"))
    print(f"{len(files)} wheels, {sum(file.stat().st_size for file in files) / 2**20:.1f} MiB, in {WHEELS}")


def install_wheels() -> None:
    """Installs the wheels of `.gpu/wheels` whose packages are missing beside them, and makes them importable."""
    sys.path.insert(0, str(SITE))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SITE), str(ROOT), os.environ.get("PYTHONPATH")]))
    files = [file for file in WHEELS.glob("*.whl") if not find_version(file.name.partition("-")[0])]
    if files:
        words = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(SITE)]
        subprocess.run([sys.executable, "-m", "pip", "install", *words, *map(str, files)], check=False)


def describe_machine() -> dict[str, str]:
    """Returns what a record depends on: the device, the versions and the code."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        device = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        device = "CPU"
    packages = ("jax", "jaxlib", "nvidia-cudnn-cu13", "torch", "timm", "flax", "optax", "orbax-checkpoint", "numpy")
    versions = {name: version for name in packages if (version := find_version(name))}
    files = [file for folder in ("vit_jax", "benchmarks", "tests", "configs") for file in (ROOT / folder).rglob("*.py")]
    code = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()
    return {"device": device, "cores": str(os.cpu_count()), "python": sys.version.split()[0], **versions, "code": code}


def run_part(part: Part, seconds: float, rehearse: bool) -> dict:
    """Runs a part in a process group of its own and prints its output.

    Args:
        part: the part.
        seconds: the seconds after which it is told to end, and soon after is killed.
        rehearse: whether it is as small as it goes.

    Returns:
        Its seconds, exit code, `ended` (how it ended), the last lines of its output, and the JSON that it wrote.

    Raises:
        KeyboardInterrupt: the run was interrupted; the processes of the part have ended.
    """
    words, result = list(part.rehearsal if rehearse else part.words), ROOT / ".gpu" / "result.json"
    result.parent.mkdir(exist_ok=True)
    result.unlink(missing_ok=True)
    if part.module.startswith("benchmarks."):
        words += [f"--json={result}"]
    if part.module in ("benchmarks.train_step", "benchmarks.embed"):
        words += [f"--seconds={seconds - 5:.0f}"]
    if part.beside and find_version(part.beside) and find_version("torch"):
        words += [f"--torch={sys.executable}"]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    environment |= (
        {"JAX_PLATFORMS": "cpu"} if rehearse else {"JAX_PLATFORMS": "cuda,cpu", "TESTED_PLATFORMS": "cuda,cpu"}
    )
    command = [sys.executable, "-m", part.module, *words]
    began, lines = time.monotonic(), []
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    os.set_blocking(process.stdout.fileno(), False)
    told, pending = 0.0, b""
    try:
        while True:
            chunk = process.stdout.read()
            if chunk:
                *whole, pending = (pending + chunk).split(b"\n")
                for line in whole:
                    lines.append(line.decode(errors="replace"))
                    print(f"    {lines[-1]}", flush=True)
            elif process.poll() is not None:
                break
            elapsed = time.monotonic() - began
            if elapsed > seconds and not told:
                os.killpg(process.pid, signal.SIGINT)
                told = elapsed
            elif told and elapsed > told + GRACE:
                break
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has left running, too
        process.wait()
    ended = f"stopped after {seconds:.0f} s" if told else "done" if process.returncode == 0 else "failed"
    found = json.loads(result.read_text()) if result.exists() else None
    measured = {"seconds": round(time.monotonic() - began, 1), "exit_code": process.returncode, "ended": ended}
    return measured | {"command": " ".join(command[1:]), "output": lines[-KEPT_LINES:], "result": found}


def measure(run: str, out: Path, minutes: float, rehearse: bool) -> int:
    """Makes a run, as far as it is not yet there; returns the exit code.

    0: every part is done; 1: some part failed, was stopped or was left; 2: something is missing; 130: Ctrl-C.
    """
    end = time.monotonic() + 60 * minutes
    install_wheels()
    if missing := find_missing():
        print(f"missing: {', '.join(missing)}; pip install -e . here, or carry the wheels of `benchmarks.gpu collect`.")
        if set(missing) & set(requirements()):
            return 2  # what only its dependencies declare may not be needed
    machine = describe_machine()
    if machine["device"] == "CPU" and not rehearse:
        print("nvidia-smi names no GPU here; --rehearse runs on a CPU.")
        return 2
    parts = part_tables(os.cpu_count() or 1)[run]
    settings = json.dumps([machine, rehearse, [asdict(part) for part in parts]], sort_keys=True)
    slug = re.sub("[^a-z0-9]+", "-", machine["device"].partition(",")[0].lower())
    path = out / f"{slug}-{run}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}.json"
    record = json.loads(path.read_text()) if path.exists() else {"machine": machine, "parts": {}}
    print(f"{', '.join(f'{name} {value[:40]}' for name, value in machine.items())}\nrecord: {path}", flush=True)
    for name in ("torch", "timm"):
        if not find_version(name):
            print(f"missing: {name}; parts beside it measure ours alone.")
    out.mkdir(parents=True, exist_ok=True)
    left = {}
    try:
        for part in parts:
            if (before := record["parts"].get(part.name)) and before["ended"] != "failed":
                print(f"{part.name}: already there, {before['ended']}", flush=True)
                continue
            if lacking := [name for name in part.needs if not find_version(name)]:
                left[part.name] = f"missing: {', '.join(lacking)}"
                continue
            limit = 4 * part.seconds if rehearse else part.seconds  # programs are compiled slowly on a busy CPU
            seconds = min(limit, end - time.monotonic() - GRACE)
            if seconds < LEAST:
                left[part.name] = "no time was left"
                continue
            print(f"{part.name}: at most {seconds:.0f} s", flush=True)
            measured = run_part(part, seconds, rehearse)
            record["parts"][part.name] = measured
            written = path.with_suffix(".new")
            written.write_text(json.dumps(record, indent=1) + "\n")
            written.replace(path)
            print(f"{part.name}: {measured['ended']}, {measured['seconds']:.0f} s", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted in {part.name}; the same command goes on with it.")
        return 130
    for name, why in left.items():
        print(f"left: {name}: {why}")
    whole = not left and all(record["parts"][part.name]["ended"] == "done" for part in parts)
    print(f"{'every part is done' if whole else 'not every part is done'}: {path}")
    return 0 if whole else 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", choices=("collect", "first", "second"))
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results" / "gpu", help="folder of the records [results/gpu]"
    )
    parser.add_argument("--minutes", type=float, help="that it may take [first: 7, second: 4]")
    parser.add_argument("--rehearse", action="store_true", help="the smallest shapes, on a CPU")
    parser.add_argument("--python", default="3.12", help="version of Python of the other machine, for collect [3.12]")
    return parser


def main(argv: list[str]) -> int:
    arguments = make_parser().parse_args(argv[1:])
    if arguments.run == "collect":
        collect(arguments.python)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    minutes = arguments.minutes or MINUTES[arguments.run]
    return measure(arguments.run, arguments.out, minutes, arguments.rehearse)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
