"""Measures the costs of a restart by killing and resuming a run, and computes the goodput to expect on many hosts.

Example:
  python -m benchmarks.goodput --write=docs/reliability.md

ViT-B/16 is trained on synthetic images in a process of its own, killed at its third save, started again, and killed
again at the third save from then on. The ledger of the run tells how long its saves and its second start took. Programs
are compiled in both starts.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from docs.pages import print_sections
from tests.faults.hosts import ROOT
from vit_jax.monitoring import PROCESSES, Start, read_processes
from vit_jax.planning import goodput
from vit_jax.planning.goodput import FAILURE_RATES, Restart

HOSTS = (64, 128, 256, 512, 1024, 2048, 4096)
DEFAULT_INTERVAL = 15 * 60.0  # seconds: `checkpoint_every_minutes`
LIMIT = 1800.0  # seconds that a start may take until its last save
WORDS = ["--config.data.source=synthetic", "--config.total_epochs=None", "--config.total_steps=1000"]
WORDS += ["--config.warmup_steps=0", "--config.checkpoint_every=2", "--config.eval_every=1000"]
WORDS += ["--config.data.workers=0", "--config.data.num_examples=64", "--config.data.num_classes=1000"]


def read(workdir: Path) -> list[Start]:
    """Returns the starts of a run so far."""
    path = workdir / PROCESSES
    return read_processes({PROCESSES: path.read_bytes()}, str(workdir)).starts if path.exists() else []


def train_until_killed(workdir: Path, words: list[str], start: int, saves: int) -> None:
    """Trains in a process, and kills it once its start has enough saves.

    Args:
        workdir: the folder of the run.
        words: further flags of `vit_jax.main`.
        start: the number of this start of the run, from 0.
        saves: the number of saves in this start after which the process is killed.
    """
    command = [sys.executable, "-m", "vit_jax.main", f"--workdir={workdir}", *WORDS, *words]
    compiled = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    with workdir.with_name("log").open("a") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | compiled)
    end = time.monotonic() + LIMIT
    try:
        while len(read(workdir)) <= start or read(workdir)[start].saves < saves:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(workdir.with_name("log").read_text()[-2000:])
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()


def measure(words: list[str]) -> Restart:
    """Kills and resumes a run, and returns the measured costs of its saves and its restart."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        for start in range(2):
            train_until_killed(workdir, words, start, saves=3)
        found = goodput.measure_restart(read(workdir), str(workdir))
    return Restart(**{part: round(seconds, 1) for part, seconds in dataclasses.asdict(found).items()})


def restart_table(found: Restart) -> Iterator[str]:
    """Yields the lines of the table of the parts of a restart."""
    yield "| part of a restart | seconds |"
    yield "|---|---|"
    yield f"| a lost host is noticed, at most | {found.detecting:.0f} |"
    yield f"| start of Python, imports, data, checks | {found.starting:.1f} |"
    yield f"| reading the checkpoint, fingerprints | {found.restoring:.1f} |"
    yield f"| compiling | {found.compiling:.1f} |"
    yield f"| a save keeps training from going on | {found.save:.1f} |"


def goodput_table(restart: Restart) -> Iterator[str]:
    """Yields the lines of the table of the goodput to expect for each number of hosts and each rate of failures."""
    names = "".join(f" {name}, {rate:.2f} |" for name, rate in FAILURE_RATES.items())
    yield f"| hosts |{names}"
    yield "|---|" + "---|" * len(FAILURE_RATES)
    for hosts in HOSTS:
        cells = ""
        for rate in FAILURE_RATES.values():
            between = goodput.time_between_failures(hosts, rate)
            best = goodput.daly_interval(restart.save, between)
            shares = [
                goodput.expected_goodput(interval, restart.save, restart.seconds, between)
                for interval in (DEFAULT_INTERVAL, best)
            ]
            told = f"{between / 3600:,.1f} h: {shares[0]:.1%}, {shares[1]:.1%} at {best / 60:.1f} min"
            cells += f" {told} |"
        yield f"| {hosts:,} |{cells}"


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=f"{ROOT}/configs/vit_b16_imagenet2012.py", help="a recipe [ViT-B/16]")
    parser.add_argument("--batch", type=int, default=2, help="images of a step [2]")
    parser.add_argument("--write", type=Path, help="Markdown file in which to replace the sections")
    args = parser.parse_args(argv[1:])
    words = [f"--config={args.config}", f"--config.batch={args.batch}", f"--config.batch_eval={args.batch}"]
    found = dataclasses.replace(measure(words), detecting=goodput.MEASURED_ON_CPU.detecting)
    print_sections([("restart", restart_table(found)), ("goodput", goodput_table(found))], args.write)


if __name__ == "__main__":
    main(sys.argv)
