"""Runs a command on all machines of one or several TPU slices of Compute Engine, and again when they are taken away.

Examples:
  python -m launch.compute_engine run l16 --topology=v6e:16x16 --zone=us-east5-b --spot -- python -m vit_jax.main \\
      --config=configs/vit_l16_jft.py --config.data.source=array_record:gs://my-bucket/jft --workdir=gs://my-bucket/l16
  python -m launch.compute_engine delete l16 --zone=us-east5-b

It takes the words of `launch.tpu_vm`, for v5p, v6e and TPU7x. Start it in the folder of the code. It requests the
machines, all or none (an instance template, a workload policy and a managed instance group for each slice), waits for
them, copies the files that git tracks, installs them, starts the command and follows what the first worker prints. The
command goes on if this process ends. The same line, given again, finds the machines and the running command, and
follows it. When the command has ended, this process ends with its exit code, and after
  0                 deletes the machines (--keep leaves them);
  1, 2 and others   leaves the machines, so that somebody can look; they cost until `delete`;
  42, 128 or more, or lost machines
                    instead starts the same command again: without limit after preemptions (42, or machines that the
                    cloud has taken away), and at most --restarts times in a row after faults. Spot machines that were
                    taken away are deleted and requested again. Other machines are restarted by Compute Engine.
"""

import argparse
import re
import time
from collections.abc import Callable

from launch.clouds import check_compute_engine
from launch.instance_groups import NOTES, InstanceGroups, capacity_flags
from launch.job import Job
from launch.launcher import Cloud, make_parsers, run_command_line
from launch.machines import Machines
from vit_jax import UserError, cli
from vit_jax.planning.chips import Slice

DURATION = re.compile(r"(?=.)(\d+d)?(\d+h)?(\d+m)?(\d+s)?")


def make_machines(job: Job, tpu: Slice, args: argparse.Namespace, sleep: Callable[[float], None]) -> Machines:
    """Returns the instance groups of a run; see `Cloud`.

    Raises:
        UserError: Compute Engine does not have such chips, or the options contradict each other.
    """
    check_compute_engine(tpu)
    if sum(map(bool, (args.spot, args.reservation, args.flex_start))) > 1:
        raise UserError("use only one of --spot, --reservation and --flex-start; they are ways to get machines.")
    if args.flex_start and not DURATION.fullmatch(args.flex_start):
        raise UserError(f"--flex-start={args.flex_start} is not a time; write for example --flex-start=7d.")
    capacity = capacity_flags(args.spot, args.reservation, args.flex_start)
    return InstanceGroups(job, tpu, args.zone, args.project, capacity, args.runtime, sleep)


def delete_command(args: argparse.Namespace) -> list[str]:
    """Returns the command that deletes the machines of a run; see `Cloud`."""
    slices = [f"--slices={args.slices}"] if args.slices > 1 else []
    project = [f"--project={args.project}"] if args.project else []
    return ["python", "-m", "launch.compute_engine", "delete", args.name, *slices, f"--zone={args.zone}", *project]


def main(argv: list[str], sleep: Callable[[float], None] = time.sleep) -> None:
    """Runs the command line; see `run_command_line`."""
    parser, run, delete = make_parsers("compute_engine", __doc__)
    run.add_argument("--reservation", metavar="NAME", help="use machines of this reservation")
    run.add_argument("--flex-start", metavar="TIME", help="request machines for this time at most, for example 7d")
    delete.add_argument("--slices", type=int, default=1, help="of the run [1]")
    delete.set_defaults(reservation=None, flex_start=None)
    run_command_line(Cloud(parser, NOTES, make_machines, delete_command), argv, sleep)


if __name__ == "__main__":
    cli.run_command(main)
