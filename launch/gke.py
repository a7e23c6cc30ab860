"""Runs a command on TPU slices of a GKE cluster, as a JobSet that is restarted when machines are taken away.

Example:
  python -m launch.gke l16 --topology=v5e:16x16 --image=REGISTRY/vit_jax -- python -m vit_jax.main \\
      --config=configs/vit_l16_jft.py --config.data.source=array_record:gs://my-bucket/jft --workdir=gs://my-bucket/l16

It gives a manifest to kubectl, which must be connected to the cluster. The cluster must have JobSet installed, and have
a node pool for each slice or create node pools itself. launch/Dockerfile makes the image. The same command, given
again, changes nothing. --dry-run prints the manifest, below the commands that create the node pools.
"""

import re
import subprocess
import sys
from typing import Any

import yaml

from launch import clouds
from launch.checks import check_cloud_job
from launch.job import (
    PREEMPTED,
    Job,
    add_job_arguments,
    make_job,
    make_parser,
    run_command,
    shell_line,
    should_restart,
    split_command_line,
)
from vit_jax import UserError, cli
from vit_jax.planning import parse_topology
from vit_jax.planning.chips import Slice

NODE_LABEL = "cloud.google.com/gke-"
FINAL_CODES = [code for code in range(1, 256) if not should_restart(code)]  # errors that need a person
# The ends of a pod that are not faults of the machines, in the order in which Kubernetes tries to match them.
POD_ENDS: list[dict[str, Any]] = [
    {
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]
    },  # the pod's machine is taken away; the exit code does not matter
    {"onExitCodes": {"operator": "In", "values": [PREEMPTED]}},
    {"onExitCodes": {"operator": "In", "values": FINAL_CODES}},
]
POLICY_CHIPS = ("tpu7x",)  # whose node pools name their topology by a workload policy
# What kubectl prints if it knows no cluster, or if the cluster does not answer.
NO_CLUSTER = re.compile(
    r"localhost:8080|connect to the server|connection to the server|current-context|connection refused|no such host"
    r"|i/o timeout"
)
# Seconds between SIGTERM and SIGKILL. A save waits for the current step, which may still be compiling, and for the
# previous save. Kubernetes keeps to this for maintenance, but machines that are taken away end earlier.
GRACE_SECONDS = 300
# TPUs access the memory of programs directly, so that memory is locked and its limit must be raised. `exec` replaces
# the shell by the command, so that the command gets SIGTERM.
SHELL = ["sh", "-c", 'ulimit -l 68719476736; exec "$@"', "sh"]


def make_manifest(job: Job, tpu: Slice, image: str, spot: bool = False, account: str | None = None) -> dict[str, Any]:
    """Returns the JobSet (jobset.x-k8s.io/v1alpha2) of a run.

    Args:
        job: the run.
        tpu: the shape of each of its slices. A slice becomes a Job, and each machine of the slice a pod.
        image: the container image, which contains the program.
        spot: whether to use cheaper machines, which may be taken away at any time.
        account: the Kubernetes service account that may write to the bucket; None: the default of the namespace.
    """
    pod = _make_pod(job.command, tpu, image, spot, account)
    # A single container alone counts, and not what the cluster may add to the pod. Of several, each counts.
    only = {"containerName": "main"} if len(pod["containers"]) == 1 else {}
    ends = [{key: only | end[key] if key == "onExitCodes" else end[key] for key in end} for end in POD_ENDS]
    machines = {
        "completionMode": "Indexed",
        "parallelism": tpu.hosts,
        "completions": tpu.hosts,
        "backoffLimit": 0,  # one lost host ends its Job, which ends all Jobs
        "podFailurePolicy": {"rules": [{"action": "FailJob", **end} for end in ends]},
        "template": {"spec": pod},
    }
    # An end that matches no rule is a fault. All Jobs then start again, at most maxRestarts times, after all old Jobs
    # have ended (otherwise they would not find each other). If several Jobs have failed, any of them may match
    # the first rule.
    failures = {
        "maxRestarts": job.restarts,
        "restartStrategy": "BlockingRecreate",
        "rules": [
            {"name": "final", "action": "FailJobSet", **_match_ends(2)},
            {"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts", **_match_ends(0, 1)},
        ],
    }
    slices = {"name": "slice", "replicas": job.slices, "template": {"spec": machines}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": job.name,
            # Each Job gets a node pool of its own, which is a slice.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": f"{NODE_LABEL}nodepool"},
        },
        "spec": {"failurePolicy": failures, "replicatedJobs": [slices]},
    }


