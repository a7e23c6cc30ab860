"""The machines of a run on Compute Engine: a managed instance group for each slice.

Source of the flags: docs.cloud.google.com/sdk/gcloud/reference/compute/ and the pages that are named beside them.
"""

import json
import subprocess
from collections.abc import Callable

from launch.clouds import CHIP_NAMES, machine_type, region_of, shape_text
from launch.job import Job
from launch.machines import (
    SSH_FLAGS,
    STEP_NOTES,
    WORKER_ANSWER,
    Machines,
    log,
)
from launch.worker_commands import archive_name, pack_command, worker_commands
from vit_jax.planning.chips import Slice

IMAGE_PROJECT = "ubuntu-os-accelerator-images"  # docs.cloud.google.com/tpu/docs/consume-reservation-compute
BOOT_DISK = "100GB"  # as TPU VMs have it; images of 10 GB would not hold Python's packages
SPOT = "--provisioning-model=SPOT"
# States of an instance that is taken away, or was (docs.cloud.google.com/compute/docs/instances/instance-lifecycle).
TAKEN_STATES = {"PENDING_STOP", "STOPPING", "STOPPED", "TERMINATED", "SUSPENDING", "SUSPENDED", "DEPROVISIONING"}
JAX_PORT = 8482  # that JAX itself uses on TPUs (jax/_src/clusters/cloud_tpu_cluster.py)
SLICES_PORT = 8080  # on which the first machine connects the slices
PLACEHOLDER = "xxxx"  # for the end of a machine's name, which the group chooses

# Name of a step -> its explanation, in the order in which the steps are taken.
NOTES = {
    "describe": "repeated until all are RUNNING; Spot machines that were taken away are deleted and requested again",
    "create": "if there is no such group; what an interrupted run has left is deleted first",
    **{step: STEP_NOTES[step] for step in ("status", "pack", "copy", "install")},
    "number": "on all workers: which of its slice each is",
    **{step: STEP_NOTES[step] for step in ("start", "follow", "delete")},
}


def capacity_flags(spot: bool, reservation: str | None, flex_start: str | None) -> list[str]:
    """Returns the flags of an instance template that say how machines are obtained.

    Args:
        spot: whether they may be taken away at any time.
        reservation: the name of the reservation to which they belong, or None.
        flex_start: for how long they are wanted at most, such as 7d, if they are requested when there is capacity.
    """
    if spot:  # docs.cloud.google.com/tpu/docs/spot-compute
        return [SPOT, "--instance-termination-action=STOP"]
    # docs.cloud.google.com/compute/docs/instance-groups/bulk-create-instances-in-mig
    if reservation:
        return [
            "--provisioning-model=RESERVATION_BOUND",
            "--reservation-affinity=specific",
            f"--reservation={reservation}",
            "--instance-termination-action=DELETE",
        ]
    if flex_start:
        return [
            "--provisioning-model=FLEX_START",
            f"--max-run-duration={flex_start}",
            "--instance-termination-action=DELETE",
        ]
    return []


