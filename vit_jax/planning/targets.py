"""The targets of compilation: a TPU slice that need not be here, `v5e:2x4`, or this machine's `cpu` or `gpu`."""

import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies

from vit_jax import UserError, machine
from vit_jax.planning import chips
from vit_jax.planning.records import PlanRequest

# Without these libtpu takes itself for the host of a pod: it waits for the metadata server and for other users of the
# TPU.
NO_POD = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
POD_PREFIXES = ("MEGASCALE_", "TPU_", "CLOUD_TPU_", "SLURM_", "OMPI_", "JAX_COORDINATOR_", "JAX_NUM_P", "JAX_PROCESS_")


def compiler_environment(request: PlanRequest) -> dict[str, str]:
    """Returns the environment in which the compiler's process finds the devices of the target.

    If that process fails, its last line on stderr is the exception, and not JAX's advice on how to see more of the
    traceback.
    """
    own = {"JAX_TRACEBACK_FILTERING": "off"}
    if chips.is_topology(request.target):
        kept = {key: value for key, value in os.environ.items() if not key.startswith(POD_PREFIXES)}
        return kept | NO_POD | own | {"JAX_PLATFORMS": "cpu"}
    if request.target == "cpu":
        flags = f"{os.environ.get('XLA_FLAGS', '')} {request.emulation_flag}".strip()
        return os.environ | own | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    others = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    return others | own | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # a run on these GPUs keeps its memory


def find_devices(target: str, slices: int) -> list[jax.Device]:
    """Returns the devices of a target: those of `slices` TPU slices, or those of this machine.

    Raises:
        UserError: there is no such slice or device, or libtpu is not installed.
    """
    if not chips.is_topology(target):
        try:
            return jax.devices(target)
        except RuntimeError:
            raise UserError(f"jax finds no {target} here; python -m vit_jax.doctor says why.") from None
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "compiling for TPUs needs libtpu (x86-64 Linux): pip install -e '.[plan]'; then set "
            "JAX_PLATFORMS=cpu for JAX programs of your own, which would look for a TPU."
        )
    tpu = chips.parse_topology(target)
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if tpu.kind == "v4":
        options["chip_config_name"] = "megacore"  # the two cores of a chip are one device, as on real hosts
    if tpu.chips < tpu.chip.pod_chips_per_host:
        options["chips_per_host_bounds"] = [*tpu.shape, 1, 1][:3]
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=target, **options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"libtpu does not know the slice {target}: {str(error).splitlines()[0]}") from None
    return list(topology.devices)


def count_hosts(target: str, slices: int) -> int:
    """Returns the number of machines of some slices; 1 for the devices of this machine."""
    return chips.parse_topology(target).hosts * slices if chips.is_topology(target) else 1


def images_per_host(target: str, sharding: jax.sharding.Sharding, batch: int) -> int:
    """Returns how many images of a batch the busiest host reads; an image that several devices share counts once."""
    # libtpu divides every slice into machines of four chips, even one that a single machine holds.
    single = chips.is_topology(target) and chips.parse_topology(target).hosts == 1
    parts: dict[tuple[int, int], set[tuple[int, int, int]]] = {}
    for device, (rows,) in sharding.devices_indices_map((batch,)).items():
        host = getattr(device, "slice_index", 0), 0 if single else device.process_index
        parts.setdefault(host, set()).add(rows.indices(batch))
    return max(sum(len(range(*rows)) for rows in read) for read in parts.values())


def device_memory(target: str, devices: list[jax.Device]) -> int:
    """Returns the bytes that one of the devices has for a program.

    Raises:
        UserError: jax does not know.
    """
    if chips.is_topology(target):
        return chips.parse_topology(target).chip.hbm
    limit = machine.device_memory(devices)
    if limit is None:
        raise UserError(f"jax does not report how much memory a {devices[0].device_kind} has.")
    return limit
