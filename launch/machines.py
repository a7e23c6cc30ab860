"""The machines of a run that gcloud controls: what queued resources and groups of instances have in common.

How machines are requested, described and reached is in `launch.queued_resource` and `launch.instance_groups`; what is
executed on them, in `launch.worker_commands`.
"""

import abc
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from launch.job import run_command, shell_line
from launch.worker_commands import UNREACHABLE
from vit_jax import UserError

POLL_SECONDS = 30.0  # seconds between two queries of something that takes minutes
MAX_ATTEMPTS = 10  # failed queries in a row after which machines count as lost, or the cloud as unreachable
MAX_CONNECTIONS = 32  # commands that run at the same time, each for one machine
# What gcloud prints for an error that lasts -> what the user is told, with {name} of the run and {error} of gcloud.
LASTING_ERRORS = {
    r"(property|attribute) \[project\]": "gcloud has no project. Set one: gcloud config set project PROJECT.",
    r"active account|Reauthentication|invalid_grant|UNAUTHENTICATED": (
        "gcloud is not logged in. Log in: gcloud auth login."
    ),
    r"PERMISSION_DENIED|not have permission|Required '\S+' permission|SERVICE_DISABLED": (
        "gcloud may not describe {name}: {error}; see gcloud auth list, gcloud config get project and --project."
    ),
}
# What gcloud prints for things that do not exist, and for those that exist already: the TPU API, Compute Engine's API.
MISSING = re.compile("NOT_FOUND|was not found")
EXISTING = re.compile("ALREADY_EXISTS|already exists")
TOO_OLD = re.compile("unrecognized arguments|Invalid choice")  # what gcloud prints for a flag or value that is newer
WORKER_ANSWER = re.compile(r"^worker \S+: (.*)$", re.M)
# Without these options ssh would wait for a lost host for ever.
SSH_FLAGS = ["--ssh-flag=-oConnectTimeout=20", "--ssh-flag=-oServerAliveInterval=20"]

Steps = dict[str, list[list[str]]]  # name of a step -> its commands

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


