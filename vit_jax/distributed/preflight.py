"""Checks on every host before anything is compiled, to find errors before they cost hours of a pod."""

import contextlib
import hashlib
import os
import platform
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from vit_jax import UserError, __version__, data
from vit_jax.config import flatten_config
from vit_jax.distributed.coordination import Coordinator, run_on_all
from vit_jax.distributed.workdir_lock import WorkdirLock
from vit_jax.storage import versions
from vit_jax.tree import ArrayTree

LIBRARIES = (*versions.COMPILERS, "flax", "optax", "orbax-checkpoint", "grain", *versions.IMAGE_LIBRARIES)
DISK_DELAY = 5.0  # seconds that a shared disk may take to show a file to another host


@contextlib.contextmanager
def preflight_checks(
    coordinator: Coordinator,
    config: ConfigDict,
    info: data.DataInfo,
    batch_sharding: NamedSharding,
    state: ArrayTree,
    location: str,
    lock_lost: Callable[[UserError], None],
) -> Iterator[None]:
    """Checks that the run can begin on all hosts, and holds the lock of its workdir inside the block.

    Args:
        coordinator: exchanges the results of the checks.
        config: the completed configuration, with durations in steps.
        info: what is known of the opened data.
        batch_sharding: splits dimension 0 of a batch over the devices.
        state: the shapes and dtypes of the training state.
        location: the workdir.
        lock_lost: called from another thread if another run takes the workdir during the run.

    Raises:
        UserError: on all hosts, if the hosts differ or do not share the workdir, another run writes there, its disk is
            too small, or images of an evaluation cannot be read.
    """
    check_equal(coordinator, collect_facts(config, info, batch_sharding.mesh, location))
    run_on_all(coordinator, "the images to evaluate", lambda: check_images(config, info, batch_sharding))
    lock, first = WorkdirLock(location, lock_lost), coordinator.host == 0
    try:
        run_on_all(coordinator, "the workdir's lock", lock.acquire if first else lambda: None)
        if not lock.remote:
            run_on_all(coordinator, "the free disk space", lambda: check_disk_space(config, state, Path(location)))
            check_shared(coordinator, Path(location))
        yield
    finally:
        lock.release()


def collect_facts(config: ConfigDict, info: data.DataInfo, mesh: Mesh, location: str) -> dict[str, str]:
    """Returns name -> value of all settings, versions and data that must be equal on every host."""
    devices, installed = mesh.local_devices, versions.library_versions(LIBRARIES)
    return {
        **{f"--config.{key}": str(value) for key, value in flatten_config(config).items()},
        "--workdir": location,
        "the Python version": platform.python_version(),
        "the version of vit_jax": __version__,
        "the source of vit_jax": versions.source_digest(Path(__file__).parent.parent),
        **{f"the version of {name}": installed.get(name, "none") for name in LIBRARIES},
        "the devices": f"{len(devices)} x {devices[0].device_kind}",
        "the mesh": str(dict(mesh.shape)),
        "the data": str(info.fingerprint),
        "a sample of the images": " ".join([info.sample, *(one.get("sample", "") for one in info.evals.values())]),
        "the examples": str({" ".join(key).strip(): len(source) for key, source in info.opened.items()}),
        "MEGASCALE_NUM_SLICES": os.environ.get("MEGASCALE_NUM_SLICES", "unset"),
    }


def check_equal(coordinator: Coordinator, own: dict[str, str]) -> None:
    """Raises UserError if the facts differ between hosts. The message names the facts and the hosts.

    Args:
        coordinator: exchanges the facts; all hosts must call this.
        own: name -> value of this host's facts, with the same names on all hosts.
    """
    # Digests are compared first, as the facts are nearly always equal.
    digests = coordinator.all_gather("preflight", hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    facts = coordinator.all_gather("the facts that differ", own)
    lines = []
    for name in own:
        hosts_by_value = defaultdict(list)
        for host, of_host in enumerate(facts):
            hosts_by_value[of_host[name]].append(host)
        if len(hosts_by_value) > 1:
            groups = sorted(hosts_by_value.items(), key=lambda group: len(group[1]))
            lines.append(f"{name} is {', '.join(f'{value} on {list_hosts(hosts)}' for value, hosts in groups)}")
    if lines:
        more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
        differ = "; ".join(lines[:5])
        raise UserError(
            f"the hosts differ: {differ}{more}. Start all hosts with the same command, installation, data and workdir."
        )


def check_images(config: ConfigDict, info: data.DataInfo, batch_sharding: NamedSharding) -> None:
    """Raises UserError if the header of an image that this host will evaluate shows that the image is unreadable."""
    for name in config.evals:
        for part in range(info.eval_parts[name]):
            data.EvalBatches(config, name, batch_sharding, info.opened, part).check_headers()


def check_shared(coordinator: Coordinator, folder: Path) -> None:
    """Raises UserError if a local workdir is not the same folder on all hosts; all hosts must call this."""
    path = folder / coordinator.all_gather("nonce", f".nonce-{uuid.uuid4().hex}")[0]

    def wait_for_file() -> None:
        end = time.monotonic() + DISK_DELAY
        while not path.exists():
            if time.monotonic() > end:
                raise UserError(
                    f"the workdir {folder} is not the same folder on all hosts; choose one on a disk that all hosts "
                    "share, or on gs://."
                )
            time.sleep(0.05)

    if coordinator.host == 0:
        path.touch()
    try:
        coordinator.all_gather("nonce written")
        run_on_all(coordinator, "the shared workdir", wait_for_file)
    finally:
        path.unlink(missing_ok=True)


def check_disk_space(config: ConfigDict, state: ArrayTree, workdir: Path) -> None:
    """Raises UserError if the disk of a local workdir has too little space for the checkpoints of the run.

    The run needs space for the checkpoints that are kept and for one more. Checkpoints already there are subtracted.
    """
    location = workdir.absolute()
    folder = next(path for path in (location, *location.parents) if path.exists())
    there = [int(path.name) for path in (workdir / "checkpoints").glob("[0-9]*") if path.name.isdigit()]
    left = config.total_steps - max(there, default=0)
    saves = -(-left // min(config.checkpoint_every, config.eval_every))
    keep = config.checkpoint.keep_last + config.checkpoint.keep_best + 1
    more = min(saves, max(keep - len(there), 1))
    each = sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(folder).free
    if free < more * each:
        raise UserError(
            f"the disk of {workdir} has {free / 1e9:.3g} GB free, but {more} more checkpoints need "
            f"{more * each / 1e9:.3g} GB; free disk space, choose another --workdir, or keep fewer "
            "(--config.checkpoint.keep_last)."
        )


def list_hosts(numbers: list[int]) -> str:
    """Returns the hosts as text, such as `host 2` or `hosts 0, 1 and 3`."""
    if len(numbers) == 1:
        return f"host {numbers[0]}"
    return f"hosts {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
