"""The machines of a run on Cloud TPU: a queued resource.

Source of the flags: docs.cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources.
"""

from collections.abc import Callable

from launch import clouds
from launch.job import Job
from launch.machines import SSH_FLAGS, Machines, Steps
from launch.worker_commands import archive_name, pack_command, worker_commands
from vit_jax.planning.chips import Slice

DEAD_STATES = ("FAILED", "SUSPENDED")  # states in which a queued resource never becomes ACTIVE again


def make_steps(
    job: Job, tpu: Slice, zone: str, project: str | None = None, spot: bool = False, runtime: str | None = None
) -> Steps:
    """Returns name of a step -> its commands, for a run on Cloud TPU.

    Args:
        job: the run.
        tpu: the shape of each of its slices.
        zone: the zone of the cloud, such as us-west4-a.
        project: the project of the cloud; None: the one that gcloud is set to.
        spot: whether to use cheaper machines, which may be taken away at any time.
        runtime: the version of the machines' software; None: the usual version of the chip.
    """
    nodes = [f"--node-count={job.slices}", f"--node-prefix={job.name}"] if job.slices > 1 else [f"--node-id={job.name}"]
    archive, lines = archive_name(job), worker_commands(job)
    where = [f"--zone={zone}", *([f"--project={project}"] if project else [])]
    every = ["--node=all", "--worker=all", "--batch-size=all"]

    def gcloud(verb: str, *words: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "queued-resources", verb, *words, *where, "--quiet"]

    def on_all(step: str) -> list[str]:
        return gcloud("ssh", job.name, *every, *SSH_FLAGS, f"--command={lines[step]}")

    create = gcloud(
        "create",
        job.name,
        *nodes,
        *clouds.accelerator_flags(tpu),
        f"--runtime-version={runtime or clouds.CHIP_NAMES[tpu.kind].runtime}",
        *(["--spot"] if spot else []),
    )
    return {
        "describe": [gcloud("describe", job.name, "--format=value(state.state)")],
        "create": [create],
        "status": [on_all("status")],
        "pack": [pack_command(job)],
        "copy": [gcloud("scp", f"workdirs/{archive}", f"{job.name}:{archive}", *every)],
        "install": [on_all("install")],
        "start": [on_all("start")],
        "follow": [gcloud("ssh", job.name, "--node=0", "--worker=0", *SSH_FLAGS, f"--command={lines['follow']}")],
        "delete": [gcloud("delete", job.name, "--force")],
    }


class QueuedResource(Machines):
    """The machines of a run on Cloud TPU. One command of gcloud reaches all of them."""

    def __init__(self, name: str, steps: Steps, workers: int, sleep: Callable[[float], None]):
        """Creates nothing yet.

        Args:
            name: the name of the run.
            steps: the commands of `make_steps`.
            workers: the number of machines of all slices.
            sleep: waits for a number of seconds.
        """
        super().__init__(name, workers, sleep)
        self._steps = steps

    def commands(self, step: str) -> list[list[str]]:
        """Returns the commands of a step; see `Machines`."""
        return self._steps[step]

    def read_state(self, described: list[str]) -> str:
        """Returns the state of the queued resource, such as ACTIVE; see `Machines`."""
        return described[0].strip()

    def is_dead(self, state: str) -> bool:
        """Returns whether a queued resource in a state never becomes ACTIVE again."""
        return state in DEAD_STATES
