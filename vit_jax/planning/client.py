"""Asks a compiler, in a process of its own, what a command line's program needs; tells how long that has taken."""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from vit_jax import UserError, shown
from vit_jax.planning import target as topology

Facts = dict[str, Any]  # what `worker.py` tells

PATIENCE = 3.0  # seconds of which nothing is told
EVERY = 30.0  # seconds between two lines where no terminal shows the clock


def compile_elsewhere(words: list[str], target: str, inference: bool = False, emulated: int = 1) -> Facts:
    """Returns what is known of a program, compiled now or earlier.

    Args:
        words: flags of `vit_jax.main`.
        target: a TPU slice, `v5e:2x4`; `cpu` or `gpu`: the devices that are here.
        inference: a prediction instead of a step of training.
        emulated: devices of `cpu`.

    Raises:
        UserError: the flags are wrong, or the compiler does not answer.
    """
    request = json.dumps({"words": words, "target": target, "inference": inference})
    command = [sys.executable, "-m", "vit_jax.planning.worker", request]
    facts: Facts = {}
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        with subprocess.Popen(
            command, env=topology.environment(target, emulated), stdout=subprocess.PIPE, stderr=said, text=True
        ) as process:
            try:
                assert process.stdout
                line = process.stdout.readline()
                while line:
                    facts |= json.loads(line)
                    if "fits" in facts:
                        break
                    with told(what(facts, target)):
                        line = process.stdout.readline()
            except BaseException:
                process.kill()
                raise
        if process.returncode or "fits" not in facts:
            raise UserError(_reason(said, process.returncode))
    return {key: value for key, value in facts.items() if key != "compiling"}


def needs(facts: Facts) -> int:
    """Returns the bytes of a device that a step needs, whether it fits or not."""
    return facts["needed_bytes"] if "needed_bytes" in facts else facts["peak_bytes"]


def held(facts: Facts) -> int:
    """Returns the bytes of these that do not depend on the batch: what a program is given besides."""
    return facts["parameter_bytes"] if facts["inference"] else facts["state_bytes"]


def what(facts: Facts, target: str) -> str:
    """Returns what is compiled, in words."""
    if facts["compiling"] == "evaluation step":
        return f"the evaluation step of {facts['model']}, {target}, {axes(facts)}"
    parts = f" in {facts['accum_steps']} parts" if facts["accum_steps"] > 1 else ""
    remat = f", remat={facts['remat']}" if facts["remat"] != "none" else ""
    of = f"the {facts['compiling']} of {facts['model']}, {facts['images_per_device']} images a device"
    return f"{of}{parts}{remat}, {target}, {axes(facts)}"


def axes(facts: Facts) -> str:
    """Returns the axes of a mesh that are longer than 1."""
    return ", ".join(f"{axis}={size}" for axis, size in facts["mesh"].items() if size > 1) or "one device"


@contextmanager
def told(text: str) -> Iterator[None]:
    """Tells on stderr what is compiled and for how long; nothing of what is soon over."""
    done, began, terminal = threading.Event(), time.monotonic(), sys.stderr.isatty()

    def tell() -> None:
        if done.wait(PATIENCE):
            return
        while True:
            line = f"compiling {text}: {time.monotonic() - began:.0f} s"
            print(f"\r{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)
            if done.wait(1.0 if terminal else EVERY):
                if terminal:
                    print(f"\r{' ' * len(line)}\r", end="", file=sys.stderr, flush=True)
                return

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _reason(said: IO[str], code: int) -> str:
    said.seek(0)
    lines = [line for line in said.read().splitlines() if line.strip()]
    sentences = [line.removeprefix("vit_jax: ") for line in lines if line.startswith("vit_jax: ")]
    if code == 2 and sentences:
        return sentences[-1]
    last = shown(lines[-1] if lines else "it said nothing", 500)
    if code < 0:  # a fault of its own: another strategy or accum_steps makes another program
        return f"the compiler crashed on this program, by signal {-code}: {last}"
    return f"the compiler's process ended with {code}: {last}"