def node_pool_commands(job: Job, tpu: Slice, spot: bool = False) -> list[list[str]]:
    """Returns the commands that create a node pool for each slice of a run.

    The words in capitals are for the user to replace. Source: docs.cloud.google.com/sdk/gcloud/reference/container/
    node-pools/create. TPU7x has a workload policy instead of --tpu-topology
    (docs.cloud.google.com/kubernetes-engine/docs/concepts/tpu-ironwood). A pool of one machine has neither.
    """
    shape = clouds.shape_text(tpu)
    policies, placement = [], []
    if tpu.hosts > 1 and tpu.kind in POLICY_CHIPS:
        name = f"{tpu.kind}-{shape}"
        words = ["gcloud", "compute", "resource-policies", "create", "workload-policy", name, "--type=HIGH_THROUGHPUT"]
        policies = [[*words, f"--accelerator-topology={shape}", "--region=REGION"]]
        placement = [f"--placement-policy={name}"]
    elif tpu.hosts > 1:
        placement = [f"--tpu-topology={shape}"]
    pools = [
        [
            *("gcloud", "container", "node-pools", "create", f"{job.name}-{number}"),
            *("--cluster=CLUSTER", "--location=REGION", "--node-locations=ZONE"),
            *(f"--machine-type={clouds.machine_type(tpu)}", f"--num-nodes={tpu.hosts}", *placement),
            *(["--spot"] if spot else []),
        ]
        for number in range(job.slices)
    ]
    return [*policies, *pools]


def _make_pod(command: tuple[str, ...], tpu: Slice, image: str, spot: bool, account: str | None) -> dict[str, Any]:
    selector = {
        f"{NODE_LABEL}tpu-accelerator": clouds.CHIP_NAMES[tpu.kind].label,
        f"{NODE_LABEL}tpu-topology": clouds.shape_text(tpu),
    }
    # A machine with two NUMA nodes gets a container, and so a process, for each, with half of its chips: GKE gives each
    # container the chips of one node, its number and the addresses of all
    # (docs.cloud.google.com/kubernetes-engine/docs/concepts/tpu-ironwood).
    processes = clouds.CHIP_NAMES[tpu.kind].numa_nodes
    containers = [
        {
            "name": f"main-{number}" if number else "main",
            "image": image,
            "command": [*SHELL, *(word.replace("$", "$$") for word in command)],  # Kubernetes would expand a single $
            "resources": {"limits": {"google.com/tpu": tpu.chips_per_host // processes}},
            "securityContext": {"privileged": True},  # it may raise the limit of locked memory
        }
        for number in range(processes)
    ]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # one host alone cannot rejoin the others
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "hostNetwork": True,  # the fast network for the gradients between slices
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": selector | ({f"{NODE_LABEL}spot": "true"} if spot else {}),
        "containers": containers,
    }
    if account:
        pod["serviceAccountName"] = account
    if spot:
        pod["tolerations"] = [
            {"key": f"{NODE_LABEL}spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        ]
    return pod


def _match_ends(*indices: int) -> dict[str, list[str]]:
    """Returns the conditions of a JobSet rule that matches a failed Job by the end of its pod.

    The end of the pod is found in the Job's message only, such as "Container main for pod ... failed with exit code 42
    matching FailJob rule at index 1".

    Args:
        *indices: indices in `POD_ENDS` of the ends that the rule matches.
    """
    patterns = [f"FailJob rule at index {index}$" for index in indices]
    return {"onJobFailureReasons": ["PodFailurePolicy"], "onJobFailureMessagePatterns": patterns}


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: see `make_job`, `parse_topology` and the checks; or there are several slices of one machine each, or
            the cluster rejects the manifest or cannot be reached.
    """
    options, command = split_command_line(argv)
    flags = make_parser("gke", __doc__)
    flags.add_argument("--topology", required=True, metavar="SLICE", help="each slice, for example v5e:16x16")
    flags.add_argument("--image", required=True, help="of the container")
    flags.add_argument("--spot", action="store_true", help="use cheaper machines, which may be taken away at any time")
    flags.add_argument("--service-account", metavar="NAME", help="of Kubernetes, which may write to the bucket")
    add_job_arguments(flags)
    args = flags.parse_args(options)
    job, tpu = make_job(args, command), parse_topology(args.topology)
    check_cloud_job(job, tpu.devices * job.slices, args.allow_local_output)
    if job.slices > 1 and tpu.hosts == 1:
        raise UserError(f"GKE joins only slices of several machines, and {tpu} is one machine; choose larger slices.")
    jobset = make_manifest(job, tpu, args.image, args.spot, args.service_account)
    text = yaml.safe_dump(jobset, sort_keys=False, default_flow_style=None, width=120)
    if args.dry_run:
        print("# The node pools, unless the cluster has them or creates them itself:")
        print("\n".join(f"# {shell_line(argv)}" for argv in node_pool_commands(job, tpu, args.spot)))
        print(text, end="")
        return
    applied = run_command(["kubectl", "apply", "--filename=-"], input=text, stderr=subprocess.PIPE)
    print(applied.stderr, end="", file=sys.stderr)
    if applied.returncode:
        if NO_CLUSTER.search(applied.stderr):
            advice = "choose one with gcloud container clusters get-credentials NAME."
            raise UserError(f"kubectl cannot reach a cluster; {advice}")
        raise UserError("the cluster rejected the manifest; see the output above.")
    print(f"follow: kubectl logs --follow --container=main job/{job.name}-slice-0")
    print(f"end it: kubectl delete jobset {job.name}; its nodes cost until their pool is made smaller")


if __name__ == "__main__":
    cli.run_command(main)
