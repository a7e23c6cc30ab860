"""The accelerators of this machine: whether they start, which processes use them, and whether kernels compute right."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from vit_jax import printable
from vit_jax.machine.finding import Finding

START_SECONDS = 60.0  # that the devices may take to start
GPU_REMEDY = "pip install -e '.[cuda]', or '.[cuda12]' if nvidia-smi shows a driver older than 580"
TPU_REMEDY = "pip install -e '.[tpu]'; to see which process uses the device: sudo lsof /dev/accel* /dev/vfio/*"
TPU_VARIABLES = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "JAX_FORCE_TPU_INIT")
GOOGLE_PCI_VENDOR = "0x1ae0"
NON_TPU_PCI_CLASSES = ("0x01", "0x02")  # the prefixes of disks and of network cards

# Run in another process, since a TPU may wait for ever: for the other hosts of its slice, or for the process that uses
# it.
DEVICE_QUERY = """
import json, jax
devices = jax.local_devices()
memory = (devices[0].memory_stats() or {}).get("bytes_limit")
print(json.dumps([jax.default_backend(), len(devices), devices[0].device_kind, memory]))
"""

KERNEL_SECONDS = 300.0  # that the comparison may take, compilation included
# Run in another process, as the query of the devices is, so that this process does not hold them.
KERNEL_COMPARISON = """
import json
from vit_jax.kernel_trials.correctness import check_example
print(json.dumps(check_example()))
"""


def installed_distributions() -> list[str]:
    """Returns the names of all packages that are installed."""
    return [distribution.name for distribution in metadata.distributions()]


def check_devices(
    seconds: float = START_SECONDS,
    query: str = DEVICE_QUERY,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    installed: Callable[[], Iterable[str]] = installed_distributions,
) -> Iterator[Finding]:
    """Yields the devices that jax finds, and the accelerators that it does not use.

    Args:
        seconds: the most seconds that the devices may take to start.
        query: the program that prints the devices.
        root: the root of the file system.
        environment: the environment variables of this process.
        installed: returns the names of the packages that are installed.
    """
    try:
        asked = subprocess.run([sys.executable, "-c", query], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        remedy = (
            "on a slice of several hosts run this on all of them at once; otherwise stop the process that uses the "
            "device"
        )
        yield Finding("broken", "devices", f"did not start within {seconds:g} s", remedy)
        return
    errors = [line for line in asked.stderr.splitlines() if line.strip()]
    if asked.returncode:
        message = errors[-1] if errors else f"exit code {asked.returncode}"
        remedy = "python -c 'import jax; jax.devices()' shows the whole traceback"
        platforms = environment.get("JAX_PLATFORMS")
        if platforms and (message == "AssertionError" or "initialize backend" in message):
            why = message.partition(": ")[2]  # nothing where jax asserts
            message = f"JAX_PLATFORMS={platforms} names devices that do not start here" + (why and f" ({why})")
            remedy = f"unset JAX_PLATFORMS, which also shows what is missing; {remedy}"
        yield Finding("broken", "devices", message, remedy)
        return
    backend, count, kind, memory = json.loads(asked.stdout.splitlines()[-1])
    size = f", {memory / 2**30:.0f} GiB each" if memory else ""
    yield Finding("ok", "devices", f"{count} x {kind} ({backend}){size}")
    if backend == "cpu":
        here = {"GPU": has_gpu(root, environment), "TPU": has_tpu(root, environment)}
        yield from _check_unused(here, errors, environment, list(installed()))


def has_tpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a TPU seems to be here.

    The signs are its device files, the variables of a TPU's host, or a PCI device of Google's other than the network
    cards and disks that all their machines have. libtpu alone is no sign: `[plan]` brings it too.
    """
    if set(TPU_VARIABLES) & set(environment) or _any_exist(root, "dev/accel[0-9]*", "dev/vfio/[0-9]*"):
        return True
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        with contextlib.suppress(OSError):
            kind = (vendor.parent / "class").read_text()
            if vendor.read_text().strip() == GOOGLE_PCI_VENDOR and not kind.startswith(NON_TPU_PCI_CLASSES):
                return True
    return False