class Machines(abc.ABC):
    """The machines of a run, which may or may not exist.

    Attributes:
        name: the name of the run and of its machines.
        workers: the number of machines of all slices.
        may_cost: whether the machines may exist, as far as is known, and so cost money.
    """

    def __init__(self, name: str, workers: int, sleep: Callable[[float], None]):
        """Creates nothing yet.

        Args:
            name: the name of the run.
            workers: the number of machines of all slices.
            sleep: waits for a number of seconds.
        """
        self.name, self.workers = name, workers
        self.may_cost = self._packed = False
        self._requested = False  # since the machines were last ACTIVE
        self._sleep = sleep

    @abc.abstractmethod
    def commands(self, step: str) -> list[list[str]]:
        """Returns the commands of a step of `STEP_NOTES`. Those for several workers may run at the same time."""

    @abc.abstractmethod
    def read_state(self, described: list[str]) -> str:
        """Returns the state of the machines; they can be used if it is ACTIVE.

        Args:
            described: what the commands of "describe" print, of all that exists.
        """

    @abc.abstractmethod
    def is_dead(self, state: str) -> bool:
        """Returns whether machines in a state never become ACTIVE, and must be deleted and requested again."""

    def identify_workers(self) -> bool:
        """Finds out what the workers must know of each other, once they have the code; returns whether all answered."""
        return True

    def state(self) -> str | None:
        """Returns the state of the machines, such as ACTIVE, or None if they do not exist.

        Raises:
            UserError: gcloud fails for a reason that lasts, or `MAX_ATTEMPTS` times in a row.
        """
        for pauses in reversed(range(MAX_ATTEMPTS)):
            asked = self._describe()
            failed = [each.stderr for each in asked if each.returncode and not MISSING.search(each.stderr)]
            if not failed:
                described = [each.stdout for each in asked if not each.returncode]
                self.may_cost = self.may_cost or bool(described)
                return self.read_state(described) if described else None
            error = error_line(failed[0])
            for pattern, sentence in LASTING_ERRORS.items():
                if re.search(pattern, failed[0]):
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
        last = ""
        while (state := self.state()) != "ACTIVE":
            if state is None:
                self._create()
            elif state == "FAILED" and self._requested:
                [described] = self.commands("describe")
                words = [word for word in described if not word.startswith(("--format", "--quiet"))]
                raise UserError(f"the cloud cannot provide the machines; to see why: {shell_line(words)}.")
            elif self.is_dead(state):
                self._request("delete")
            if (state or "requested") != last:
                last = state or "requested"
                log(f"{self.name} is {last}")
            self._sleep(POLL_SECONDS)
        self._requested = False

    def delete(self) -> None:
        """Deletes the machines, and all that a cloud has for them, if there is anything.

        Raises:
            UserError: the cloud refuses the request.
        """
        self.state()  # a reason that lasts is told in a sentence
        self._request("delete")
        log(f"{self.name} is deleted")

    def statuses(self) -> list[str]:
        """Returns the answers of the workers that can be reached: `new`, `running ID`, `ended CODE` or `lost`."""
        asked = self._run_on_workers("status", stderr=subprocess.DEVNULL)
        return WORKER_ANSWER.findall("".join(each.stdout for each in asked))

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
        installed = self._pack() and self._take_on_workers("copy") and self._take_on_workers("install")
        return installed and self.identify_workers() and self._take_on_workers("start")

    def follow(self) -> bool:
        """Prints what the first worker prints, until its run or the connection ends; returns whether the run ended."""
        [argv] = self.commands("follow")
        return run_command(argv, stderr=subprocess.DEVNULL).returncode == 0

    def _describe(self) -> list["subprocess.CompletedProcess[str]"]:
        return [run_command(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for argv in self.commands("describe")]

    def _create(self) -> None:
        self.may_cost = self._requested = True  # even if the answer of the cloud does not arrive
        try:
            self._request("create")
        except UserError:
            self.may_cost = not all(MISSING.search(each.stderr) for each in self._describe())
            raise

    def _request(self, step: str) -> None:
        """Runs the commands of a step in the cloud, in order; raises UserError if the cloud refuses one.

        Creating what exists already, or deleting what does not exist, is no error.
        """
        for argv in self.commands(step):
            done = run_command(argv, stdout=sys.stderr, stderr=subprocess.PIPE)
            if TOO_OLD.search(done.stderr):
                raise UserError(f"gcloud is too old to {step} {self.name}; update it: gcloud components update.")
            if done.returncode and not (EXISTING.search(done.stderr) or MISSING.search(done.stderr)):
                raise UserError(f"the cloud rejected the request to {step} {self.name}: {error_line(done.stderr)}")

    def _pack(self) -> bool:
        if not self._packed:  # only once, as later edits of the code are not meant for this run
            log("pack")
            [argv] = self.commands("pack")
            if run_command(argv, stdout=sys.stderr).returncode:
                raise UserError(
                    "cannot pack the code; start in the folder of the code, and run git status to find deleted files."
                )
            self._packed = True
        return True

    def _take_on_workers(self, step: str) -> bool:
        """Runs the commands of a step on all workers, and returns whether all workers were reached."""
        log(step)
        done = self._run_on_workers(step)
        codes, printed = {each.returncode for each in done}, "".join(each.stdout for each in done)
        if output := WORKER_ANSWER.sub("", printed).strip():
            print(output, file=sys.stderr)
        if step == "install" and codes - {0, UNREACHABLE}:
            raise UserError("cannot install the code on a worker; see the output above.")
        return codes == {0} and (step == "copy" or len(WORKER_ANSWER.findall(printed)) == self.workers)

    def _run_on_workers(self, step: str, stderr: int | None = None) -> list["subprocess.CompletedProcess[str]"]:
        """Runs the commands of a step for workers, and returns their results in order."""

        def run(argv: list[str]) -> "subprocess.CompletedProcess[str]":
            return run_command(argv, stdout=subprocess.PIPE, stderr=stderr)

        first, *others = self.commands(step)
        done = [run(first)]  # alone: the first connection of all makes gcloud's key
        with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
            return done + list(pool.map(run, others))


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
    """Returns the error in the output of gcloud, as one line.

    It is the last line that starts with "ERROR:", with the items of the list below it, or else the last line.
    """
    rows = [row.strip() for row in text.splitlines() if row.strip()] or ["it does not say why"]
    starts = [index for index, row in enumerate(rows) if row.startswith("ERROR:")]
    if not starts:
        return rows[-1]
    items = rows[starts[-1] + 1 :] if rows[starts[-1]].endswith(":") else []
    return " ".join([rows[starts[-1]], *(item.removeprefix("- ") for item in items if item.startswith("- "))])
