"""Runs a command on machines that gcloud controls until it has ended: what the launchers of TPU machines share."""

import argparse
import dataclasses
import signal
import time
from collections.abc import Callable, Mapping

from launch.checks import check_cloud_job, check_files_in_git
from launch.clouds import check_zone
from launch.job import (
    PREEMPTED,
    Job,
    add_job_arguments,
    combined_exit_code,
    make_job,
    make_parser,
    shell_line,
    should_restart,
    split_command_line,
)
from launch.machines import MAX_ATTEMPTS, POLL_SECONDS, Machines, log, log_retry
from launch.worker_commands import command_id
from vit_jax import UserError, cli
from vit_jax.planning import parse_topology
from vit_jax.planning.chips import Slice

MAX_PAUSE_SECONDS = 600.0  # the longest pause between two starts of the command
STABLE_SECONDS = 3600.0  # seconds that a run must last for its faults to be counted anew
LOST = 134  # the exit code of a run whose machines are lost, the same as for a lost host


class Launcher:
    """Runs a command on machines, with restarts, until it ends with an exit code that is not restarted."""

    def __init__(
        self,
        job: Job,
        machines: Machines,
        sleep: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts nothing yet.

        Args:
            job: the run.
            machines: the machines of the run.
            sleep: waits for a number of seconds.
            clock: returns seconds.
        """
        self._job, self._machines, self._sleep, self._clock = job, machines, sleep, clock

    def run(self) -> int:
        """Runs the command and returns its last exit code.

        The command is restarted after every preemption, and after at most `Job.restarts` faults in a row. Faults are
        counted anew after a run of more than `STABLE_SECONDS`.

        Raises:
            UserError: the cloud refuses a request, the machines were deleted, another command runs on them, or the code
                cannot be packed or installed.
        """
        pause, restart = POLL_SECONDS, 0
        while True:
            code, seconds = self._run_once()
            if not should_restart(code):
                return code
            if seconds > STABLE_SECONDS:  # this fault is unrelated to the previous ones
                pause, restart = POLL_SECONDS, 0
            state = self._machines.state()
            if state is None:
                raise UserError(
                    f"the machines of {self._job.name} were deleted; run the same command again to request new ones."
                )
            if code == PREEMPTED or state != "ACTIVE":  # a preemption is not counted as a fault
                log(f"ended with {code}, preempted; again in {POLL_SECONDS:g} s")
                self._sleep(POLL_SECONDS)
                continue
            restart += 1
            if restart > self._job.restarts:
                return code
            log(f"ended with {code}; again in {pause:g} s, restart {restart} of at most {self._job.restarts}")
            self._sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _run_once(self) -> tuple[int, float]:
        """Starts the command, unless it is running already, and follows it to its end.

        Returns:
            The exit code, and for how many seconds the command was followed.
        """
        machines = self._machines
        machines.wait_until_active()
        answers = machines.wait_for_statuses()
        running = {answer for answer in answers if answer.startswith("running")}
        if running - {f"running {command_id(self._job)}"}:
            raise UserError(f"another command is running on {self._job.name}; wait for it, or delete its machines.")
        if not running:
            for ended in sorted({answer for answer in answers if answer.startswith("ended")}):
                log(f"the previous run {ended.replace('ended', 'ended with')}")
            if len(answers) < machines.workers or not machines.start_command():
                log("some workers cannot be reached")
                return LOST, 0.0
        began = self._clock()
        return self._wait_for_end(), self._clock() - began

    def _wait_for_end(self) -> int:
        """Follows a run to its end, and returns its exit code."""
        machines, attempts, followed = self._machines, 0, False
        while attempts < MAX_ATTEMPTS:
            followed = followed or machines.follow()
            answers = machines.statuses()
            running = any(answer.startswith("running") for answer in answers)
            if len(answers) == machines.workers and not running:
                codes = [answer.partition("ended ")[2] for answer in answers]
                return combined_exit_code([int(code) if code else LOST for code in codes])
            if len(answers) < machines.workers and machines.state() != "ACTIVE":
                break
            attempts = 0 if running else attempts + 1
            if attempts:
                log_retry(f"{len(answers)} of {machines.workers} workers answer", MAX_ATTEMPTS - attempts + 1)
            self._sleep(POLL_SECONDS)
        log("the machines are lost")
        return LOST


@dataclasses.dataclass(frozen=True)
class Cloud:
    """A cloud on whose machines a command can be run.

    Attributes:
        parser: of the command line, with the verbs `run` and `delete`; see `make_parsers`.
        notes: name of a step -> its explanation, in the order in which the steps are taken.
        make_machines: makes the machines of a run from the run, the shape of its slices, the options and a function
            that waits for a number of seconds.
        delete_command: returns the command that deletes the machines of a run with these options.
    """

    parser: argparse.ArgumentParser
    notes: Mapping[str, str]
    make_machines: Callable[[Job, Slice, argparse.Namespace, Callable[[float], None]], Machines]
    delete_command: Callable[[argparse.Namespace], list[str]]


def make_parsers(
    name: str, doc: str | None
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser, argparse.ArgumentParser]:
    """Returns the parser of the launcher `launch.<name>` with `doc` as its help, and those of `run` and `delete`."""
    top = make_parser(name, doc)
    verbs = top.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser(
        "run", help="run a command, or follow it if it is running", description=doc, formatter_class=top.formatter_class
    )
    delete = verbs.add_parser("delete", help="delete the machines, whatever runs on them")
    add_job_arguments(run)
    delete.add_argument("name", help="of the run")
    delete.add_argument("--dry-run", action="store_true", help="print what would be done")
    for verb in (run, delete):
        verb.add_argument("--zone", required=True, help="of the cloud, for example us-west4-a")
        verb.add_argument("--project", help="of the cloud [the one that gcloud is set to]")
    run.add_argument("--topology", required=True, metavar="SLICE", help="each slice, for example v6e:16x16")
    run.add_argument("--spot", action="store_true", help="use cheaper machines, which may be taken away at any time")
    run.add_argument("--runtime", metavar="VERSION", help="software of the machines [that of their chips]")
    run.add_argument("--keep", action="store_true", help="leave the machines when the run has ended; they cost")
    # What `delete` does not ask for. The shape of the slices does not matter for deletion.
    delete.set_defaults(topology="v6e:1x1", slices=1, spot=False, runtime=None)
    return top, run, delete


def run_command_line(cloud: Cloud, argv: list[str], sleep: Callable[[float], None]) -> None:
    """Runs the command line of a cloud's launcher.

    Raises:
        UserError: see `make_job`, `parse_topology`, the checks and `Launcher.run`.
    """
    options, command = split_command_line(argv)
    args = cloud.parser.parse_args(options)
    check_zone(args.zone)
    if args.verb == "run":
        launch(cloud, args, command, sleep)
        return
    machines = cloud.make_machines(Job(args.name, (), args.slices, 0), parse_topology(args.topology), args, sleep)
    if args.dry_run:
        print_steps(machines, {"delete": cloud.notes["delete"]})
    else:
        machines.delete()


def launch(cloud: Cloud, args: argparse.Namespace, command: list[str], sleep: Callable[[float], None]) -> None:
    """Carries out `run`: runs a command and ends this process with its exit code. With --dry-run it only prints."""
    job, tpu = make_job(args, command), parse_topology(args.topology)
    inputs = check_cloud_job(job, tpu.devices * job.slices, args.allow_local_output)
    check_files_in_git(inputs)
    machines = cloud.make_machines(job, tpu, args, sleep)
    if args.dry_run:
        return print_steps(machines, {k: note for k, note in cloud.notes.items() if k != "delete" or not args.keep})
    deleted = False
    signal.signal(signal.SIGHUP, cli.terminate)
    try:
        code = Launcher(job, machines, sleep).run()
        log(f"{job.name} has ended with {code}")
        if not (code or args.keep):
            machines.delete()
            deleted = True
    finally:
        if machines.may_cost and not deleted:
            clean_up = shell_line(cloud.delete_command(args))
            log(f"the machines and what runs on them stay; they cost until: {clean_up}")
    raise SystemExit(code)


def print_steps(machines: Machines, notes: Mapping[str, str]) -> None:
    """Prints the commands of steps for a shell.

    Args:
        machines: the machines that the commands concern.
        notes: name of a step -> its explanation, of the steps to print.
    """
    for step, note in notes.items():
        lines = "\n".join(shell_line(argv) for argv in machines.commands(step))
        print(f"# {step}: {note}\n{lines}")
