"""Runs a command on the GPUs of a Slurm cluster, and again when the time is over or machines are taken away.

Example:
  python -m launch.slurm l16 --nodes=4 --gpus=8 --option=partition=gpu -- python -m vit_jax.main \\
      --config=configs/vit_l16_jft.py --config.data.source=array_record:/shared/jft --workdir=/shared/l16

Hands a script to sbatch, in the folder of the code and the environment that the command needs, which the cluster's
machines see too. Each GPU has a process, as JAX wants it there. The same command, given again, waits for the first to
end.
"""

import re

from launch.job import PREEMPTED, Job, add_arguments, call, check_config, check_output, line, make, parser, split
from vit_jax import UserError, cli

NOTICE = 120  # seconds before the end of its time that a run gets SIGTERM, to save

# The shell has no trap, and is not sent the notice: `scancel` ends it before it could ask for a restart. Of many exit
# codes srun gives the largest: where a process fails before it has found the others, that is their 134: tried again.
SCRIPT = """\
#!/bin/bash
{options}

# Processes that lose another one end by themselves, and say why.
srun --kill-on-bad-exit=0 --wait=0 --gpu-bind=none --cpus-per-task={cpus} {command}
code=$?

# Infrastructure: again, {restarts} times at most. They are counted in a file that stays when the job is queued again.
faults={name}-$SLURM_JOB_ID.faults
if [ "$code" -ge 128 ]; then
  echo "$code" >> "$faults" || exit "$code"
  again=$(($(wc -l < "$faults") <= {restarts}))
else # Preempted and saved: again, however often. After all else somebody should look.
  again=$((code == {preempted}))
fi
if [ "$again" -eq 1 ]; then
  echo "ended with $code; again" >&2
  scontrol requeue "$SLURM_JOB_ID" || exit "$code"
else
  rm -f "$faults"
  exit "$code"
fi
"""


def script(job: Job, nodes: int, gpus: int, cpus: int, time: str, extra: list[str]) -> str:
    """Returns the batch script of a run.

    Args:
        job: what to run.
        nodes: machines.
        gpus: of each of them, and processes.
        cpus: cores of each process.
        time: after which Slurm ends the run, as Slurm writes it.
        extra: more of sbatch's options, without their dashes.
    """
    options = [
        f"job-name={job.name}",
        f"output={job.name}-%j.log",
        "open-mode=append",
        f"nodes={nodes}",
        f"ntasks-per-node={gpus}",
        f"gpus-per-node={gpus}",
        f"cpus-per-task={cpus}",
        f"time={time}",
        f"signal=TERM@{NOTICE}",
        "requeue",
        "dependency=singleton",  # one of this name at a time
        *extra,
    ]
    return SCRIPT.format(
        name=job.name,
        options="\n".join(f"#SBATCH --{option}" for option in options),
        cpus=cpus,
        command=line(job.command),
        preempted=PREEMPTED,
        restarts=job.restarts,
    )


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `job.make`; numbers and options that cannot be; Slurm refuses.
    """
    options, command = split(argv)
    flags = parser("slurm", __doc__)
    flags.add_argument("--nodes", type=int, default=1, help="machines [1]")
    flags.add_argument("--gpus", type=int, required=True, help="of each machine")
    flags.add_argument("--cpus", type=int, default=8, help="cores for each GPU's process [8]")
    flags.add_argument("--time", default="24:00:00", help="after which it is started again [24:00:00]")
    flags.add_argument("--option", action="append", default=[], help="of sbatch, partition=gpu for example; repeatable")
    add_arguments(flags)
    args = flags.parse_args(options)
    job = make(args, command)
    check_output(job, shared=True, allowed=args.allow_local_output)
    if min(args.nodes, args.gpus, args.cpus) < 1 or args.nodes % job.slices:
        raise UserError("--nodes, --gpus and --cpus are at least 1, and --nodes a multiple of --slices.")
    check_config(job, shared=True, devices=args.nodes * args.gpus)
    for option in (f"time={args.time}", *args.option):
        if not re.fullmatch(r"[a-z][a-z-]*(=\S+)?", option):
            raise UserError(f"{option!r} is not an option of sbatch; write it as in --option=partition=gpu.")
    text = script(job, args.nodes, args.gpus, args.cpus, args.time, args.option)
    if args.dry_run:
        print(text, end="")
        return
    if call(["sbatch"], input=text).returncode:
        raise UserError("Slurm refuses, for the reason above.")
    print(f"follow: tail --follow=name --retry {job.name}-*.log")
    print(f"end it: scancel --name={job.name}")


if __name__ == "__main__":
    cli.run(main)