class InstanceGroups(Machines):
    """The machines of a run on Compute Engine: a managed instance group, and so a TPU slice, for each slice.

    Attributes:
        name: the name of the run. Its template, its policy and, if it has one slice, its group have the same name.
    """

    def __init__(
        self,
        job: Job,
        tpu: Slice,
        zone: str,
        project: str | None,
        capacity: list[str],
        image: str | None,
        sleep: Callable[[float], None],
    ):
        """Creates nothing yet.

        Args:
            job: the run.
            tpu: the shape of each of its slices.
            zone: the zone of the cloud, such as us-central1-c.
            project: the project of the cloud; None: the one that gcloud is set to.
            capacity: the flags of `capacity_flags`.
            image: the family of the machines' image; None: the usual one of the chip.
            sleep: waits for a number of seconds.
        """
        super().__init__(job.name, tpu.hosts * job.slices, sleep)
        self._job, self._tpu, self._zone, self._project = job, tpu, zone, project
        self._capacity, self._image = capacity, image or CHIP_NAMES[tpu.kind].image
        names = [job.name] if job.slices == 1 else [f"{job.name}-slice-{number}" for number in range(job.slices)]
        self._groups = names
        self._slices = [[f"{name}-{PLACEHOLDER}"] for name in names]  # the names of the machines of each slice
        self._numbered = False  # whether the machines of each slice are in their order

    def commands(self, step: str) -> list[list[str]]:
        """Returns the commands of a step of `NOTES`; see `Machines`."""
        zone = f"--zone={self._zone}"
        if step == "describe":
            return [self._group("list-instances", name, zone, "--format=json") for name in self._groups]
        if step == "create":
            return self._create_commands()
        if step == "pack":
            return [pack_command(self._job)]
        if step == "delete":
            return [
                *(self._group("delete", name, zone) for name in self._groups),
                self._gcloud("instance-templates", "delete", self.name, "--global"),
                self._gcloud("resource-policies", "delete", self.name, f"--region={region_of(self._zone)}"),
            ]
        workers = [
            (machine, number, number * self._tpu.hosts + index)
            for number, members in enumerate(self._slices)
            for index, machine in enumerate(members)
        ]
        if step == "copy":
            archive = archive_name(self._job)
            return [self._gcloud("scp", f"workdirs/{archive}", f"{each[0]}:{archive}", zone) for each in workers]
        return [
            self._gcloud(
                "ssh",
                machine,
                *SSH_FLAGS,
                f"--command={worker_commands(self._job, self._variables(number, index))[step]}",
                zone,
            )
            for machine, number, index in (workers[:1] if step == "follow" else workers)
        ]

    def read_state(self, described: list[str]) -> str:
        """Returns ACTIVE if all machines run, PREEMPTED, INCOMPLETE, or the state of a machine; see `Machines`."""
        slices = [json.loads(text) for text in described]
        rows = [row for members in slices for row in members]
        states = [(row.get("instanceStatus", ""), row.get("currentAction", "NONE")) for row in rows]
        if SPOT in self._capacity and any(status in TAKEN_STATES for status, _ in states):
            return "PREEMPTED"
        if len(rows) < self.workers:
            return "INCOMPLETE"
        if waiting := [state for state in states if state != ("RUNNING", "NONE")]:
            status, action = waiting[0]
            errors = [error for row in rows for error in row.get("lastAttempt", {}).get("errors", {}).get("errors", [])]
            reason = f": {errors[0].get('code', '')} {errors[0].get('message', '')}".rstrip() if errors else ""
            return f"{status if action == 'NONE' else action}{reason}"
        names = [sorted(row["instance"].rpartition("/")[2] for row in members) for members in slices]
        if names != [sorted(members) for members in self._slices]:
            self._slices, self._numbered = names, False
        return "ACTIVE"

    def is_dead(self, state: str) -> bool:
        """Returns whether machines have been taken away, or are no longer in their group.

        Compute Engine restarts all machines of a slice by itself after faults, unless they are Spot machines, which
        must be deleted and created again (docs.cloud.google.com/tpu/docs/failure-recovery). Machines whose time is over
        leave their group.
        """
        return state == "PREEMPTED" or (state == "INCOMPLETE" and not self._requested)

    def identify_workers(self) -> bool:
        """Orders the machines of each slice as their metadata number them; returns whether all of them answered.

        libtpu numbers the processes of a slice by the same metadata. Without it, they stay in the order of their names.
        """
        log("number")
        asked = self._run_on_workers("number", stderr=subprocess.DEVNULL)
        answers = [WORKER_ANSWER.findall(each.stdout) for each in asked]
        if not all(answers):
            return False
        numbers = iter([answer[0].removeprefix("number").strip() for answer in answers])
        for members in self._slices:
            order = {name: next(numbers) for name in members}
            if sorted(order.values()) == sorted(map(str, range(len(members)))):
                members.sort(key=lambda name: int(order[name]))
        self._numbered = True
        return True

    def follow(self) -> bool:
        """Prints what the first worker prints, until its run or the connection ends; returns whether the run ended."""
        return (self._numbered or self.identify_workers()) and super().follow()

    def _create(self) -> None:
        self._request("delete")  # no group, as nothing can be described, but perhaps a template and a policy
        super()._create()

    def _create_commands(self) -> list[list[str]]:
        template = self._gcloud(
            "instance-templates",
            "create",
            self.name,
            f"--machine-type={machine_type(self._tpu)}",
            f"--image-family={self._image}",
            f"--image-project={IMAGE_PROJECT}",
            f"--boot-disk-size={BOOT_DISK}",
            "--scopes=cloud-platform",  # the default may not write to buckets
            "--maintenance-policy=TERMINATE",
            *self._capacity,
        )
        # docs.cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice: a slice of several machines needs a
        # workload policy. Several groups may have the same one (docs.cloud.google.com/compute/docs/instance-groups/
        # about-workload-policies).
        region = region_of(self._zone)
        policy = self._gcloud(
            "resource-policies",
            "create",
            "workload-policy",
            self.name,
            "--type=HIGH_THROUGHPUT",
            f"--accelerator-topology={shape_text(self._tpu)}",
            f"--region={region}",
        )
        project = f"projects/{self._project}/" if self._project else ""
        is_pod = self._tpu.hosts > 1
        groups = [
            self._group(
                "create",
                name,
                f"--size={self._tpu.hosts}",
                f"--template={self.name}",
                # All machines or none (docs.cloud.google.com/compute/docs/instance-groups/about-bulk-mode).
                "--target-size-policy-mode=bulk",
                # A group would replace single machines, which breaks a slice. The same page asks for it.
                "--default-action-on-vm-failure=do-nothing",
                *([f"--workload-policy={project}regions/{region}/resourcePolicies/{self.name}"] if is_pod else []),
                f"--zone={self._zone}",
            )
            for name in self._groups
        ]
        return [template, *([policy] if is_pod else []), *groups]

    def _gcloud(self, *words: str) -> list[str]:
        project = [f"--project={self._project}"] if self._project else []
        return ["gcloud", "compute", *words, *project, "--quiet"]

    def _group(self, verb: str, *words: str) -> list[str]:
        return self._gcloud("instance-groups", "managed", verb, *words)

    def _variables(self, number: int, index: int) -> dict[str, str]:
        """Returns the environment variables by which JAX and libtpu find the other machines.

        The first three are those of jax.distributed.initialize. The others are what JAX reads on Cloud TPU and GKE,
        which set them; no page says that Compute Engine does.

        Args:
            number: the number of its slice.
            index: the index of the machine in all slices.
        """
        first = self._slices[0][0]
        variables = {
            "JAX_COORDINATOR_ADDRESS": f"{first}:{JAX_PORT}",
            "JAX_NUM_PROCESSES": str(self.workers),
            "JAX_PROCESS_ID": str(index),
        }
        if self._job.slices > 1:
            variables |= {
                "MEGASCALE_COORDINATOR_ADDRESS": f"{first}:{SLICES_PORT}",
                "MEGASCALE_NUM_SLICES": str(self._job.slices),
                "MEGASCALE_SLICE_ID": str(number),
            }
        return variables
