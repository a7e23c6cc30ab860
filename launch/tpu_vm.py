"""Runs a command on all workers of a Cloud TPU slice, or of several, and on new ones when they are taken away.

Examples:
  python -m launch.tpu_vm run l16 --topology=v5e:16x16 --zone=us-west4-a --spot -- python -m vit_jax.main \\
      --config=configs/vit_l16_jft.py --config.data.source=array_record:gs://my-bucket/jft --workdir=gs://my-bucket/l16
  python -m launch.tpu_vm delete l16 --zone=us-west4-a

In the folder of the code: asks for the machines (a queued resource), waits for them, copies the files that git knows,
installs them, starts the command and follows what the first worker prints. The command does not need this process: the
same line, given again, finds what exists and follows it. It ends with the command's exit code, and
  0       deletes the machines (--keep leaves them);
  1, 2    and their like leave them, so that somebody can look: they cost until `delete`;
  42, and 128 or more, or lost machines: goes on with the same command, on new machines if need be; after preemptions,
          42 and machines that the cloud has taken away, however often, after faults --restarts times in a row.
"""

import argparse
import hashlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from launch import clouds
from launch.job import (
    PREEMPTED,
    Job,
    add_arguments,
    again,
    call,
    check_config,
    check_known,
    check_output,
    line,
    make,
    parser,
    split,
    verdict,
)
from vit_jax import UserError, cli, planning

POLL = 30.0  # seconds between two looks at something that takes minutes
LONGEST = 600.0  # seconds between two starts of the command, at most
LONG = 3600.0  # seconds of a run after which faults are counted anew
PATIENCE = 10  # looks in vain at a run before its machines count as lost
LOST = 134  # the exit code of a run whose machines are lost, as if a host had been
GONE = ("FAILED", "SUSPENDED")  # states of a queued resource from which none comes back
ANSWER = re.compile(r"^worker \S+: (.*)$", re.M)

# What the steps are for, in the order in which they are taken.
WHY = {
    "describe": "until it says ACTIVE; what is FAILED or SUSPENDED is deleted and asked for again",
    "create": "if there is nothing of that name",
    "status": "where the command is running already, it is only followed",
    "pack": "what git knows, as it is here",
    "copy": "to all workers",
    "install": "on all workers",
    "start": "on all workers, in no session: it outlives the connection",
    "follow": "the first worker; then status again, and from the top after 42, 128 or more, or lost machines",
    "delete": "after 0; until then the machines cost",
}


def plan(
    job: Job, tpu: planning.Slice, zone: str, project: str | None = None, spot: bool = False, runtime: str | None = None
) -> dict[str, list[str]]:
    """Returns the commands that a run on Cloud TPU takes, by the names of their steps.

    Args:
        job: what to run.
        tpu: each of its slices.
        zone: of the cloud, where they are.
        project: of the cloud; None is what gcloud is set to.
        spot: on machines that may be taken away at any time, and cost less.
        runtime: version of their software; None is the usual one.
    """
    nodes = [f"--node-count={job.slices}", f"--node-prefix={job.name}"] if job.slices > 1 else [f"--node-id={job.name}"]
    archive, files = f"{job.name}.tgz", f"workdirs/{job.name}.files"
    worker = f"bash {job.name}/code/launch/worker.sh"
    unpack = (
        f"rm -rf {job.name}/code && mkdir -p {job.name}/code && tar -xzf {archive} -C {job.name}/code && rm {archive}"
    )
    where = [f"--zone={zone}", *([f"--project={project}"] if project else [])]
    every = ["--node=all", "--worker=all", "--batch-size=all"]
    alive = ["--ssh-flag=-oConnectTimeout=20", "--ssh-flag=-oServerAliveInterval=20"]  # or a lost host is waited for

    def gcloud(verb: str, *words: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "queued-resources", verb, *words, *where, "--quiet"]

    return {
        "describe": gcloud("describe", job.name, "--format=value(state.state)"),
        "create": gcloud(
            "create",
            job.name,
            *nodes,
            *clouds.accelerator(tpu),
            f"--runtime-version={runtime or clouds.CLOUDS[tpu.kind].runtime}",
            *(["--spot"] if spot else []),
        ),
        "status": gcloud("ssh", job.name, *every, *alive, f"--command={worker} status || echo worker here: new"),
        "pack": [
            "sh",
            "-c",
            f"mkdir -p workdirs && git ls-files -z > {files} && tar -czf workdirs/{archive} --null -T {files}",
        ],
        "copy": gcloud("scp", f"workdirs/{archive}", f"{job.name}:{archive}", *every),
        "install": gcloud("ssh", job.name, *every, *alive, f"--command={unpack} || exit 255; {worker} install"),
        "start": gcloud("ssh", job.name, *every, *alive, f"--command={worker} start {mark(job)} {line(job.command)}"),
        "follow": gcloud("ssh", job.name, "--node=0", "--worker=0", *alive, f"--command={worker} follow"),
        "delete": gcloud("delete", job.name, "--force"),
    }


