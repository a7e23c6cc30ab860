"""Runs a command on TPU slices of a GKE cluster, as a JobSet that is started again when machines are taken away.

Example:
  python -m launch.gke l16 --topology=v5e:16x16 --image=REGISTRY/vit_jax -- python -m vit_jax.main \\
      --config=configs/vit_l16_jft.py --config.data.source=array_record:gs://my-bucket/jft --workdir=gs://my-bucket/l16

Hands a manifest to kubectl, which knows the cluster; the cluster knows JobSet, and has a node pool for each slice or
makes them itself. launch/Dockerfile makes the image. The same command, given again, changes nothing.
"""

from typing import Any

import yaml

from launch import clouds
from launch.job import PREEMPTED, Job, add_arguments, again, call, check_config, check_output, make, parser, split
from vit_jax import UserError, cli, planning

NODES = "cloud.google.com/gke-"
FINAL = [code for code in range(1, 256) if not again(code)]  # somebody should look
# The ends of a pod that are no fault; Kubernetes tries them in this order.
ENDS: list[dict[str, Any]] = [
    {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},  # its machine goes, whatever the exit code
    {"onExitCodes": {"containerName": "main", "operator": "In", "values": [PREEMPTED]}},
    {"onExitCodes": {"containerName": "main", "operator": "In", "values": FINAL}},
]
# Seconds between SIGTERM and SIGKILL. A save waits for the step that is under way, compiling perhaps, and for the one
# before it to be written. Maintenance leaves that long; machines that are taken away leave less, whatever stands here.
GRACE = 300
# TPUs read and write the memory of programs directly: it is locked. The shell becomes the command, which gets SIGTERM.
SHELL = ["sh", "-c", 'ulimit -l 68719476736; exec "$@"', "sh"]


def manifest(
    job: Job, tpu: planning.Slice, image: str, spot: bool = False, account: str | None = None
) -> dict[str, Any]:
    """Returns the JobSet (jobset.x-k8s.io/v1alpha2) of a run.

    Args:
        job: what to run.
        tpu: each of its slices: a Job, whose pods are the slice's machines.
        image: of the container, with the command's program in it.
        spot: on machines that may be taken away at any time, and cost less.
        account: Kubernetes' service account, which may write to the bucket; None is the namespace's own.
    """
    selector = {
        f"{NODES}tpu-accelerator": clouds.CLOUDS[tpu.kind].label,
        f"{NODES}tpu-topology": "x".join(map(str, tpu.shape)),
    }
    container = {
        "name": "main",
        "image": image,
        "command": [*SHELL, *(word.replace("$", "$$") for word in job.command)],  # which Kubernetes would expand
        "resources": {"limits": {"google.com/tpu": clouds.chips_per_host(tpu)}},
        "securityContext": {"privileged": True},  # may raise the limit of locked memory
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # a host does not come back alone
        "terminationGracePeriodSeconds": GRACE,
        "hostNetwork": True,  # between slices pass gradients
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": selector | ({f"{NODES}spot": "true"} if spot else {}),
        "containers": [container],
    }
    if account:
        pod["serviceAccountName"] = account
    if spot:
        pod["tolerations"] = [{"key": f"{NODES}spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}]
    machines = {
        "completionMode": "Indexed",
        "parallelism": clouds.hosts(tpu),
        "completions": clouds.hosts(tpu),
        "backoffLimit": 0,  # one lost host ends the Job, and with it all of them
        "podFailurePolicy": {"rules": [{"action": "FailJob", **end} for end in ENDS]},
        "template": {"spec": pod},
    }
    # What fits no rule is a fault: all Jobs start again, once none of the old ones lives (they would not find each
    # other), but maxRestarts times at most. Of several failed Jobs any may fit the first rule.
    failures = {
        "maxRestarts": job.restarts,
        "restartStrategy": "BlockingRecreate",
        "rules": [
            {"name": "final", "action": "FailJobSet", **_ended(2)},
            {"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts", **_ended(0, 1)},
        ],
    }
    slices = {"name": "slice", "replicas": job.slices, "template": {"spec": machines}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": job.name,
            # Each Job has a node pool, that is a slice, of its own.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": f"{NODES}nodepool"},
        },
        "spec": {"failurePolicy": failures, "replicatedJobs": [slices]},
    }


def _ended(*places: int) -> dict[str, list[str]]:
    """Returns what a rule of a JobSet asks of a failed Job for one of these `ENDS` of a pod to be the reason: that is
    in the Job's message only, "Container main for pod ... failed with exit code 42 matching FailJob rule at index 1".
    """
    patterns = [f"FailJob rule at index {place}$" for place in places]
    return {"onJobFailureReasons": ["PodFailurePolicy"], "onJobFailureMessagePatterns": patterns}


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `job.make` and `chips.parse_topology`; several slices of one machine each; the cluster refuses.
    """
    options, command = split(argv)
    flags = parser("gke", __doc__)
    flags.add_argument("--topology", required=True, metavar="SLICE", help="each slice, v5e:16x16 for example")
    flags.add_argument("--image", required=True, help="of the container")
    flags.add_argument("--spot", action="store_true", help="cheaper machines, which may be taken away at any time")
    flags.add_argument("--service-account", metavar="NAME", help="Kubernetes', that may write to the bucket")
    add_arguments(flags)
    args = flags.parse_args(options)
    job, tpu = make(args, command), planning.parse_topology(args.topology)
    check_output(job, shared=False, allowed=args.allow_local_output)
    check_config(job, shared=False, devices=tpu.chips * job.slices)
    if job.slices > 1 and clouds.hosts(tpu) == 1:
        raise UserError(f"GKE joins slices of several machines only, and {tpu} is one; choose larger slices.")
    jobset = manifest(job, tpu, args.image, args.spot, args.service_account)
    text = yaml.safe_dump(jobset, sort_keys=False, default_flow_style=None, width=120)
    if args.dry_run:
        print(text, end="")
        return
    if call(["kubectl", "apply", "--filename=-"], input=text).returncode:
        raise UserError("the cluster refuses, for the reason above.")
    print(f"follow: kubectl logs --follow job/{job.name}-slice-0")
    print(f"end it: kubectl delete jobset {job.name}; its nodes cost until their pool is made smaller")


if __name__ == "__main__":
    cli.run(main)
