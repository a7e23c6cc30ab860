"""The machines of a run on Cloud TPU: a queued resource, which is controlled by gcloud."""

import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Callable

from launch import clouds
from launch.job import Job, run_command, shell_line
from vit_jax import UserError
from vit_jax.planning.chips import Slice

POLL_SECONDS = 30.0  # seconds between two queries of something that takes minutes
MAX_ATTEMPTS = 10  # failed queries in a row after which machines count as lost, or the cloud as unreachable
UNREACHABLE = 255  # ssh's exit code if the connection failed
DEAD_STATES = ("FAILED", "SUSPENDED")  # states in which a queued resource never becomes ACTIVE again
# What gcloud prints for an error that lasts -> what the user is told, with {name} of the run and {error} of gcloud.
LASTING_ERRORS = {
    r"(property|attribute) \[project\]": "gcloud has no project. Set one: gcloud config set project PROJECT.",
    r"active account|Reauthentication|invalid_grant|UNAUTHENTICATED": (
        "gcloud is not logged in. Log in: gcloud auth login."
    ),
    r"PERMISSION_DENIED|not have permission|SERVICE_DISABLED": (
        "gcloud may not describe {name}: {error}; see gcloud auth list, gcloud config get project and --project."
    ),
}
WORKER_ANSWER = re.compile(r"^worker \S+: (.*)$", re.M)

Steps = dict[str, list[str]]  # name of a step -> command

# Name of a step -> its explanation, in the order in which the steps are taken.
STEP_NOTES = {
    "describe": "repeated until it says ACTIVE; what is FAILED or SUSPENDED is deleted and requested again",
    "create": "if nothing has that name",
    "status": "if the command is already running, it is only followed",
    "pack": "the files that git tracks, as they are here",
    "copy": "to all workers",
    "install": "on all workers",
    "start": "on all workers, without a session, so that it outlives the connection",
    "follow": "the first worker; then status again, and from the top after 42, 128 or more, or lost machines",
    "delete": "after 0; until then the machines cost",
}


def make_steps(
    job: Job, tpu: Slice, zone: str, project: str | None = None, spot: bool = False, runtime: str | None = None
) -> Steps:
    """Returns name of a step -> its command, for a run on Cloud TPU.

    Args:
        job: the run.
        tpu: the shape of each of its slices.
        zone: the zone of the cloud, such as us-west4-a.
        project: the project of the cloud; None: the one that gcloud is set to.
        spot: whether to use cheaper machines, which may be taken away at any time.
        runtime: the version of the machines' software; None: the usual version of the chip.
    """
    nodes = [f"--node-count={job.slices}", f"--node-prefix={job.name}"] if job.slices > 1 else [f"--node-id={job.name}"]
    archive, files = f"{job.name}.tgz", f"workdirs/{job.name}.files"
    code = f"{job.name}/code"
    worker = f"bash {code}/launch/worker.sh"
    unpack = f"rm -rf {code} && mkdir -p {code} && tar -xzf {archive} -C {code} && rm {archive}"
    where = [f"--zone={zone}", *([f"--project={project}"] if project else [])]
    every = ["--node=all", "--worker=all", "--batch-size=all"]
    # Without these options ssh would wait for a lost host for ever.
    alive = ["--ssh-flag=-oConnectTimeout=20", "--ssh-flag=-oServerAliveInterval=20"]

    def gcloud(verb: str, *words: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "queued-resources", verb, *words, *where, "--quiet"]

    def on_all(command: str) -> list[str]:
        return gcloud("ssh", job.name, *every, *alive, f"--command={command}")

    return {
        "describe": gcloud("describe", job.name, "--format=value(state.state)"),
        "create": gcloud(
            "create",
            job.name,
            *nodes,
            *clouds.accelerator_flags(tpu),
            f"--runtime-version={runtime or clouds.CHIP_NAMES[tpu.kind].runtime}",
            *(["--spot"] if spot else []),
        ),
        "status": on_all(f"{worker} status || echo worker here: new"),
        "pack": [
            "sh",
            "-c",
            f"mkdir -p workdirs && git ls-files -z > {files} && tar -czf workdirs/{archive} --null -T {files}",
        ],
        "copy": gcloud("scp", f"workdirs/{archive}", f"{job.name}:{archive}", *every),
        "install": on_all(f"{unpack} || exit {UNREACHABLE}; {worker} install"),
        "start": on_all(f"{worker} start {command_id(job)} {shell_line(job.command)}"),
        "follow": gcloud("ssh", job.name, "--node=0", "--worker=0", *alive, f"--command={worker} follow"),
        "delete": gcloud("delete", job.name, "--force"),
    }


def command_id(job: Job) -> str:
    """Returns a digest of the run's command, by which the workers recognise it."""
    return hashlib.sha256(shell_line(job.command).encode()).hexdigest()[:8]