def mark(job: Job) -> str:
    """Returns what tells this command from others."""
    return hashlib.sha256(line(job.command).encode()).hexdigest()[:8]


class Launcher:
    """Takes the steps of a plan.

    Attributes:
        costs: whether there may be machines, as far as is known.
    """

    def __init__(self, job: Job, steps: dict[str, list[str]], workers: int, sleep: Callable[[float], None]):
        """Takes none yet.

        Args:
            job: what to run.
            steps: see `plan`.
            workers: how many machines there are, of all slices.
            sleep: waits for seconds.
        """
        self._job, self._steps, self._workers, self._sleep = job, steps, workers, sleep
        self.costs = self._packed = False

    def run(self) -> int:
        """Runs the command until it ends for good, and returns its exit code.

        Raises:
            UserError: the cloud refuses; another command runs on the machines; the code cannot be installed.
        """
        pause, restart = POLL, 0
        while True:
            code, seconds = self._once()
            if not again(code):
                return code
            if seconds > LONG:  # it was no failure to begin
                pause, restart = POLL, 0
            state = self._state()
            if state is None:
                raise UserError(f"the machines of {self._job.name} were deleted; the same command asks for new ones.")
            if code == PREEMPTED or state != "ACTIVE":  # no fault: it is not counted
                tell(f"ended with {code}, preempted; again in {POLL:g} s")
                self._sleep(POLL)
                continue
            restart += 1
            if restart > self._job.restarts:
                return code
            tell(f"ended with {code}; again in {pause:g} s, restart {restart} of at most {self._job.restarts}")
            self._sleep(pause)
            pause = min(2 * pause, LONGEST)

    def delete(self) -> None:
        """Deletes the machines, if there are any.

        Raises:
            UserError: the cloud refuses.
        """
        if self._state() is not None:
            self._demand("delete")
        tell(f"nothing is named {self._job.name} any more")

    def _once(self) -> tuple[int, float]:
        """Runs the command, or finds it running; returns its exit code, and for how many seconds it was followed."""
        self._machines()
        answers = self._reach()
        running = {answer for answer in answers if answer.startswith("running")}
        if running - {f"running {mark(self._job)}"}:
            raise UserError(f"another command is running on {self._job.name}; wait for it, or delete its machines.")
        if not running:
            for ended in sorted({answer for answer in answers if answer.startswith("ended")}):
                tell(f"what ran there before has {ended}")
            if len(answers) < self._workers or not all(map(self._take, ("pack", "copy", "install", "start"))):
                tell("not all workers can be reached")
                return LOST, 0.0
        began = time.monotonic()
        return self._watch(), time.monotonic() - began

    def _machines(self) -> None:
        """Waits for machines, of its own making or not."""
        last, made = "", False
        while (state := self._state()) != "ACTIVE":
            if state is None:
                self.costs = True  # soon, even if nobody hears of it
                try:
                    self._demand("create")
                except UserError:
                    found = call(self._steps["describe"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                    self.costs = "NOT_FOUND" not in found.stderr
                    raise
                made = True
            elif state == "FAILED" and made:
                words = [word for word in self._steps["describe"] if not word.startswith(("--format", "--quiet"))]
                raise UserError(f"the cloud cannot give the machines; why: {line(words)}.")
            elif state in GONE:
                self._demand("delete")
            if (state or "asked for") != last:
                last = state or "asked for"
                tell(f"{self._job.name} is {last}")
            self._sleep(POLL)

    def _reach(self) -> list[str]:
        """Returns what all workers say of themselves; of new machines the last are ready minutes after the first."""
        for _ in range(PATIENCE):
            answers = self._ask()
            if len(answers) == self._workers:
                break
            self._sleep(POLL)
        return answers

    def _watch(self) -> int:
        """Follows a run to its end, and returns its exit code."""
        vain, followed = 0, False
        while vain < PATIENCE:
            if not followed:  # 0: the first worker's run has ended; else the connection has
                followed = call(self._steps["follow"], stderr=subprocess.DEVNULL).returncode == 0
            answers = self._ask()
            running = any(answer.startswith("running") for answer in answers)
            if len(answers) == self._workers and not running:
                ends = [answer.partition("ended ")[2] for answer in answers]
                return verdict([int(code) if code else LOST for code in ends])
            if len(answers) < self._workers and self._state() != "ACTIVE":
                break
            vain = 0 if running else vain + 1
            self._sleep(POLL)
        tell("machines are lost")
        return LOST

    def _state(self) -> str | None:
        """Returns the state of the machines together, or None if there are none."""
        for _ in range(PATIENCE):
            found = call(self._steps["describe"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            if not found.returncode:
                self.costs = True
                return found.stdout.strip()
            if "NOT_FOUND" in found.stderr:
                return None
            self._sleep(POLL)
        raise UserError(f"gcloud cannot tell of {self._job.name}: {last_line(found.stderr)}")

    def _ask(self) -> list[str]:
        """Returns what those workers that can be reached say of themselves."""
        return ANSWER.findall(call(self._steps["status"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)

    def _demand(self, step: str) -> None:
        """Takes a step that only the cloud may refuse."""
        done = call(self._steps[step], stdout=sys.stderr, stderr=subprocess.PIPE)
        if done.returncode and not re.search("ALREADY_EXISTS|NOT_FOUND", done.stderr):
            raise UserError(f"the cloud refuses to {step} {self._job.name}: {last_line(done.stderr)}")

    def _take(self, step: str) -> bool:
        """Takes a step on all workers, and returns False if some did not get it."""
        if step == "pack" and self._packed:  # what was edited meanwhile is not for this run
            return True
        tell(step)
        done = call(self._steps[step], stdout=subprocess.PIPE)
        if said := ANSWER.sub("", done.stdout).strip():
            print(said, file=sys.stderr)
        if step == "pack" and done.returncode:
            raise UserError("the code cannot be packed; is this its folder, and what does git status say is gone?")
        self._packed |= step == "pack"
        if step == "install" and done.returncode not in (0, 255):  # 255: a connection, or a copy that did not come
            raise UserError("the code cannot be installed on a worker, which has said why above.")
        return not done.returncode and (step in ("pack", "copy") or len(ANSWER.findall(done.stdout)) == self._workers)


def tell(text: str) -> None:
    """Says what happens."""
    print(f"launch: {text}", file=sys.stderr, flush=True)


def last_line(text: str) -> str:
    """Returns the last words of a program."""
    return ([row.strip() for row in text.splitlines() if row.strip()] or ["it does not say why"])[-1]


def show(steps: dict[str, list[str]]) -> None:
    """Prints commands as one would paste them, each under its step."""
    for step, argv in steps.items():
        print(f"# {step}: {WHY[step]}\n{line(argv)}")


def main(argv: list[str], sleep: Callable[[float], None] = time.sleep) -> None:
    """Runs the command line.

    Raises:
        UserError: see `job.make`, `chips.parse_topology` and `Launcher.run`.
    """
    options, command = split(argv)
    top = parser("tpu_vm", __doc__)
    verbs = top.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser(
        "run",
        help="run a command, or follow the one that runs",
        description=__doc__,
        formatter_class=top.formatter_class,
    )
    delete = verbs.add_parser("delete", help="delete the machines, whatever runs on them")
    add_arguments(run)
    delete.add_argument("name", help="of the run")
    delete.add_argument("--dry-run", action="store_true", help="print what would be done")
    for verb in (run, delete):
        verb.add_argument("--zone", required=True, help="of the cloud, us-west4-a for example")
        verb.add_argument("--project", help="of the cloud [what gcloud is set to]")
    run.add_argument("--topology", required=True, metavar="SLICE", help="each slice, v5e:16x16 for example")
    run.add_argument("--spot", action="store_true", help="cheaper machines, which may be taken away at any time")
    run.add_argument("--runtime", metavar="VERSION", help="software of the machines [by their chips]")
    run.add_argument("--keep", action="store_true", help="leave the machines when the run is done; they cost")
    args = top.parse_args(options)
    begin(args, command, sleep) if args.verb == "run" else end(args, sleep)


def begin(args: argparse.Namespace, command: list[str], sleep: Callable[[float], None]) -> None:
    """Runs a command, and ends this process as it has ended."""
    job, tpu = make(args, command), planning.parse_topology(args.topology)
    check_output(job, shared=False, allowed=args.allow_local_output)
    check_config(job, shared=False, devices=tpu.chips * job.slices)
    check_known(job)
    steps = plan(job, tpu, args.zone, args.project, args.spot, args.runtime)
    if args.dry_run:
        return show({step: argv for step, argv in steps.items() if step != "delete" or not args.keep})
    launcher = Launcher(job, steps, clouds.hosts(tpu) * job.slices, sleep)
    clean_up = f"they cost until: python -m launch.tpu_vm delete {job.name} --zone={args.zone}"
    clean_up += f" --project={args.project}" if args.project else ""
    done = False
    signal.signal(signal.SIGHUP, cli.terminate)
    try:
        code = launcher.run()
        tell(f"{job.name} has ended with {code}")
        if not (code or args.keep):
            launcher.delete()
            done = True
    finally:
        if launcher.costs and not done:
            tell(f"the machines stay, with what runs on them; {clean_up}")
    raise SystemExit(code)


def end(args: argparse.Namespace, sleep: Callable[[float], None]) -> None:
    """Deletes the machines of a run."""
    job = Job(args.name, (), 1, 0)
    steps = plan(job, planning.parse_topology("v5e:1x1"), args.zone, args.project)  # whatever they are
    if args.dry_run:
        return show({"delete": steps["delete"]})
    Launcher(job, steps, 1, sleep).delete()


if __name__ == "__main__":
    cli.run(main)
