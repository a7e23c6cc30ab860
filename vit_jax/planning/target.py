"""For what a program is compiled: a TPU slice that need not be here, `v5e:2x4`, or what is here, `cpu` or `gpu`."""

import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies

from vit_jax import UserError
from vit_jax.planning import chips

# libtpu takes itself for the host of a pod, waits for its metadata server and for who else uses it, unless told.
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
OF_A_POD = ("MEGASCALE_", "TPU_", "CLOUD_TPU_", "SLURM_", "OMPI_", "JAX_COORDINATOR_", "JAX_NUM_P", "JAX_PROCESS_")


def environment(target: str, emulated: int) -> dict[str, str]:
    """Returns the variables under which the compiler's process finds the devices of a target."""
    if ":" in target:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(OF_A_POD)}
        return kept | QUIET | {"JAX_PLATFORMS": "cpu"}
    if target == "cpu":
        count = f"--xla_force_host_platform_device_count={emulated}"
        return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()}
    others = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    return others | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # who runs there keeps the memory


def devices(target: str, slices: int) -> list[jax.Device]:
    """Returns the devices of a target, of so many slices.

    Raises:
        UserError: there is no such slice or device, or no libtpu.
    """
    if ":" not in target:
        try:
            return jax.devices(target)
        except RuntimeError:
            raise UserError(f"jax finds no {target} here; python -m vit_jax.doctor says why.") from None
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("compiling for TPUs wants libtpu (x86-64 Linux): pip install -e '.[plan]'.")
    found = chips.parse_topology(target)
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if found.kind == "v4":
        options["chip_config_name"] = "megacore"  # the two cores of a chip as one device, as on real hosts
    if found.chips < found.chip.chips_per_host:
        options["chips_per_host_bounds"] = [*found.shape, 1, 1][:3]
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=target, **options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"libtpu knows no slice {target}: {str(error).splitlines()[0]}") from None
    return list(topology.devices)


def images_per_host(target: str, sharding: jax.sharding.Sharding, batch: int) -> int:
    """Returns how many images of a batch the host reads that reads most, each once whatever devices share it."""
    alone = ":" in target and chips.parse_topology(target).hosts == 1  # libtpu would have machines of four chips
    parts: dict[tuple[int, int], set[tuple[int, int, int]]] = {}
    for device, (rows,) in sharding.devices_indices_map((batch,)).items():
        host = getattr(device, "slice_index", 0), 0 if alone else device.process_index
        parts.setdefault(host, set()).add(rows.indices(batch))
    return max(sum(len(range(*rows)) for rows in found) for found in parts.values())


def memory(target: str, devices: list[jax.Device]) -> int:
    """Returns the bytes that one of the devices has for a program."""
    if ":" in target:
        return chips.parse_topology(target).chip.hbm
    if target == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise UserError(f"jax does not tell how much memory a {devices[0].device_kind} has.")
    return limit