class QueuedResource:
    """The machines of a run, which may or may not exist.

    Attributes:
        name: the name of the run and of its machines.
        workers: the number of machines of all slices.
        may_cost: whether the machines may exist, as far as is known, and so cost money.
    """

    def __init__(self, name: str, steps: Steps, workers: int, sleep: Callable[[float], None]):
        """Creates nothing yet.

        Args:
            name: the name of the run.
            steps: the commands of `make_steps`.
            workers: the number of machines of all slices.
            sleep: waits for a number of seconds.
        """
        self.name, self.workers = name, workers
        self.may_cost = self._packed = False
        self._steps, self._sleep = steps, sleep

    def state(self) -> str | None:
        """Returns the state of the queued resource, such as ACTIVE, or None if it does not exist.

        Raises:
            UserError: gcloud fails for a reason that lasts, or `MAX_ATTEMPTS` times in a row.
        """
        for pauses in reversed(range(MAX_ATTEMPTS)):
            described = run_command(self._steps["describe"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            if not described.returncode:
                self.may_cost = True
                return described.stdout.strip()
            if "NOT_FOUND" in described.stderr:
                return None
            error = error_line(described.stderr)
            for pattern, sentence in LASTING_ERRORS.items():
                if re.search(pattern, described.stderr):
                    raise UserError(sentence.format(name=self.name, error=error.rstrip(".")))
            if pauses:
                log_retry(f"gcloud cannot describe {self.name}: {error}", pauses)
                self._sleep(POLL_SECONDS)
        raise UserError(f"gcloud cannot describe {self.name}: {error}")

    def wait_until_active(self) -> None:
        """Waits until the machines are ACTIVE. Creates them if there are none, or if the old ones are dead.

        Raises:
            UserError: the cloud refuses the request or cannot provide the machines.
        """
        last, created = "", False
        while (state := self.state()) != "ACTIVE":
            if state is None:
                self._create()
                created = True
            elif state == "FAILED" and created:
                words = [word for word in self._steps["describe"] if not word.startswith(("--format", "--quiet"))]
                raise UserError(f"the cloud cannot provide the machines; to see why: {shell_line(words)}.")
            elif state in DEAD_STATES:
                self._request("delete")
            if (state or "requested") != last:
                last = state or "requested"
                log(f"{self.name} is {last}")
            self._sleep(POLL_SECONDS)

    def delete(self) -> None:
        """Deletes the machines, if there are any.

        Raises:
            UserError: the cloud refuses the request.
        """
        if self.state() is not None:
            self._request("delete")
        log(f"{self.name} is deleted")

    def statuses(self) -> list[str]:
        """Returns the answers of the workers that can be reached: `new`, `running ID`, `ended CODE` or `lost`."""
        asked = run_command(self._steps["status"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return WORKER_ANSWER.findall(asked.stdout)

    def wait_for_statuses(self) -> list[str]:
        """Waits until all workers can be reached, and returns their answers; see `statuses`.

        New machines become reachable at different times, minutes apart. After `MAX_ATTEMPTS` queries the answers of the
        workers that can be reached are returned.
        """
        for pauses in range(MAX_ATTEMPTS, 0, -1):
            answers = self.statuses()
            if len(answers) == self.workers:
                break
            log_retry(f"{len(answers)} of {self.workers} workers answer", pauses)
            self._sleep(POLL_SECONDS)
        return answers

    def start_command(self) -> bool:
        """Copies the code to all workers, installs it and starts the command.

        Returns:
            Whether all workers were reached.

        Raises:
            UserError: the code cannot be packed or installed.
        """
        return self._pack() and all(map(self._take_on_workers, ("copy", "install", "start")))

    def follow(self) -> bool:
        """Prints what the first worker prints, until its run or the connection ends; returns whether the run ended."""
        return run_command(self._steps["follow"], stderr=subprocess.DEVNULL).returncode == 0

    def _create(self) -> None:
        self.may_cost = True  # even if the answer of the cloud does not arrive
        try:
            self._request("create")
        except UserError:
            described = run_command(self._steps["describe"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self.may_cost = "NOT_FOUND" not in described.stderr
            raise

    def _request(self, step: str) -> None:
        """Runs the command of a step in the cloud; raises UserError if the cloud refuses.

        Creating machines that exist already, or deleting machines that do not exist, is no error.
        """
        done = run_command(self._steps[step], stdout=sys.stderr, stderr=subprocess.PIPE)
        if done.returncode and not re.search("ALREADY_EXISTS|NOT_FOUND", done.stderr):
            raise UserError(f"the cloud rejected the request to {step} {self.name}: {error_line(done.stderr)}")

    def _pack(self) -> bool:
        if not self._packed:  # only once, as later edits of the code are not meant for this run
            log("pack")
            if run_command(self._steps["pack"], stdout=sys.stderr).returncode:
                raise UserError(
                    "cannot pack the code; start in the folder of the code, and run git status to find deleted files."
                )
            self._packed = True
        return True

    def _take_on_workers(self, step: str) -> bool:
        """Runs the command of a step on all workers, and returns whether all workers were reached."""
        log(step)
        done = run_command(self._steps[step], stdout=subprocess.PIPE)
        if output := WORKER_ANSWER.sub("", done.stdout).strip():
            print(output, file=sys.stderr)
        if step == "install" and done.returncode not in (0, UNREACHABLE):
            raise UserError("cannot install the code on a worker; see the output above.")
        return not done.returncode and (step == "copy" or len(WORKER_ANSWER.findall(done.stdout)) == self.workers)


def log(text: str) -> None:
    """Prints a message of the launcher to stderr."""
    print(f"launch: {text}", file=sys.stderr, flush=True)


def log_retry(failure: str, pauses: int) -> None:
    """Prints what has failed and when the last attempt will be made.

    Args:
        failure: what has failed.
        pauses: the number of pauses of `POLL_SECONDS` before the last attempt.
    """
    end = time.strftime("%H:%M", time.localtime(time.time() + pauses * POLL_SECONDS))
    log(f"{failure}; again in {POLL_SECONDS:g} s, giving up at about {end}")


def error_line(text: str) -> str:
    """Returns the last line of a program's output that starts with "ERROR:" or, if there is none, the last line."""
    rows = [row.strip() for row in text.splitlines() if row.strip()] or ["it does not say why"]
    return ([row for row in rows if row.startswith("ERROR:")] or rows)[-1]
