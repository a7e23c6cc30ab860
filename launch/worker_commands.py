"""What is executed on the machines of a run: its code is packed here and unpacked there, and worker.sh starts it."""

import hashlib

from launch.job import Job, shell_line

UNREACHABLE = 255  # ssh's exit code if the connection failed


def archive_name(job: Job) -> str:
    """Returns the name of the file that holds the code of a run: here in workdirs/, on a machine in the home folder."""
    return f"{job.name}.tgz"


def pack_command(job: Job) -> list[str]:
    """Returns the command that packs the files that git tracks, as they are here."""
    archive, files = archive_name(job), f"workdirs/{job.name}.files"
    return [
        "sh",
        "-c",
        f"mkdir -p workdirs && git ls-files -z > {files} && tar -czf workdirs/{archive} --null -T {files}",
    ]


def worker_commands(job: Job, variables: dict[str, str] | None = None) -> dict[str, str]:
    """Returns name of a step -> the line that a shell executes for it on a machine of the run.

    Args:
        job: the run.
        variables: the environment variables that the command gets on this machine.
    """
    code, archive = f"{job.name}/code", archive_name(job)
    worker = f"bash {code}/launch/worker.sh"
    unpack = f"rm -rf {code} && mkdir -p {code} && tar -xzf {archive} -C {code} && rm {archive}"
    given = [f"{name}={value}" for name, value in (variables or {}).items()]
    return {
        "status": f"{worker} status || echo worker here: new",
        "install": f"{unpack} || exit {UNREACHABLE}; {worker} install",
        "number": f"{worker} number",
        "start": f"{worker} start {command_id(job)} {shell_line([*(['env', *given] if given else []), *job.command])}",
        "follow": f"{worker} follow",
    }


def command_id(job: Job) -> str:
    """Returns a digest of the run's command, by which the workers recognise it."""
    return hashlib.sha256(shell_line(job.command).encode()).hexdigest()[:8]
