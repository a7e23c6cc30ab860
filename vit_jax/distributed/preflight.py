"""What is looked at on every host before anything is compiled: a minute here is cheaper than an hour of a pod."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from vit_jax import UserError, __version__, data
from vit_jax.config import flatten_config
from vit_jax.distributed.agreement import Share, run_on_all
from vit_jax.distributed.workdir_lock import WorkdirLock

VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
SHIPPED = (".py", ".csv", ".txt")  # what the package is made of
PATIENCE = 5.0  # seconds that a shared disk may take to show a file to another host


@contextlib.contextmanager
def passed(
    share: Share,
    fail: Callable[[Exception], None],
    config: ConfigDict,
    info: data.DataInfo,
    batch_sharding: NamedSharding,
    state: Any,
    place: str,
) -> Iterator[None]:
    """Holds the workdir for this run, once all that can be checked is right on all hosts.

    Args:
        share: how the hosts agree.
        fail: given what is found while the run goes on, by another thread.
        config: completed, with its durations in steps.
        info: what the data told.
        batch_sharding: of the dimension 0 of a batch, over the devices.
        state: shapes of the training state.
        place: the workdir.

    Raises:
        UserError: the hosts differ, do not share the workdir, another run writes there, its disk is too small, or
            images to evaluate cannot be read; on all hosts.
    """
    agree(share, facts(config, info, batch_sharding.mesh, place))
    run_on_all(share, "the images to evaluate", lambda: check_images(config, info, batch_sharding))
    lease, first = WorkdirLock(place, fail), jax.process_index() == 0
    try:
        run_on_all(share, "the workdir's owner", lease.take if first else lambda: "")
        if not lease.remote:
            run_on_all(share, "the disk's room", lambda: check_room(config, state, Path(place)))
            find_shared(share, Path(place), first)
        yield
    finally:
        lease.release()


def facts(config: ConfigDict, info: data.DataInfo, mesh: Mesh, place: str) -> dict[str, str]:
    """Returns, by name, what must be the same on every host."""
    devices = mesh.local_devices
    return {
        **{f"--config.{key}": str(value) for key, value in flatten_config(config).items()},
        "--workdir": place,
        "the Python version": platform.python_version(),
        "the version of vit_jax": __version__,
        "the source of vit_jax": source_digest(Path(__file__).parent),
        **{f"the version of {name}": importlib.metadata.version(name) for name in VERSIONS},
        "the devices": f"{len(devices)} x {devices[0].device_kind}",
        "the mesh": str(dict(mesh.shape)),
        "the data": str(info.fingerprint),
        "the examples": str({split: len(source) for split, source in info.opened.items()}),
        "MEGASCALE_NUM_SLICES": os.environ.get("MEGASCALE_NUM_SLICES", "unset"),
    }


def source_digest(package: Path) -> str:
    """Returns a short digest of the names and contents of a package's source and data files."""
    digest = hashlib.sha256()
    found = [path for path in package.rglob("*") if path.suffix in SHIPPED and path.is_file()]
    for path in sorted(path for path in found if "/." not in f"/{path.relative_to(package).as_posix()}"):
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:12]


def agree(share: Share, own: dict[str, str]) -> None:
    """Raises UserError if the hosts' facts differ, naming which and where."""
    told = [json.loads(text) for text in share("preflight", json.dumps(own))]
    lines = []
    for name in own:
        where = defaultdict(list)
        for host, one in enumerate(told):
            where[one[name]].append(host)
        if len(where) > 1:
            groups = sorted(where.items(), key=lambda group: len(group[1]))
            lines.append(f"{name} is {', '.join(f'{value} on {hosts(who)}' for value, who in groups)}")
    if lines:
        more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
        differ = "; ".join(lines[:5])
        raise UserError(
            f"the hosts differ: {differ}{more}. Start all with the same command, installation, data and workdir."
        )


def check_images(config: ConfigDict, info: data.DataInfo, batch_sharding: NamedSharding) -> str:
    """Raises UserError if images that this host is to evaluate are seen to be unreadable."""
    for name in config.evals:
        data.eval_batches(config, name, batch_sharding, info.opened).check_headers()
    return ""


def find_shared(share: Share, folder: Path, first: bool) -> None:
    """Raises UserError if the workdir that the first host writes to is not the one that the others read."""
    path = folder / share("nonce", f".nonce-{uuid.uuid4().hex}")[0]

    def look() -> str:
        end = time.monotonic() + PATIENCE
        while not path.exists():
            if time.monotonic() > end:
                raise UserError(
                    f"the workdir {folder} is not the same folder on all hosts; choose one on a disk that they share, "
                    "or on gs://."
                )
            time.sleep(0.05)
        return ""

    if first:
        path.touch()
    try:
        share("nonce written", "")
        run_on_all(share, "the shared workdir", look)
    finally:
        path.unlink(missing_ok=True)


def check_room(config: ConfigDict, state: Any, workdir: Path) -> str:
    """Raises UserError if a local workdir's disk has no room for the checkpoints that will be kept, and one more."""
    folder = workdir.absolute()
    while not folder.exists():
        folder = folder.parent
    there = [int(path.name) for path in (workdir / "checkpoints").glob("[0-9]*") if path.name.isdigit()]
    left = config.total_steps - max(there, default=0)
    saves = -(-left // min(config.checkpoint_every, config.eval_every))
    keep = config.checkpoint.keep_last + config.checkpoint.keep_best + 1
    more = min(saves, max(keep - len(there), 1))
    each = sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(folder).free
    if free < more * each:
        raise UserError(
            f"the disk of {workdir} has {free / 1e9:.3g} GB free, but {more} more checkpoints take "
            f"{more * each / 1e9:.3g} GB; free some, choose another --workdir, or keep fewer "
            "(--config.checkpoint.keep_last)."
        )
    return ""


def hosts(numbers: list[int]) -> str:
    """Returns `host 2`, or `hosts 0, 1 and 3`."""
    if len(numbers) == 1:
        return f"host {numbers[0]}"
    return f"hosts {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
