"""Runs a command on all workers of one or several Cloud TPU slices, and again on new ones when they are taken away.

Cloud TPU is Google's older way to TPUs, for v4, v5e, v5p and v6e; v4 and v5e have no other way to single machines. It
gets corrections but no further development, and will not serve TPU7x (docs.cloud.google.com/tpu/docs/jax-pods says so).
`launch.compute_engine` takes the same words for v5p, v6e and TPU7x.

Examples:
  python -m launch.tpu_vm run l16 --topology=v5e:16x16 --zone=us-west4-a --spot -- python -m vit_jax.main \\
      --config=configs/vit_l16_jft.py --config.data.source=array_record:gs://my-bucket/jft --workdir=gs://my-bucket/l16
  python -m launch.tpu_vm delete l16 --zone=us-west4-a

Start it in the folder of the code. It requests the machines (a queued resource), waits for them, copies the files that
git tracks, installs them, starts the command and follows what the first worker prints. The command goes on if this
process ends. The same line, given again, finds the machines and the running command, and follows it. When the command
has ended, this process ends with its exit code, and after
  0                 deletes the machines (--keep leaves them);
  1, 2 and others   leaves the machines, so that somebody can look; they cost until `delete`;
  42, 128 or more, or lost machines
                    instead starts the same command again, on new machines if necessary: without limit after
                    preemptions (42, or machines that the cloud has taken away), and at most --restarts times in a row
                    after faults.
"""

import argparse
import time
from collections.abc import Callable

from launch.clouds import check_cloud_tpu
from launch.job import Job
from launch.launcher import Cloud, make_parsers, run_command_line
from launch.machines import STEP_NOTES, Machines
from launch.queued_resource import QueuedResource, make_steps
from vit_jax import cli
from vit_jax.planning.chips import Slice


def make_machines(job: Job, tpu: Slice, args: argparse.Namespace, sleep: Callable[[float], None]) -> Machines:
    """Returns the queued resource of a run; see `Cloud`.

    Raises:
        UserError: Cloud TPU does not have such chips.
    """
    check_cloud_tpu(tpu)
    steps = make_steps(job, tpu, args.zone, args.project, args.spot, args.runtime)
    return QueuedResource(job.name, steps, tpu.hosts * job.slices, sleep)


def delete_command(args: argparse.Namespace) -> list[str]:
    """Returns the command that deletes the machines of a run; see `Cloud`."""
    project = [f"--project={args.project}"] if args.project else []
    return ["python", "-m", "launch.tpu_vm", "delete", args.name, f"--zone={args.zone}", *project]


def main(argv: list[str], sleep: Callable[[float], None] = time.sleep) -> None:
    """Runs the command line; see `run_command_line`."""
    parser, _, _ = make_parsers("tpu_vm", __doc__)
    run_command_line(Cloud(parser, STEP_NOTES, make_machines, delete_command), argv, sleep)


if __name__ == "__main__":
    cli.run_command(main)
