"""Runs a command on the GPUs of a Slurm cluster, and again when its time is up or machines are taken away.

Example:
  python -m launch.slurm l16 --nodes=4 --gpus=8 --option=partition=gpu -- python -m vit_jax.main \\
      --config=configs/vit_l16_jft.py --config.data.source=array_record:/shared/jft --workdir=/shared/l16

Start it in the folder of the code and in the environment that the command needs. The machines of the cluster must see
both. It gives a script to sbatch. Each GPU has a process, as JAX requires on Slurm. If the same command is given again,
its job waits for the first one to end.
"""

import re

from launch.checks import check_config, check_module, check_output, read_inputs
from launch.job import (
    INFRASTRUCTURE,
    PREEMPTED,
    Job,
    add_job_arguments,
    make_job,
    make_parser,
    run_command,
    shell_line,
    split_command_line,
)
from vit_jax import UserError, cli, printable

NOTICE_SECONDS = 120  # seconds between SIGTERM, after which a run saves, and the end of its time

# The shell has no trap and does not get the notice. `scancel` thus ends it before it can ask for a restart. srun
# returns the largest exit code of all processes. If one process fails before it has found the others, these end with
# 134, which is the larger code, and the job is restarted.
SCRIPT = """\
#!/bin/bash
{options}

# Processes that lose another one end by themselves and say why.
srun --kill-on-bad-exit=0 --wait=0 --gpu-bind=none --cpus-per-task={cpus} {command}
code=$?

# A fault of the machines: again, at most {restarts} times. Faults are counted in a file, which outlives a requeue.
faults={name}-$SLURM_JOB_ID.faults
if [ "$code" -ge {infrastructure} ]; then
  echo "$code" >> "$faults" || exit "$code"
  again=$(($(wc -l < "$faults") <= {restarts}))
else # Preempted and saved: again, however often. After all other codes somebody should look.
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


def make_script(job: Job, nodes: int, gpus: int, cpus: int, time: str, extra: list[str]) -> str:
    """Returns the batch script of a run.

    Args:
        job: the run.
        nodes: the number of machines.
        gpus: the number of GPUs, and of processes, on each machine.
        cpus: the number of CPU cores for each process.
        time: the time after which Slurm ends the job, in Slurm's notation.
        extra: other options of sbatch, without their dashes, such as partition=gpu.
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
        f"signal=TERM@{NOTICE_SECONDS}",
        "requeue",
        "dependency=singleton",  # one job of this name at a time
        *extra,
    ]
    return SCRIPT.format(
        name=job.name,
        options="\n".join(f"#SBATCH --{option}" for option in options),
        cpus=cpus,
        command=shell_line(job.command),
        infrastructure=INFRASTRUCTURE,
        preempted=PREEMPTED,
        restarts=job.restarts,
    )


def check_time(text: str) -> None:
    """Raises UserError if a text is not a time of Slurm, such as 24:00:00. A plain number is a time in minutes."""
    if re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", text):
        return
    match = re.fullmatch(r"(\d+) ?([dhm])[a-z]*", text)
    near = match and {"d": "{}-00:00:00", "h": "{}:00:00", "m": "00:{}:00"}[match[2]].format(match[1])
    hint = f"did you mean --time={near}?" if near else "write hours:minutes:seconds, or days-hours:minutes:seconds."
    raise UserError(f"--time={printable(text)} is not a time of Slurm; {hint}")


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `make_job` and the checks; or a number or an option is invalid, or Slurm rejects the script.
    """
    options, command = split_command_line(argv)
    flags = make_parser("slurm", __doc__)
    flags.add_argument("--nodes", type=int, default=1, help="number of machines [1]")
    flags.add_argument("--gpus", type=int, required=True, help="GPUs of each machine")
    flags.add_argument("--cpus", type=int, default=8, help="cores for each GPU's process [8]")
    flags.add_argument("--time", default="24:00:00", help="after which the run is started again [24:00:00]")
    flags.add_argument("--option", action="append", default=[], help="of sbatch, for example partition=gpu; repeatable")
    add_job_arguments(flags)
    args = flags.parse_args(options)
    job = make_job(args, command)
    check_time(args.time)
    check_module(job)
    check_output(job, shared_disk=True, allowed=args.allow_local_output)
    if min(args.nodes, args.gpus, args.cpus) < 1 or args.nodes % job.slices:
        raise UserError("--nodes, --gpus and --cpus must be at least 1, and --nodes a multiple of --slices.")
    check_config(read_inputs(job), devices=args.nodes * args.gpus)
    for option in (f"time={args.time}", *args.option):
        if not re.fullmatch(r"[a-z][a-z-]*(=\S+)?", option):
            raise UserError(
                f"cannot pass {option!r} to sbatch; write its options without dashes, like --option=partition=gpu."
            )
    text = make_script(job, args.nodes, args.gpus, args.cpus, args.time, args.option)
    if args.dry_run:
        print(text, end="")
        return
    if run_command(["sbatch"], input=text).returncode:
        raise UserError("Slurm rejected the script; see the output above.")
    print(f"follow: tail --follow=name --retry {job.name}-*.log")
    print(f"end it: scancel --name={job.name}")


if __name__ == "__main__":
    cli.run_command(main)
