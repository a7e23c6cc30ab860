"""What this machine has: devices and who holds them, the cluster around it, memory and disk space.

Nothing here imports jax, which may be what is broken.
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from shutil import disk_usage, which

from vit_jax import UserError, shown
from vit_jax.storage import cache

SECONDS = 60.0  # that the devices may take to start
GPU_REMEDY = "pip install 'vit_jax[cuda]', or [cuda12] if nvidia-smi shows a driver older than 580"
TPU_REMEDY = "pip install 'vit_jax[tpu]'; who holds the device: sudo lsof /dev/accel* /dev/vfio/*"
TPU_VARIABLES = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "JAX_FORCE_TPU_INIT")
GOOGLE = "0x1ae0"  # PCI vendor
NO_TPU = ("0x01", "0x02")  # how PCI classes of disks and network cards begin

# Name, how its variables begin, those that jax wants (number and count of processes first), what sets them all.
CLUSTERS = (
    ("Cloud TPU", "TPU_WORKER_HOSTNAMES", ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"), "export TPU_WORKER_ID=NUMBER"),
    (
        "TPU slices",
        "MEGASCALE_",
        ("MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES", "MEGASCALE_COORDINATOR_ADDRESS"),
        "export all three, or none of them for one slice",
    ),
    (
        "Slurm",
        "SLURM_JOB_ID",
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST", "SLURM_LOCALID"),
        "srun python -m vit_jax.main ..., or the processes do not find each other",
    ),
    (
        "Open MPI",
        "OMPI_COMM_WORLD_",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_MCA_orte_hnp_uri"),
        "Open MPI 4's mpirun sets them; without, the processes do not find each other",
    ),
)

# Asked of a process of its own: the TPU's may wait for ever, for the other hosts of its slice or for who holds it.
QUERY = """
import json, jax
devices = jax.local_devices()
memory = (devices[0].memory_stats() or {}).get("bytes_limit")
print(json.dumps([jax.default_backend(), len(devices), devices[0].device_kind, memory]))
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report: `mark` is ok, missing, warning or broken; `remedy` is what to do, if anything."""

    mark: str
    subject: str
    told: str
    remedy: str = ""


def devices(
    seconds: float = SECONDS, query: str = QUERY, root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Asks jax, in another process, for its devices, and looks for accelerators that it does not use."""
    try:
        asked = subprocess.run([sys.executable, "-c", query], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        remedy = "on a slice of several hosts run it on all of them at once; else end the process that holds the device"
        yield Finding("broken", "devices", f"did not start within {seconds:g} s", remedy)
        return
    said = [line for line in asked.stderr.splitlines() if line.strip()]
    if asked.returncode:
        told = said[-1] if said else f"exit code {asked.returncode}"
        yield Finding("broken", "devices", told, "python -c 'import jax; jax.devices()' shows the whole traceback")
        return
    backend, count, kind, memory = json.loads(asked.stdout.splitlines()[-1])
    size = f", {memory / 2**30:.0f} GiB each" if memory else ""
    yield Finding("ok", "devices", f"{count} x {kind} ({backend}){size}")
    if backend == "cpu":
        yield from _unused(said, root, environment)


def has_tpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a TPU seems to be here: its device files, a PCI device of Google's that is no network card or
    disk, as all their machines have, or the variables of a TPU's host. libtpu alone is no sign: `[plan]` brings it too.
    """
    if set(TPU_VARIABLES) & set(environment) or _exist(root, "dev/accel[0-9]*", "dev/vfio/[0-9]*"):
        return True
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        with contextlib.suppress(OSError):
            kind = (vendor.parent / "class").read_text()
            if vendor.read_text().strip() == GOOGLE and not kind.startswith(NO_TPU):
                return True
    return False


def has_gpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether an NVIDIA GPU seems to be here."""
    found = which("nvidia-smi", path=environment.get("PATH", ""))
    return bool(found) or _exist(root, "dev/nvidia[0-9]*", "dev/dxg")


def _unused(said: list[str], root: Path, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Names the accelerators that seem to be here although jax, which has said this, has only the CPU."""
    gpu, tpu = has_gpu(root, environment), has_tpu(root, environment)
    for name, here, package, remedy in (("GPU", gpu, "jax-cuda", GPU_REMEDY), ("TPU", tpu, "libtpu", TPU_REMEDY)):
        if not here:
            continue
        if "cpu" in environment.get("JAX_PLATFORMS", ""):
            told = f"not used: JAX_PLATFORMS={environment['JAX_PLATFORMS']}"
            yield Finding("warning", name, told, "unset JAX_PLATFORMS")
        elif any(found.name.startswith(package) for found in metadata.distributions()):
            reasons = [line for line in said if "backend" in line.lower()] or ["jax does not say why"]
            yield Finding("broken", name, f"does not start: {reasons[-1]}", remedy)
        else:
            yield Finding("missing", name, f"seems to be here, but no {package} is installed", remedy)


def lock(root: Path = Path("/")) -> Iterator[Finding]:
    """Looks at the lock that keeps a TPU to one process, and at who has the device open."""
    path = root / "tmp" / "libtpu_lockfile"
    holders = dict(_holders([path, *root.glob("dev/accel[0-9]*"), *root.glob("dev/vfio/[0-9]*")]))
    names = ", ".join(f"{number} ({command})" for number, command in holders.items())
    if holders:
        yield Finding("warning", "TPU", f"held by process {names}", f"wait for it, or: kill {' '.join(holders)}")
    elif path.exists():
        sudo = "" if os.access(path, os.W_OK) else "sudo "
        if _locked(path):
            yield Finding("warning", "TPU", "held by another user's process", f"sudo lsof {path} names it")
        else:
            yield Finding("warning", "TPU lock", f"{path} is stale: no process holds it", f"{sudo}rm {path}")


def cluster(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Tells which cluster a run started here would join, and what would keep its processes apart."""
    for name, sign, keys, remedy in CLUSTERS:
        if any(key.startswith(sign) for key in environment):
            number, count = (environment.get(key, "?") for key in keys[:2])
            count = str(len(count.split(","))) if "HOSTNAMES" in keys[1] else count
            told, absent = f"{name}: process {number} of {count}, counted from 0", set(keys) - set(environment)
            if absent:
                yield Finding("warning", "cluster", f"{told}; not set: {', '.join(sorted(absent))}", remedy)
            else:
                yield Finding("ok", "cluster", told)
    proxies = [key for key in environment if key.lower() in ("http_proxy", "https_proxy", "grpc_proxy")]
    if proxies:
        told = f"{', '.join(proxies)} set: the hosts of a cluster may not reach each other through it"
        yield Finding("warning", "proxy", told, f"on a cluster: unset {' '.join(proxies)}")


def room() -> Iterator[Finding]:
    """Tells how much memory there is, and what is free of the disks."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    yield Finding("ok", "memory", f"{total:.0f} GB")
    places = {"this folder": (Path.cwd, 1.0, "run elsewhere, or give --workdir a folder with room")}
    places["cache"] = (cache.root, 5.0, "export VIT_JAX_CACHE=FOLDER, one with room")
    for subject, (find, least, remedy) in places.items():
        try:
            folder = find()
        except UserError as error:
            yield Finding("warning", subject, str(error), remedy)
            continue
        free = disk_usage(folder).free / 1e9
        short = free < least
        yield Finding("warning" if short else "ok", subject, f"{folder}, {free:.3g} GB free", remedy if short else "")


def _holders(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Yields number and command of the processes that have one of the files open, as far as this user may see."""
    targets = {str(path) for path in files}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is another user's, or has ended
            if targets & {os.readlink(path) for path in (process / "fd").iterdir()}:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield process.name, shown(command.strip(), 80)


def _locked(path: Path) -> bool:
    """Returns whether a process, of whatever user, holds a lock on a file: libtpu takes one as of lockf(3)."""
    try:
        with path.open() as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or not to be read
        return True
    return False


def _exist(root: Path, *patterns: str) -> bool:
    return any(list(root.glob(pattern)) for pattern in patterns)
