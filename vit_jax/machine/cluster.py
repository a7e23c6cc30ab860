"""The cluster that a run started here would join, as its environment variables describe it."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vit_jax.machine.finding import Finding


@dataclass(frozen=True)
class Cluster:
    """A kind of cluster that jax joins by itself.

    Attributes:
        name: the name of the kind.
        prefix: a variable whose name begins with it shows that there is such a cluster.
        variables: the variables that jax needs. The first has the number of the process, the second the number of
            processes, or the names of their hosts.
        remedy: what to do so that all of them are set.
    """

    name: str
    prefix: str
    variables: tuple[str, ...]
    remedy: str


CLUSTERS = (
    Cluster(
        "Cloud TPU",
        "TPU_WORKER_HOSTNAMES",
        ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"),
        "export TPU_WORKER_ID=NUMBER",
    ),
    Cluster(
        "TPU slices",
        "MEGASCALE_",
        ("MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES", "MEGASCALE_COORDINATOR_ADDRESS"),
        "export all three, or none of them for one slice",
    ),
    Cluster(
        "Slurm",
        "SLURM_JOB_ID",
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST", "SLURM_LOCALID"),
        "srun python -m vit_jax.main ...; without srun the processes do not find each other",
    ),
    Cluster(
        "Open MPI",
        "OMPI_COMM_WORLD_",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_MCA_orte_hnp_uri"),
        "use mpirun of Open MPI 4, which sets them; without them the processes do not find each other",
    ),
)


def check_cluster(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yields the clusters that a run started here would join, and what would keep its processes from joining them."""
    for cluster in CLUSTERS:
        if not any(key.startswith(cluster.prefix) for key in environment):
            continue
        number, count = (environment.get(key, "?") for key in cluster.variables[:2])
        if "HOSTNAMES" in cluster.variables[1]:  # jax asks first for the processes, of which a machine may have several
            count = str(len(environment.get("TPU_PROCESS_ADDRESSES", count).split(",")))
        message = f"{cluster.name}: process {number} of {count}, counted from 0"
        if absent := set(cluster.variables) - set(environment):
            message = f"{message}; not set: {', '.join(sorted(absent))}"
            yield Finding("warning", "cluster", message, cluster.remedy)
        else:
            yield Finding("ok", "cluster", message)
    proxies = [key for key in environment if key.lower() in ("http_proxy", "https_proxy", "grpc_proxy")]
    if proxies:
        message = f"{', '.join(proxies)} set: the hosts of a cluster may not reach each other through a proxy"
        yield Finding(
            "warning",
            "proxy",
            message,
            f"before training on several hosts, unset {' '.join(proxies)}",
        )
