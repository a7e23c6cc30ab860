"""Launchers before programs that stand in for a cloud and a cluster: how often they start a run again, for the fault
table and the tests.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from launch import slurm
from launch.job import Job
from launch.launcher import Launcher
from launch.queued_resource import QueuedResource, make_steps
from vit_jax.planning import parse_topology

TAKEN = "taken"  # how a start ends whose machines the cloud takes away; else its exit code

# How the next start ends.
NEXT = """
read -r n < starts
echo $((n + 1)) > starts
read -r end < "end-$n"
"""
# One worker, on machines that come as soon as they are asked for. What it runs has ended when it is looked at.
GCLOUD = f"""#!/bin/sh
cd "${{0%/*}}" || exit
read -r state < state
case "$*" in
  *" describe "*)
    [ "$state" != none ] || {{ echo NOT_FOUND >&2; exit 1; }}
    echo "$state" ;;
  *" create "*) echo ACTIVE > state; echo new > worker ;;
  *" delete "*) echo none > state ;;
  *"worker.sh status"*)
    [ "$state" = ACTIVE ] || exit 1
    read -r said < worker
    echo "worker one: $said" ;;
  *"worker.sh install"*) echo "worker one: installed" ;;
  *"worker.sh start"*)
    {NEXT}
    if [ "$end" = {TAKEN} ]; then echo SUSPENDED > state; else echo "ended $end" > worker; fi
    echo "worker one: started" ;;
esac
"""
SRUN = f"""#!/bin/sh
{NEXT}
exit "$end"
"""
SCONTROL = """#!/bin/sh
echo "$@" > asked
"""


class Launched(NamedTuple):
    """What became of a run: its exit code, how often it was started, the seconds before each further start."""

    code: int
    starts: int
    pauses: list[float]


def prepare(folder: Path, ends: Sequence[str], **programs: str) -> None:
    """Writes how the starts end, one after the other, and the programs that see to it."""
    folder.mkdir()
    for number, end in enumerate(ends):
        (folder / f"end-{number}").write_text(f"{end}\n")
    (folder / "starts").write_text("0\n")
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def cloud_tpu(
    folder: Path,
    ends: Sequence[str],
    restarts: int,
    clock: Callable[[], float] = time.monotonic,
    on_pause: Callable[[], object] = lambda: None,
) -> Launched:
    """Launches on Cloud TPU.

    Args:
        folder: to be made.
        ends: of the starts: exit codes, or `TAKEN`.
        restarts: after faults, at most.
        clock: of the launcher.
        on_pause: called when the launcher would have waited.
    """
    prepare(folder, ends, gcloud=GCLOUD)
    (folder / "state").write_text("none\n")
    job = Job("run", ("x",), 1, restarts)
    steps = make_steps(job, parse_topology("v5e:2x4"), "zone")
    steps = {step: [[str(folder / "gcloud"), *argv[1:]]] for step, [argv] in steps.items()} | {"pack": [["true"]]}
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        on_pause()

    with (folder / "log").open("w") as log, contextlib.redirect_stderr(log):
        code = Launcher(job, QueuedResource(job.name, steps, 1, sleep), sleep, clock).run()
    return Launched(code, int((folder / "starts").read_text()), pauses)


def on_slurm(folder: Path, ends: Sequence[str], restarts: int) -> Launched:
    """Submits to Slurm, which starts the job again as often as it asks for that; the arguments as of `cloud_tpu`."""
    prepare(folder, ends, srun=SRUN, scontrol=SCONTROL)
    script = slurm.make_script(Job("run", ("x",), 1, restarts), 1, 1, 1, "1:00:00", [])
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    count, again = 0, True
    while again:
        told = environment | {"SLURM_RESTART_COUNT": str(count)} if count else environment
        ended = subprocess.run(["bash"], input=script, text=True, cwd=folder, env=told, stderr=subprocess.DEVNULL)
        if again := (folder / "asked").exists():
            (folder / "asked").unlink()
        count += 1
    return Launched(ended.returncode, count, [])


# A launcher -> the ends that are no fault of the run, in turn.
LAUNCHERS: dict[str, tuple[Callable[[Path, Sequence[str], int], Launched], list[str]]] = {
    "Cloud TPU": (cloud_tpu, ["42", TAKEN]),
    "Slurm": (on_slurm, ["42", "42"]),
}