def has_gpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether an NVIDIA GPU seems to be here."""
    nvidia_smi = shutil.which("nvidia-smi", path=environment.get("PATH", ""))
    return bool(nvidia_smi) or _any_exist(root, "dev/nvidia[0-9]*", "dev/dxg")


def _check_unused(
    here: Mapping[str, bool], errors: list[str], environment: Mapping[str, str], installed: list[str]
) -> Iterator[Finding]:
    """Yields the accelerators that seem to be here although jax uses only the CPU; `errors` is what jax printed."""
    for name, package, remedy in (("GPU", "jax-cuda", GPU_REMEDY), ("TPU", "libtpu", TPU_REMEDY)):
        if not here[name]:
            continue
        if "cpu" in environment.get("JAX_PLATFORMS", ""):
            message = f"not used: JAX_PLATFORMS={environment['JAX_PLATFORMS']}"
            yield Finding("warning", name, message, "unset JAX_PLATFORMS")
        elif any(distribution.startswith(package) for distribution in installed):
            reasons = [line for line in errors if "backend" in line.lower()] or ["jax does not say why"]
            yield Finding("broken", name, f"does not start: {reasons[-1]}", remedy)
        else:
            yield Finding("missing", name, f"seems to be present, but no {package} is installed", remedy)


def processes_with_open_files(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Yields (process id, command) of each process that has one of the files open, if this user may see it."""
    targets = {str(path) for path in files}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process is another user's, or has ended
            if targets & {os.readlink(path) for path in (process / "fd").iterdir()}:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield process.name, printable(command.strip(), 80)


def check_tpu_lock(
    root: Path = Path("/"),
    find_holders: Callable[[list[Path]], Iterable[tuple[str, str]]] = processes_with_open_files,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Finding]:
    """Yields which process uses the TPU, or that the lock file which keeps the TPU to one process was left behind.

    Yields nothing without a TPU. There libtpu only compiles, which leaves such a file too but is not hindered by one.
    """
    if not has_tpu(root, environment):
        return
    path = root / "tmp" / "libtpu_lockfile"
    holders = dict(find_holders([path, *root.glob("dev/accel[0-9]*"), *root.glob("dev/vfio/[0-9]*")]))
    names = ", ".join(f"{number} ({command})" for number, command in holders.items())
    if holders:
        yield Finding("warning", "TPU", f"used by process {names}", f"wait for it, or: kill {' '.join(holders)}")
    elif path.exists():
        sudo = "" if os.access(path, os.W_OK) else "sudo "
        if _is_locked(path):
            yield Finding("warning", "TPU", "used by another user's process", f"sudo lsof {path} names it")
        else:
            yield Finding("warning", "TPU lock", f"{path} is stale: no process holds it", f"{sudo}rm {path}")


def _is_locked(path: Path) -> bool:
    """Returns whether a process of any user holds a lock on a file; libtpu locks it with lockf(3)."""
    try:
        with path.open() as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is held, or the file cannot be read
        return True
    return False


def _any_exist(root: Path, *patterns: str) -> bool:
    return any(list(root.glob(pattern)) for pattern in patterns)


def check_kernel(
    seconds: float = KERNEL_SECONDS,
    comparison: str = KERNEL_COMPARISON,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Finding]:
    """Yields whether each kernel equals its plain form on the accelerator here; nothing without one.

    Args:
        seconds: the most seconds that the comparison may take.
        comparison: the program that prints each kernel, the form chosen, and its fault.
        root: the root of the file system.
        environment: the environment variables of this process.
    """
    if not (has_tpu(root, environment) or has_gpu(root, environment)):
        return
    try:
        asked = subprocess.run([sys.executable, "-c", comparison], capture_output=True, text=True, timeout=seconds)
        found = json.loads(asked.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        yield Finding("warning", "kernels", f"were not compared within {seconds:g} s")
        return
    except (IndexError, ValueError):  # the finding about the devices says why
        yield Finding("warning", "kernels", f"were not compared: exit code {asked.returncode}")
        return
    for kernel, kind, fault in found:
        if fault:
            remedy = "nothing: training uses the plain form, which is slower; please report this line"
            yield Finding("warning", kernel, f"{kind} {fault}", remedy)
        else:
            yield Finding("ok", kernel, kind)
