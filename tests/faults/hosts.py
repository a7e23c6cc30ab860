"""A training run in several processes, to be disturbed: for the fault table and the tests of pods."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from launch.local import JAX_VARIABLES, process_environments

ROOT = Path(__file__).parents[2]
SPEED = ("train/images_per_sec", "train/images_per_sec_per_chip", "perf/data_wait")
BATCH = 120  # does not divide the images: batches straddle the epochs' ends
# Data, dropout and MixUp are random.
RANDOM = [f"--config.batch={BATCH}", "--config.model.dropout_rate=0.1", "--config.task.mixup=0.3"]
RANDOM += ["--config.optim.ema_decay=0.9", "--config.eval_every=20", "--config.checkpoint_every=10"]
RANDOM += ["--config.log_every=1", "--config.total_steps=40"]
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # runs of the same small programs follow each other
QUICK = "--xla_backend_optimization_level=0"  # what runs for a second should not be optimized for long
if version("jaxlib").startswith("0.10."):  # later versions do not have this flag
    QUICK += " --xla_cpu_use_fusion_emitters=false"  # the older emitters take half the time
SLOWLY = 0.05  # seconds that a step takes longer: a signal takes a second to reach all hosts


class Hosts:
    """The processes of a run of `configs/smoke.py` on small random batches; killed at the end of a `with`.

    Attributes:
        words: of its command line.
    """

    words = RANDOM

    def __init__(
        self,
        workdir: Path,
        hosts: int,
        devices: int,
        *words: str,
        each: dict[int, list[str]] | None = None,
        faults: dict[int, str] | None = None,
        slow: float = SLOWLY,
        lines: int | None = None,
        variables: Callable[[int], dict[str, str]] = lambda host: {},
    ):
        """Starts them.

        Args:
            workdir: of the run; what they print is in `<workdir>.<host>.log` beside it.
            hosts: processes.
            devices: of each.
            *words: more of the command line.
            each: more of that of single hosts.
            faults: of single hosts, as `tests.faults.inject` knows them.
            slow: seconds that each step takes longer.
            lines: after how many lines their terminals are closed.
            variables: host -> more of its environment.
        """
        self.workdir, self.hosts = workdir, hosts
        command = [f"--config={ROOT}/configs/smoke.py", f"--workdir={workdir}", *RANDOM, *words]
        environment = process_environments(hosts, devices) if hosts > 1 else [single(devices)]
        self.logs = [workdir.with_name(f"{workdir.name}.{host}.log") for host in range(hosts)]
        self.processes = []
        for host in range(hosts):
            with self.logs[host].open("a") as log:
                put = ",".join([f"slow_steps:{slow}", *([faults[host]] if faults and host in faults else [])])
                line = [sys.executable, "-m", "tests.faults.inject", put, *command, *(each or {}).get(host, [])]
                output = log if lines is None else subprocess.PIPE
                process = subprocess.Popen(
                    line,
                    cwd=ROOT,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment[host] | CACHE | variables(host),
                    start_new_session=True,
                )
                if process.stdout:
                    subprocess.Popen(["head", f"-n{lines}"], stdin=process.stdout, stdout=log)
                    process.stdout.close()
            self.processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its worker processes too
            process.wait()

    def await_text(self, text: str, limit: float = 120, host: int = 0) -> bool:
        """Waits until a host has printed a text; returns False if it ends before."""
        return self._await(lambda: text in self.output(host), limit)

    def await_step(self, step: int, limit: float = 120) -> bool:
        """Waits until a step's metrics are written; returns False if the run ends before."""
        return self._await(lambda: any(line["step"] >= step for line in metrics(self.workdir)), limit)

    def _await(self, reached: Any, limit: float) -> bool:
        end = time.monotonic() + limit
        while not reached():
            if time.monotonic() > end:
                raise TimeoutError(self.output())
            if any(process.poll() is not None for process in self.processes):
                return False
            time.sleep(0.01)
        return True

    def send(self, kind: signal.Signals, *hosts: int) -> None:
        """Sends a signal to some hosts, or to all."""
        for host in hosts or range(self.hosts):
            self.processes[host].send_signal(kind)

    def send_to_group(self, kind: signal.Signals) -> None:
        """Sends a signal to every process of every host, worker processes included, as the end of a job does."""
        for process in self.processes:
            os.killpg(process.pid, kind)

    def workers(self, host: int = 0) -> list[int]:
        """Returns the numbers of the loader's worker processes of a host."""
        found = []
        for path in Path(f"/proc/{self.processes[host].pid}/task").glob("*/children"):
            for pid in map(int, path.read_text().split()):
                with contextlib.suppress(OSError):  # it has just ended
                    if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(pid)
        return found

    def wait(self, limit: float = 120) -> list[int]:
        """Returns the exit codes once all have ended."""
        end = time.monotonic() + limit
        try:
            return [process.wait(max(end - time.monotonic(), 0.01)) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise TimeoutError(self.output()) from None

    def output(self, *hosts: int) -> str:
        """Returns what hosts, or all, have printed."""
        return "\n".join(self.logs[host].read_text() for host in hosts or range(self.hosts))


def single(devices: int) -> dict[str, str]:
    """Returns the environment of a process that is alone."""
    [environment] = process_environments(1, devices)
    return {name: value for name, value in environment.items() if name not in JAX_VARIABLES}


def metrics(workdir: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's metrics, whole ones, without what tells of speed."""
    return [{name: value for name, value in line.items() if name not in SPEED} for line in _lines(workdir)]


def step_seconds(workdir: Path) -> dict[int, float]:
    """Returns step -> the seconds that it took by its metrics, for a run whose every step is logged."""
    speeds = {line["step"]: line[SPEED[0]] for line in _lines(workdir) if SPEED[0] in line}
    return {step: BATCH / speed for step, speed in speeds.items()}


def _lines(workdir: Path) -> list[dict[str, Any]]:
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def saved(workdir: Path) -> list[int]:
    """Returns the steps of the finished checkpoints."""
    folder = workdir / "checkpoints"
    return sorted(int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()) if folder.exists() else []
